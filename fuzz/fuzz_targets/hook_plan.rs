//! The planner of windows.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cmt_inject::hook::fuzzing::hook_plan(data));
