//! What both engines agree on: which instructions of a function stay, which make room, and whether that can be done.
//!
//! ```text
//! function:    push rbp          stays: a uprobe may sit on it, now or later
//! window:      mov rbp, rsp      becomes `jmp thunk`
//!              push r12
//! thunk:       pop rbp           undoes what stayed
//!              jmp replacement
//! trampoline:  push rbp; mov rbp, rsp; push r12; jmp behind the window
//! ```
//!
//! Behind `endbr64` one more instruction stays, since there a probe sits better on the second one.
//!
//! An export may be a stub, as in driver 535:
//!
//! ```text
//! function:    cmp dword [rip + state], imm32     stays, and needs no undoing
//! window:      je 1f                              becomes `jmp thunk`
//!              jmp [rip + implementation]
//!           1: mov eax, 4; ret
//! trampoline:  cmp dword [rip + state], imm32; je 1b; jmp [rip + implementation]
//! ```

use cmt_common::control::WINDOW_MAX;
use iced_x86::{
    BlockEncoder, BlockEncoderOptions, Code, Decoder, DecoderError, DecoderOptions, FlowControl,
    Instruction, InstructionBlock, MemoryOperand, Mnemonic, OpKind, Register,
};

use super::near::read_code;
use super::{Function, HookError};

/// Bytes of `jmp rel32`.
pub(super) const JUMP_BYTES: usize = 5;
/// How much of a function of unknown size is looked through.
const SCAN_BYTES: u64 = 4096;
const INT3: u8 = 0xcc;
const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];
const PUSH_RBP: u8 = 0x55;
/// First byte of `cmp dword [rip + disp32], imm32`.
const CMP_DWORD: u8 = 0x81;
/// First byte of `imul edi, [rip + disp32], imm32`, which goes on with the same byte.
const IMUL_DWORD: u8 = 0x69;
/// Bytes of a stub up to the end of its jump.
const STUB_BYTES: usize = 18;
/// Both encodings of `mov rbp, rsp`.
const MOV_RBP_RSP: [[u8; 3]; 2] = [[0x48, 0x89, 0xe5], [0x48, 0x8b, 0xec]];

/// What stays, what moves.
pub(super) struct Plan {
    /// Instructions before the window.
    pub(super) kept: Vec<Instruction>,
    /// Instructions of the window.
    pub(super) moved: Vec<Instruction>,
    /// Address of the window.
    pub(super) window: u64,
    /// Its bytes.
    pub(super) original: Vec<u8>,
}

impl Plan {
    /// Looks at a function; refuses it if a window cannot be replaced.
    pub(super) fn new(function: Function) -> Result<Self, HookError> {
        let Function { address, size } = function;
        let scan = if size == 0 { SCAN_BYTES } else { size };
        Self::of_code(read_code(address, scan)?, address, size != 0)
    }

    /// The same for the bytes of a function at `address`: of all of it if `whole`, else of it and what stands behind it.
    pub(super) fn of_code(mut code: Vec<u8>, address: u64, whole: bool) -> Result<Self, HookError> {
        reveal(&mut code, 0)?;
        if code.starts_with(&ENDBR64) {
            reveal(&mut code, ENDBR64.len())?;
        }

        let mut decoder = Decoder::with_ip(64, &code, address, DecoderOptions::NONE);
        let mut kept = vec![decoder.decode()];
        if kept[0].mnemonic() == Mnemonic::Endbr64 {
            kept.push(decoder.decode());
        }
        for instruction in &kept {
            undo(instruction)?;
        }

        let window = decoder.ip();
        // Jumps are moved only where the function may be a stub.
        let compared = kept.last().is_some_and(compares);
        let mut moved = Vec::new();
        while decoder.ip() - window < JUMP_BYTES as u64 {
            let instruction = decoder.decode();
            let offset = instruction.ip() - address;
            if decoder.last_error() == DecoderError::NoMoreBytes {
                return Err(HookError::TooShort {
                    size: code.len() as u64,
                    needed: window - address + JUMP_BYTES as u64,
                });
            }
            match instruction.flow_control() {
                FlowControl::Next => moved.push(instruction),
                FlowControl::ConditionalBranch
                    if compared && instruction.is_jcc_short_or_near() =>
                {
                    moved.push(instruction);
                }
                FlowControl::UnconditionalBranch | FlowControl::IndirectBranch
                    if compared
                        && leaves(&instruction)
                        && decoder.ip() - window >= JUMP_BYTES as u64 =>
                {
                    moved.push(instruction);
                }
                FlowControl::Interrupt if instruction.mnemonic() == Mnemonic::Int3 => {
                    return Err(HookError::Breakpoint { offset });
                }
                _ => {
                    return Err(HookError::ControlFlow {
                        mnemonic: instruction.mnemonic(),
                        offset,
                    });
                }
            }
        }
        let end = decoder.ip();
        if end - window > WINDOW_MAX as u64 {
            return Err(HookError::WindowTooLong {
                bytes: (end - window) as usize,
            });
        }
        let original = code[(window - address) as usize..(end - address) as usize].to_vec();
        look_for_branches(&code, address, whole, window, end)?;
        Ok(Self {
            kept,
            moved,
            window,
            original,
        })
    }

