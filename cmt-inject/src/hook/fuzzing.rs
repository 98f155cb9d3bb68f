//! The planner of windows, fed with any bytes. It panics where what must hold of a plan does not.
//!
//! The fuzz target of `fuzz/` calls this, and so does the test below. No part of the product.

use cmt_common::control::{RELOCATED_MAX, WINDOW_MAX};
use iced_x86::{Decoder, DecoderOptions};

use super::builtin::trampoline;
use super::plan::{JUMP_BYTES, Plan};

/// How far from the function the trampoline stands here.
const APART: u64 = 1 << 20;

/// Code of a function: the first byte says whether it is all of it, 5 are its address by pages, the rest is code.
pub fn hook_plan(data: &[u8]) {
    let Some((head, code)) = data.split_first_chunk::<6>() else {
        return;
    };
    let page = u64::from_le_bytes([head[1], head[2], head[3], head[4], head[5], 0, 0, 0]);
    // Below the end of the addresses that a process has.
    let address = (page % (1 << 34) + 1) << 12;
    let Ok(plan) = Plan::of_code(code.to_vec(), address, head[0] & 1 == 1) else {
        return;
    };
    let at = (plan.window - address) as usize;
    let len = plan.original.len();
    assert!((JUMP_BYTES..=WINDOW_MAX).contains(&len));
    assert!(at > 0 && code[at..at + len] == plan.original);
    assert_eq!(plan.moved.iter().map(|it| it.len()).sum::<usize>(), len);

    let thunk = address + APART;
    let patched = plan.patched(thunk).expect("the thunk is in reach");
    assert_eq!(patched.len(), len);
    let mut jump = Decoder::with_ip(64, &patched, plan.window, DecoderOptions::NONE);
    let jump = jump.decode();
    assert!(jump.is_jmp_short_or_near() && jump.near_branch_target() == thunk);
    plan.thunk(thunk, address)
        .expect("what was kept can be undone");

    let Ok((relocated, copies)) = trampoline(&plan, thunk) else {
        return;
    };
    assert!(relocated.len() <= RELOCATED_MAX);
    for moved in &relocated {
        assert!((plan.window..plan.window + len as u64).contains(&moved.from));
        assert!((thunk..thunk + copies.len() as u64).contains(&moved.to));
    }
    // Up to the first branch, the copies do what the originals did.
    let decoded = Decoder::with_ip(64, &copies, thunk, DecoderOptions::NONE);
    for (copy, original) in decoded.into_iter().zip(plan.kept.iter().chain(&plan.moved)) {
        if original.is_jcc_short_or_near() || original.is_jmp_short_or_near() {
            break;
        }
        assert_eq!(copy.mnemonic(), original.mnemonic());
        assert_eq!(copy.op_count(), original.op_count());
        assert_eq!(
            copy.is_ip_rel_memory_operand(),
            original.is_ip_rel_memory_operand()
        );
        // What reads the moved code itself may read the copy: they are the same.
        let read = original.ip_rel_memory_address();
        let moved = address..plan.window + len as u64;
        if original.is_ip_rel_memory_operand() && !moved.contains(&read) {
            assert_eq!(copy.ip_rel_memory_address(), read);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    #[test]
    fn hook_plan() {
        let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds/hook_plan");
        let mut count = 0;
        for entry in std::fs::read_dir(seeds).expect("the seeds") {
            super::hook_plan(&std::fs::read(entry.expect("a seed").path()).expect("a seed"));
            count += 1;
        }
        assert!(count > 0);
    }
}
