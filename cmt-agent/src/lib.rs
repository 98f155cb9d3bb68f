//! The host side of cmt: tracing, attaching, reporting.

pub mod commands;
pub mod compare;
pub mod cpus;
pub mod doctor;
pub mod histogram;
pub mod injector;
pub mod probes;
pub mod target;
pub mod trace;
