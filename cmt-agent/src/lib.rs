//! The host side of cmt: tracing, attaching, reporting.

pub mod commands;
pub mod cpus;
pub mod doctor;
pub mod injector;
pub mod target;
