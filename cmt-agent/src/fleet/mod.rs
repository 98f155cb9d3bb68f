//! A whole fleet's copies, as its nodes' `cmt serve` and a Prometheus tell of them. See `docs/fleet.md`.
//!
//! This knows the metrics and the query API; it talks to no node.

mod change;
pub mod http_config;
mod latencies;
mod nodes;
pub mod prometheus;
mod query;
pub mod report;
mod samples;
pub mod table;
pub mod time;

pub use query::Window;
