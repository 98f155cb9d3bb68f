//! A library as it stands in a process's memory.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cmt_agent::fuzzing::elf_memory(data));
