//! The text of /proc/PID/maps.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cmt_agent::fuzzing::proc_maps(data));
