//! What `cmt tune` and the payload that it has preloaded into a program say to each other.
//!
//! The payload connects to a Unix socket and sends one byte with the descriptor of its control block, as in
//! [`crate::control`]. The answer is one byte: [`GO`] once the plan and the most threads stand in the block.

/// Environment variable that holds the path of the socket.
pub const SOCKET_VARIABLE: &str = "CMT_TUNE_SOCKET";
/// Environment variable that holds the path of the payload; `cmt-inject/src/launch/preload.s` knows it, too.
pub const PAYLOAD_VARIABLE: &str = "CMT_TUNE_PAYLOAD";
/// The plan is there.
pub const GO: u8 = 1;
