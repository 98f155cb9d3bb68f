//! Names of processes and cgroups.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cmt_agent::fuzzing::proc_names(data));
