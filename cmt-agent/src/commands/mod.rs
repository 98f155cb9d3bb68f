//! One module a subcommand: its arguments and its `run`.

pub mod attach;
pub mod bench;
pub mod detach;
pub mod doctor;
pub mod fleet;
pub mod profile;
pub mod serve;
pub mod status;
pub mod trace;
pub mod tune;