    /// True if the window ends with a jump: nothing goes on behind it.
    pub(super) fn leaves(&self) -> bool {
        self.moved.last().is_some_and(leaves)
    }

    /// Code that undoes what stayed and goes to the replacement, for `address`.
    pub(super) fn thunk(&self, address: u64, replacement: u64) -> Result<Vec<u8>, HookError> {
        let mut undoing = Vec::new();
        for instruction in self.kept.iter().rev() {
            undoing.extend(undo(instruction)?);
        }
        let mut code = encode(&undoing, address, BlockEncoderOptions::NONE)?.0;
        code.extend(far_jump(replacement));
        Ok(code)
    }

    /// The window with a jump to `thunk` in it.
    pub(super) fn patched(&self, thunk: u64) -> Result<Vec<u8>, HookError> {
        let mut patched = encode(
            &[branch(Code::Jmp_rel32_64, thunk)?],
            self.window,
            BlockEncoderOptions::DONT_FIX_BRANCHES,
        )?
        .0;
        // Reached by nobody; a stray jump ends here instead of running half an instruction.
        patched.resize(self.original.len(), INT3);
        Ok(patched)
    }
}

/// Puts back the byte that a uprobe's `int3` hides at `offset`, where the bytes behind leave no doubt about it.
///
/// Uprobes replace the first byte of an instruction in memory. `int3` before `mov rbp, rsp` stands for `push rbp`, and
/// before the rest of an `endbr64` or of a stub for that; anything else stays unknown.
fn reveal(code: &mut [u8], offset: usize) -> Result<(), HookError> {
    if code.get(offset) != Some(&INT3) {
        return Ok(());
    }
    let behind = &code[offset + 1..];
    if MOV_RBP_RSP.iter().any(|bytes| behind.starts_with(bytes)) {
        code[offset] = PUSH_RBP;
    } else if behind.starts_with(&ENDBR64[1..]) {
        code[offset] = ENDBR64[0];
    } else if is_hidden_stub(&code[offset..]) {
        code[offset] = CMP_DWORD;
    } else {
        return Err(HookError::Breakpoint {
            offset: offset as u64,
        });
    }
    Ok(())
}

/// Whether code whose first byte is hidden is a stub and can be nothing else.
fn is_hidden_stub(code: &[u8]) -> bool {
    let Some(&start) = code.first_chunk::<STUB_BYTES>() else {
        return false;
    };
    let read = |first: u8| -> Vec<Instruction> {
        let mut code = start;
        code[0] = first;
        Decoder::new(64, &code, DecoderOptions::NONE)
            .iter()
            .collect()
    };
    let stub = read(CMP_DWORD);
    let [compare, branch, jump] = stub.as_slice() else {
        return false;
    };
    // The short form `cmp dword, imm8` is not looked for: nothing but the hidden byte tells it from `cmp byte, imm8`.
    let shaped = branch.code() == Code::Je_rel8_64
        && (STUB_BYTES as u64..code.len() as u64).contains(&branch.near_branch_target())
        && jump.code() == Code::Jmp_rm64
        && jump.is_ip_rel_memory_operand();
    // The immediate may be instructions behind a shorter first one, such as `mov edi, [rip + disp32]`. Readings with
    // another operand do not count: the second byte begins `cmp eax, imm32`, and at a function's entry nothing is in
    // eax, or it belongs to a vector instruction's prefix.
    let operand = |instruction: &Instruction| {
        let address = instruction.ip_rel_memory_address();
        let relative = address.wrapping_sub(instruction.next_ip());
        instruction.is_ip_rel_memory_operand().then_some(relative)
    };
    let also = |first: u8| {
        let other = read(first);
        operand(&other[0]) == operand(compare) && other.ends_with(&stub[1..])
    };
    // After `imul` the zero flag is undefined, so that no `je` follows it.
    let excluded = [CMP_DWORD, IMUL_DWORD, INT3];
    shaped && !(0..=u8::MAX).any(|first| !excluded.contains(&first) && also(first))
}

