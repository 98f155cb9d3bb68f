//! The built-in engine: instructions are moved with iced-x86.
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

use cmt_common::control::{Relocated, WINDOW_MAX};
use iced_x86::{
    BlockEncoder, BlockEncoderOptions, Code, Decoder, DecoderError, DecoderOptions, FlowControl,
    Instruction, InstructionBlock, MemoryOperand, Mnemonic, OpKind, Register,
};

use super::near::{Region, read_code};
use super::{Function, HookEngine, HookError, Prepared};

/// Bytes of `jmp rel32`.
pub(super) const JUMP_BYTES: usize = 5;
/// How much of a function of unknown size is looked through.
const SCAN_BYTES: u64 = 4096;
/// More than a trampoline and a thunk take together: two kept instructions, a window and their undoing.
const HOOK_BYTES: u64 = 256;
const INT3: u8 = 0xcc;
const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];
const PUSH_RBP: u8 = 0x55;
/// Both encodings of `mov rbp, rsp`.
const MOV_RBP_RSP: [[u8; 3]; 2] = [[0x48, 0x89, 0xe5], [0x48, 0x8b, 0xec]];

/// Patches from the second instruction on and moves what stood there.
#[derive(Default)]
pub struct Builtin {
    /// Open for more hooks until [`HookEngine::seal`]. Their mappings stay for good.
    regions: Vec<Region>,
}

impl HookEngine for Builtin {
    fn name(&self) -> &'static str {
        "builtin"
    }

    fn prepare(&mut self, function: Function, replacement: u64) -> Result<Prepared, HookError> {
        let plan = Plan::new(function)?;
        let region = self.region(plan.window)?;

        let (trampoline, relocated, code) = plan.trampoline(region.next_address())?;
        region.append(&code)?;
        let thunk = region.next_address();
        region.append(&plan.thunk(thunk, replacement)?)?;

        let mut patched = encode(
            &[branch(Code::Jmp_rel32_64, thunk)?],
            plan.window,
            BlockEncoderOptions::DONT_FIX_BRANCHES,
        )?
        .0;
        // Reached by nobody; a stray jump ends here instead of running half an instruction.
        patched.resize(plan.original.len(), INT3);
        Ok(Prepared {
            window: plan.window,
            original: plan.original,
            patched,
            trampoline,
            relocated,
        })
    }

    fn seal(&mut self) -> Result<(), HookError> {
        // Closes the only way to write them; they were mapped executable all along.
        self.regions.clear();
        Ok(())
    }
}

impl Builtin {
    fn region(&mut self, address: u64) -> Result<&mut Region, HookError> {
        let fits = |region: &Region| region.reaches(address) && region.has_room(HOOK_BYTES);
        let index = match self.regions.iter().position(fits) {
            Some(index) => index,
            None => {
                self.regions.push(Region::near(address)?);
                self.regions.len() - 1
            }
        };
        Ok(&mut self.regions[index])
    }
}

/// What stays, what moves.
struct Plan {
    /// Instructions before the window.
    kept: Vec<Instruction>,
    /// Instructions of the window.
    moved: Vec<Instruction>,
    window: u64,
    original: Vec<u8>,
}

impl Plan {
    fn new(function: Function) -> Result<Self, HookError> {
        let Function { address, size } = function;
        let scan = if size == 0 { SCAN_BYTES } else { size };
        let mut code = read_code(address, scan)?;
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
        look_for_branches(&code, address, size != 0, window, end)?;
        Ok(Self {
            kept,
            moved,
            window,
            original,
        })
    }

    /// Address, map of the window's instructions and code of the trampoline.
    fn trampoline(&self, address: u64) -> Result<(u64, Vec<Relocated>, Vec<u8>), HookError> {
        let mut instructions = self.kept.clone();
        instructions.extend_from_slice(&self.moved);
        instructions.push(branch(
            Code::Jmp_rel32_64,
            self.window + self.original.len() as u64,
        )?);
        let (code, offsets) = encode(
            &instructions,
            address,
            BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS,
        )?;
        let copies = offsets.iter().skip(self.kept.len());
        let relocated = self
            .moved
            .iter()
            .zip(copies)
            .map(|(moved, &offset)| Relocated {
                from: moved.ip(),
                to: address + u64::from(offset),
            })
            .collect();
        Ok((address, relocated, code))
    }

    fn thunk(&self, address: u64, replacement: u64) -> Result<Vec<u8>, HookError> {
        let mut undoing = Vec::new();
        for instruction in self.kept.iter().rev() {
            undoing.extend(undo(instruction)?);
        }
        let mut code = encode(&undoing, address, BlockEncoderOptions::NONE)?.0;
        // jmp [rip+0], and the address it reads. Reaches any address and changes no register.
        code.extend_from_slice(&[0xff, 0x25, 0, 0, 0, 0]);
        code.extend_from_slice(&replacement.to_le_bytes());
        Ok(code)
    }
}

/// Puts back the byte that a uprobe's `int3` hides at `offset`, where the bytes behind leave no doubt about it.
///
/// Uprobes replace the first byte of an instruction in memory. `int3` before `mov rbp, rsp` stands for `push rbp`, and
/// before the rest of an `endbr64` for that; anything else stays unknown.
fn reveal(code: &mut [u8], offset: usize) -> Result<(), HookError> {
    if code.get(offset) != Some(&INT3) {
        return Ok(());
    }
    let behind = &code[offset + 1..];
    if MOV_RBP_RSP.iter().any(|bytes| behind.starts_with(bytes)) {
        code[offset] = PUSH_RBP;
    } else if behind.starts_with(&ENDBR64[1..]) {
        code[offset] = ENDBR64[0];
    } else {
        return Err(HookError::Breakpoint {
            offset: offset as u64,
        });
    }
    Ok(())
}

/// What takes back the effect of a kept instruction at a function's entry, where flags mean nothing.
fn undo(instruction: &Instruction) -> Result<Option<Instruction>, HookError> {
    let to_stack_pointer =
        instruction.op_count() > 0 && instruction.op0_register() == Register::RSP;
    match instruction.mnemonic() {
        Mnemonic::Endbr64 | Mnemonic::Nop => Ok(None),
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

fn branch(code: Code, target: u64) -> Result<Instruction, HookError> {
    Instruction::with_branch(code, target).map_err(not_relocatable)
}

/// Encodes instructions at an address: the bytes, and the offset of each instruction if the options ask for them.
fn encode(
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
