//! A whole fleet's copies, as its nodes' `cmt serve` and a Prometheus tell of them. See `docs/fleet.md`.
//!
//! This knows the metrics and the query API; it talks to no node.

mod change;
pub mod compare;
pub mod http_config;
mod latencies;
mod nodes;
pub mod page;
pub mod prometheus;
mod query;
mod recorded;
pub mod report;
mod samples;
pub mod savings;
pub mod table;
pub mod time;

pub use query::Window;
