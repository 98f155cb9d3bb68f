//! The evaluator of seccomp filters, against the kernel.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cmt_agent::fuzzing::seccomp(data));
