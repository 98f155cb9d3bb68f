//! The host side of cmt: tracing, attaching, reporting.

pub mod bench;
pub mod commands;
pub mod compare;
pub mod cores;
pub mod cpus;
pub mod doctor;
pub mod fleet;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod histogram;
pub mod html;
pub mod injector;
pub mod keeper;
pub mod launch;
pub mod link;
pub mod origin;
pub mod output_file;
pub mod pipe;
pub mod probes;
pub mod profile;
pub mod serve;
pub mod target;
pub mod topology;
pub mod trace;
pub mod tune;
pub mod wait;
pub mod watch;
pub mod workload;
