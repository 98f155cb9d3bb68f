//! Where at the beginning of a function to probe it.
//!
//! A probe stands in for the instruction below it. The kernel emulates pushes, no-ops and relative branches
//! (`arch/x86/kernel/uprobes.c`); any other it has to single-step, which makes a probe seven times as expensive. So where a
//! function begins with something else that leaves the stack and the arguments alone, such as `endbr64`, it is probed behind
//! that. Except behind what `cmt attach` leaves in place when it patches a function (`cmt-inject/src/hook/plan.rs`): its jump
//! would stand where the probe goes, and a probe in the middle of an instruction ends the program.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use iced_x86::{
    Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess,
    OpKind, Register,
};

/// How much of a function is looked at: a push is among the first instructions or nowhere near.
const BYTES: usize = 32;
/// What a probe reads: the arguments and the place of the return address.
const NEEDED: [Register; 7] = [
    Register::RDI,
    Register::RSI,
    Register::RDX,
    Register::RCX,
    Register::R8,
    Register::R9,
    Register::RSP,
];

/// Where a function is probed.
pub struct Place {
    /// Offset in the file.
    pub offset: u64,
    /// Whether the kernel has to single-step the instruction there.
    pub single_stepped: bool,
}

/// Where in `file` to probe the function that starts at `offset`.
pub fn probe_at(file: &File, offset: u64) -> io::Result<Place> {
    let mut code = [0; BYTES];
    let mut read = 0;
    while read < BYTES {
        match file.read_at(&mut code[read..], offset + read as u64)? {
            0 => break,
            more => read += more,
        }
    }
    if read == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let skipped = skip(&code[..read]);
    Ok(Place {
        offset: offset + skipped.unwrap_or(0),
        single_stepped: skipped.is_none(),
    })
}

/// Bytes to leave out before the first instruction that the kernel emulates; `None` where none can be reached.
fn skip(code: &[u8]) -> Option<u64> {
    let mut info = InstructionInfoFactory::new();
    for instruction in Decoder::with_ip(64, code, 0, DecoderOptions::NONE) {
        if is_emulated(&instruction) {
            return Some(instruction.ip());
        }
        let harmless = !instruction.is_invalid()
            && !is_kept_by_attach(&instruction)
            && instruction.flow_control() == FlowControl::Next
            && info
                .info(&instruction)
                .used_registers()
                .iter()
                .all(|used| used.access() == OpAccess::Read || !is_needed(used.register()));
        if !harmless {
            return None;
        }
    }
    None
}

fn is_emulated(instruction: &Instruction) -> bool {
    match instruction.mnemonic() {
        Mnemonic::Push => instruction.op0_register().is_gpr64(),
        Mnemonic::Nop => instruction.len() == 1,
        Mnemonic::Jmp => instruction.op0_kind() == OpKind::NearBranch64,
        _ => false,
    }
}

/// `endbr64` is kept as well, but with the instruction behind it.
fn is_kept_by_attach(instruction: &Instruction) -> bool {
    matches!(
        instruction.mnemonic(),
        Mnemonic::Cmp | Mnemonic::Test | Mnemonic::Nop
    )
}

fn is_needed(register: Register) -> bool {
    NEEDED.contains(&register.full_register())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_leaves_stack_and_arguments_alone_is_skipped() {
        for (code, at) in [
            // push rbp; mov rbp, rsp
            (&[0x55, 0x48, 0x89, 0xe5][..], Some(0)),
            // endbr64; push rbp
            (&[0xf3, 0x0f, 0x1e, 0xfa, 0x55], Some(4)),
            // endbr64; push r15
            (&[0xf3, 0x0f, 0x1e, 0xfa, 0x41, 0x57], Some(4)),
            // lea rax, [rip+16]; xor r10d, r10d; push rbx
            (
                &[0x48, 0x8d, 0x05, 0x10, 0, 0, 0, 0x45, 0x31, 0xd2, 0x53],
                Some(10),
            ),
            // cmp dword [rip+16], 0; push rbp
            (&[0x83, 0x3d, 0x10, 0, 0, 0, 0, 0x55], None),
            // test edi, edi; push rbp
            (&[0x85, 0xff, 0x55], None),
            // nop dword [rax]; push rbp
            (&[0x0f, 0x1f, 0x00, 0x55], None),
            // endbr64; cmp dword [rip+16], 0; push rbp
            (
                &[0xf3, 0x0f, 0x1e, 0xfa, 0x83, 0x3d, 0x10, 0, 0, 0, 0, 0x55],
                None,
            ),
            // sub rsp, 8; push rbx
            (&[0x48, 0x83, 0xec, 0x08, 0x53], None),
            // mov rdi, rsi; push rbx
            (&[0x48, 0x89, 0xf7, 0x53], None),
            // mov esi, 1 (the upper half goes, too); push rbx
            (&[0xbe, 1, 0, 0, 0, 0x53], None),
            // endbr64; jmp +5
            (&[0xf3, 0x0f, 0x1e, 0xfa, 0xe9, 5, 0, 0, 0, 0x53], Some(4)),
            // endbr64; jmp [rip+16]
            (&[0xf3, 0x0f, 0x1e, 0xfa, 0xff, 0x25, 16, 0, 0, 0], None),
            // xor eax, eax; ret
            (&[0x31, 0xc0, 0xc3, 0x53], None),
            // push qword [rdi]
            (&[0xff, 0x37, 0x53], None),
            // cut in the middle of an instruction
            (&[0x48, 0x8d], None),
        ] {
            assert_eq!(skip(code), at, "{code:02x?}");
        }
    }
}
