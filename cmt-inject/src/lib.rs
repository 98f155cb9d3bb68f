//! The payload.
