//! Attaching by itself: only with `--policy FILE`, and only to what that file names.
//!
//! `file` reads it, `steward` acts by it, one process at a time: each is a `case`, on which `verdict` judges, and `deeds` are what is
//! done to it. `actions` counts them.

mod actions;
mod case;
mod deeds;
mod file;
mod steward;
mod verdict;

pub use actions::{ACTIONS, Actions, MOST_ACTIONS};
pub use file::{Mode, Policy, PolicyError, Rollback, Rule};
pub use steward::start;
