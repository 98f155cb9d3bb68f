//! The built-in engine: instructions are moved with iced-x86.

use cmt_common::control::Relocated;
use iced_x86::{BlockEncoderOptions, Code};

use super::near::Regions;
use super::plan::{Plan, branch, encode};
use super::{Function, HookEngine, HookError, Prepared};

/// Patches from the second instruction on and moves what stood there.
#[derive(Default)]
pub struct Builtin {
    regions: Regions,
}

impl HookEngine for Builtin {
    fn name(&self) -> &'static str {
        "builtin"
    }

    fn prepare(&mut self, function: Function, replacement: u64) -> Result<Prepared, HookError> {
        build(Plan::new(function)?, &mut self.regions, replacement)
    }

    fn seal(&mut self) -> Result<(), HookError> {
        self.regions.close();
        Ok(())
    }
}

/// Writes the trampoline and the thunk of a plan.
pub(super) fn build(
    plan: Plan,
    regions: &mut Regions,
    replacement: u64,
) -> Result<Prepared, HookError> {
    let region = regions.near(plan.window)?;
    let at = region.next_address();
    let (relocated, code) = trampoline(&plan, at)?;
    region.append(&code)?;
    let thunk = region.next_address();
    region.append(&plan.thunk(thunk, replacement)?)?;
    Ok(Prepared {
        window: plan.window,
        patched: plan.patched(thunk)?,
        original: plan.original,
        trampoline: at,
        relocated,
    })
}

/// A trampoline at `address`: the map of the window's instructions, and the code.
pub(super) fn trampoline(
    plan: &Plan,
    address: u64,
) -> Result<(Vec<Relocated>, Vec<u8>), HookError> {
    let mut instructions = plan.kept.clone();
    instructions.extend_from_slice(&plan.moved);
    if !plan.leaves() {
        instructions.push(branch(
            Code::Jmp_rel32_64,
            plan.window + plan.original.len() as u64,
        )?);
    }
    let (code, offsets) = encode(
        &instructions,
        address,
        BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS,
    )?;
    // A branch whose target is out of reach became several instructions, and has no offset: the map ends there.
    let copies = offsets
        .iter()
        .skip(plan.kept.len())
        .take_while(|&&offset| offset != u32::MAX);
    let relocated = plan
        .moved
        .iter()
        .zip(copies)
        .map(|(moved, &offset)| Relocated {
            from: moved.ip(),
            to: address + u64::from(offset),
        })
        .collect();
    Ok((relocated, code))
}