/// An instruction that does nothing but set flags.
fn compares(instruction: &Instruction) -> bool {
    matches!(instruction.mnemonic(), Mnemonic::Cmp | Mnemonic::Test)
}

/// A jump that can be moved and that nothing runs on behind.
fn leaves(instruction: &Instruction) -> bool {
    instruction.is_jmp_short_or_near()
        || instruction.code() == Code::Jmp_rm64 && instruction.is_ip_rel_memory_operand()
}

/// What takes back the effect of a kept instruction at a function's entry, where flags mean nothing.
fn undo(instruction: &Instruction) -> Result<Option<Instruction>, HookError> {
    let to_stack_pointer =
        instruction.op_count() > 0 && instruction.op0_register() == Register::RSP;
    match instruction.mnemonic() {
        Mnemonic::Endbr64 | Mnemonic::Nop => Ok(None),
        _ if compares(instruction) => Ok(None),
        Mnemonic::Push
            if instruction.op0_kind() == OpKind::Register
                && instruction.op0_register().is_gpr64()
                && !to_stack_pointer =>
        {
            Instruction::with1(Code::Pop_r64, instruction.op0_register())
                .map(Some)
                .map_err(not_relocatable)
        }
        Mnemonic::Sub
            if to_stack_pointer
                && matches!(
                    instruction.op1_kind(),
                    OpKind::Immediate8to64 | OpKind::Immediate32to64
                ) =>
        {
            let bytes = instruction.immediate(1) as i64;
            let memory = MemoryOperand::with_base_displ(Register::RSP, bytes);
            Instruction::with2(Code::Lea_r64_m, Register::RSP, memory)
                .map(Some)
                .map_err(not_relocatable)
        }
        mnemonic => Err(HookError::FirstInstruction { mnemonic }),
    }
}

/// Refuses a function in which a branch leads into the window.
///
/// Jump tables are not followed: compilers put no case label into a prologue.
fn look_for_branches(
    code: &[u8],
    address: u64,
    whole: bool,
    window: u64,
    end: u64,
) -> Result<(), HookError> {
    let mut decoder = Decoder::with_ip(64, code, address, DecoderOptions::NONE);
    // The furthest address that a branch before it leads to: the function goes on at least that far.
    let mut furthest = end;
    while decoder.can_decode() {
        let at = decoder.position();
        let instruction = decoder.decode();
        let offset = instruction.ip() - address;
        if instruction.mnemonic() == Mnemonic::Int3 {
            // Padding runs to the end; a single one in the middle is a probe, and what follows cannot be read.
            if code[at..].iter().all(|&byte| byte == INT3) {
                return Ok(());
            }
            return Err(HookError::Breakpoint { offset });
        }
        let target = instruction.near_branch_target();
        if target != 0 {
            if (window..end).contains(&target) {
                return Err(HookError::BranchIntoWindow { offset });
            }
            let inside = (address..address + code.len() as u64).contains(&target);
            if inside && instruction.flow_control() != FlowControl::Call {
                furthest = furthest.max(target);
            }
        }
        let leaves = matches!(
            instruction.flow_control(),
            FlowControl::Return | FlowControl::UnconditionalBranch | FlowControl::IndirectBranch
        );
        if !whole && leaves && decoder.ip() > furthest {
            return Ok(());
        }
    }
    Ok(())
}

pub(super) fn branch(code: Code, target: u64) -> Result<Instruction, HookError> {
    Instruction::with_branch(code, target).map_err(not_relocatable)
}

/// `jmp [rip + 0]`, and the address that it reads: reaches any address and changes no register.
pub(super) fn far_jump(target: u64) -> Vec<u8> {
    let mut code = vec![0xff, 0x25, 0, 0, 0, 0];
    code.extend_from_slice(&target.to_le_bytes());
    code
}

/// Encodes instructions at an address: the bytes, and the offset of each instruction if the options ask for them.
pub(super) fn encode(
    instructions: &[Instruction],
    address: u64,
    options: u32,
) -> Result<(Vec<u8>, Vec<u32>), HookError> {
    let block = InstructionBlock::new(instructions, address);
    let encoded = BlockEncoder::encode(64, block, options).map_err(not_relocatable)?;
    Ok((encoded.code_buffer, encoded.new_instruction_offsets))
}

fn not_relocatable(error: iced_x86::IcedError) -> HookError {
    HookError::NotRelocatable {
        reason: error.to_string(),
    }
}
