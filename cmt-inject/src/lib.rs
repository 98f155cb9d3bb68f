//! The payload.

pub mod hook;
