//! A file that a process maps as code.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cmt_agent::fuzzing::elf_file(data));
