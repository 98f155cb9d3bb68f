//! A control block that the target has written.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cmt_agent::fuzzing::control_block(data));
