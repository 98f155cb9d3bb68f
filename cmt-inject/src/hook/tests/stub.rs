//! Exports that are stubs, as in driver 535: a compare, a conditional jump, a jump to the implementation.
#![expect(
    unsafe_code,
    reason = "calls the functions that the suite makes, reads the copies of their instructions"
)]

use cmt_common::control::Relocated;
use iced_x86::{Code as Op, Decoder, DecoderOptions, Instruction};

use super::*;

/// cmp dword [rip + d], 0x321cba00: the state, at [`STATE`].
const CMP_STATE: &[u8] = &[0x81, 0x3d, 0xf6, 0x0f, 0, 0, 0x00, 0xba, 0x1c, 0x32];
/// je +0xc; jmp [rip + d]: the implementation's address, at [`IMPLEMENTATION`].
const JE_JMP: &[u8] = &[0x74, 0x0c, 0xff, 0x25, 0xf6, 0x0f, 0, 0];
/// nop; mov eax, 4; ret
const GONE: &[u8] = &[0x66, 0x0f, 0x1f, 0x44, 0, 0, 0xb8, 0x04, 0, 0, 0, 0xc3];
const STATE: u64 = 4096;
const IMPLEMENTATION: u64 = 4104;
/// What a stub returns while its state is [`DOWN`].
const DEINITIALIZED: u64 = 4;
const UP: u32 = 0;
const DOWN: u32 = 0x321c_ba00;

/// A stub of driver 535, its state, and an implementation that sums up its arguments.
fn driver_stub() -> Code {
    let code = Code::new(&[CMP_STATE, JE_JMP, GONE]);
    assert_eq!(code.size, 30);
    with_tables(code)
}

fn with_tables(code: Code) -> Code {
    let implementation = [PUSH_RBP, MOV_RBP_RSP, SUM_OF_SEVEN, LEAVE_RET].concat();
    code.write(2048, &implementation);
    code.write(IMPLEMENTATION, &(code.address + 2048).to_le_bytes());
    code.write(STATE, &UP.to_le_bytes());
    code
}

/// Calls a stub in both states, which `hooked` passes through the replacement.
fn call_both_ways(code: &Code, call: impl Fn() -> u64, hooked: bool) {
    for (state, returned) in [(UP, 28), (DOWN, DEINITIALIZED), (UP, 28)] {
        code.write(STATE, &state.to_le_bytes());
        let wanted = if hooked {
            returned * 100_000_000 + 7_654_321
        } else {
            returned
        };
        assert_eq!(call(), wanted);
    }
}

/// Hooks a stub and puts it back; calls it in both states before, meanwhile and after.
fn hook_and_restore_stub<E: Engine>(code: &Code) -> Prepared {
    call_both_ways(code, || code.call(), false);
    let prepared = hook_and_restore::<E>(code);
    let _guard = lock(&ONE_AT_A_TIME);
    TRAMPOLINE.store(prepared.trampoline, Ordering::SeqCst);
    code.write(prepared.window - code.address, &prepared.patched);
    call_both_ways(code, || code.call(), true);
    code.write(prepared.window - code.address, &prepared.original);
    call_both_ways(code, || code.call(), false);
    prepared
}

/// The instruction at an address of a trampoline.
fn instruction_at(address: u64) -> Instruction {
    // SAFETY: the engine wrote an instruction there, in a page that stays mapped and holds 16 bytes more.
    let code = unsafe { std::slice::from_raw_parts(address as *const u8, 16) };
    Decoder::with_ip(64, code, address, DecoderOptions::NONE).decode()
}

pub(super) fn a_stub_is_hooked_behind_its_compare<E: Engine>() {
    let code = driver_stub();
    let prepared = hook_and_restore_stub::<E>(&code);
    assert_eq!(prepared.window, code.address + 10);
    assert_eq!(prepared.original, JE_JMP);
    assert_eq!(prepared.patched[5..], [0xcc; 3]);

    let [branch, jump] = prepared.relocated.as_slice() else {
        panic!("an entry for each instruction of the window");
    };
    assert_eq!(
        [branch.from, jump.from],
        [code.address + 10, code.address + 12]
    );
    let copy = instruction_at(branch.to);
    assert_eq!(copy.code(), Op::Je_rel32_64);
    assert_eq!(copy.near_branch_target(), code.address + 24);
    assert_eq!(copy.next_ip(), jump.to);
    let copy = instruction_at(jump.to);
    assert_eq!(copy.code(), Op::Jmp_rm64);
    assert_eq!(copy.memory_displacement64(), code.address + IMPLEMENTATION);
    // SAFETY: a thread that stood on the jump goes on at its copy, with the arguments of a function of this type.
    let onward = unsafe { std::mem::transmute::<u64, Seven>(jump.to) };
    assert_eq!(onward(1, 2, 3, 4, 5, 6, 7), 28);
    let compare = instruction_at(prepared.trampoline);
    assert_eq!(compare.code(), Op::Cmp_rm32_imm32);
    assert_eq!(compare.memory_displacement64(), code.address + STATE);
    assert_eq!(compare.immediate32(), DOWN);
}

pub(super) fn a_probe_on_a_stub_is_seen_through<E: Engine>() {
    for (code, probed) in [
        (driver_stub(), 0),
        (
            // Four bytes further on, so that the displacements are four less.
            with_tables(Code::new(&[
                ENDBR64,
                &[0x81, 0x3d, 0xf2, 0x0f, 0, 0, 0x00, 0xba, 0x1c, 0x32],
                &[0x74, 0x0c, 0xff, 0x25, 0xf2, 0x0f, 0, 0],
                GONE,
            ])),
            4,
        ),
    ] {
        let clean = code.prepare::<E>().expect("clean");
        code.write(probed, &[0xcc]);
        let prepared = code.prepare::<E>().expect("probed");
        assert_eq!(prepared.window, code.address + probed + 10);
        assert_eq!(prepared.window, clean.window);
        assert_eq!(prepared.original, clean.original);
        assert_eq!(prepared.patched.len(), clean.patched.len());

        // The kernel runs what its breakpoint hides; here nobody does, so the call starts at the replacement.
        let _guard = lock(&ONE_AT_A_TIME);
        TRAMPOLINE.store(prepared.trampoline, Ordering::SeqCst);
        code.write(prepared.window - code.address, &prepared.patched);
        call_both_ways(&code, || replacement(1, 2, 3, 4, 5, 6, 7), true);
        code.write(probed, &[0x81]);
        call_both_ways(&code, || code.call(), true);
    }
}

pub(super) fn a_displacement_like_an_instruction_hides_no_stub<E: Engine>() {
    // c5 in place of 81 makes a vector instruction of the displacement, and the jumps behind it are the same.
    let compare = &[0xcc, 0x3d, 0xfe, 0x35, 0x93, 0x01, 0x00, 0xba, 0x1c, 0x32];
    let code = Code::new(&[compare, JE_JMP, GONE]);
    let prepared = code.prepare::<E>().expect("probed");
    assert_eq!(prepared.original, JE_JMP);
}

/// A branch that does not reach from the trampoline becomes several instructions: no thread is sent into them.
#[test]
fn the_map_ends_before_a_branch_that_was_rewritten() {
    // The first is too far from a page below the code, the second from one above it.
    for target in [0x7fff_ffd0u32, 0x8000_0010] {
        let code = with_tables(Code::new(&[
            CMP_STATE,
            &[0x0f, 0x84], // je, never taken
            &target.to_le_bytes(),
            PUSH_RBP,
            MOV_RBP_RSP,
            SUM_OF_SEVEN,
            LEAVE_RET,
        ]));
        let _guard = lock(&ONE_AT_A_TIME);
        let prepared = code.prepare::<Builtin>().expect("prepare");
        let near = |moved: &Relocated| moved.to.abs_diff(prepared.trampoline) < 64;
        assert!(prepared.relocated.iter().all(near));
        let is_below = prepared.trampoline < code.address;
        let is_ahead = target < 1 << 31;
        assert_eq!(prepared.relocated.is_empty(), is_below == is_ahead);
        TRAMPOLINE.store(prepared.trampoline, Ordering::SeqCst);
        code.write(10, &prepared.patched);
        assert_eq!(code.call(), 2_807_654_321);
    }
}

pub(super) fn a_stub_may_end_with_a_relative_jump<E: Engine>() {
    // cmp; je +0xb; jmp to the implementation at 2048
    let code = with_tables(Code::new(&[
        CMP_STATE,
        &[0x74, 0x0b, 0xe9, 0xef, 0x07, 0, 0],
        GONE,
    ]));
    let prepared = hook_and_restore_stub::<E>(&code);
    assert_eq!(prepared.original.len(), 7);
    assert_eq!(prepared.relocated.len(), 2);
}

pub(super) fn a_branch_behind_a_compare_is_moved<E: Engine>() {
    // The arguments' sum unless the first is 0 (or not 0), then 4: nothing in the window ends the function.
    for (jump, returned) in [(0x74, 28), (0x75, DEINITIALIZED)] {
        let code = Code::new(&[
            &[0x48, 0x85, 0xff], // test rdi, rdi
            &[jump, 0x1a],       // je or jne
            PUSH_RBP,
            MOV_RBP_RSP,
            SUM_OF_SEVEN,
            LEAVE_RET,
            &[0xb8, 0x04, 0, 0, 0, 0xc3], // mov eax, 4; ret
        ]);
        assert_eq!(code.call(), returned);
        let _guard = lock(&ONE_AT_A_TIME);
        let prepared = code.prepare::<E>().expect("prepare");
        assert_eq!(prepared.window, code.address + 3);
        assert_eq!(prepared.relocated[0].from, prepared.window);
        TRAMPOLINE.store(prepared.trampoline, Ordering::SeqCst);
        code.write(3, &prepared.patched);
        assert_eq!(code.call(), returned * 100_000_000 + 7_654_321);
    }
}

pub(super) fn what_is_no_stub_is_refused_by_name<E: Engine>() {
    let nops: &[u8] = &[0x90; 16];
    for (parts, reason) in [
        (
            // Behind a push a jump is no stub's.
            vec![PUSH_RBP, &[0xff, 0x25, 0, 1, 0, 0], nops],
            "Jmp at +1 stands where the patch would",
        ),
        (
            vec![CMP_STATE, &[0xe8, 0, 1, 0, 0], nops],
            "Call at +10 stands where the patch would",
        ),
        (
            vec![CMP_STATE, &[0x74, 0x10, 0xc3], nops],
            "Ret at +12 stands where the patch would",
        ),
        (
            vec![CMP_STATE, &[0xe2, 0x10], nops],
            "Loop at +10 stands where the patch would",
        ),
        (
            vec![CMP_STATE, &[0xe3, 0x10], nops],
            "Jrcxz at +10 stands where the patch would",
        ),
        (
            // jmp [rax + 8]: what it reads may not be what it seems
            vec![CMP_STATE, &[0x74, 0x0c, 0xff, 0x60, 0x08], nops],
            "Jmp at +12 stands where the patch would",
        ),
        (
            // Four bytes: what follows is not run after them.
            vec![CMP_STATE, &[0x74, 0x0c, 0xeb, 0x08], nops],
            "Jmp at +12 stands where the patch would",
        ),
        (
            vec![CMP_STATE, &[0x74, 0x00, 0xff, 0x25, 0, 1, 0, 0], nops],
            "the branch at +10 leads to where the patch would stand",
        ),
        (
            // jne to the stub's jump
            vec![CMP_STATE, JE_JMP, &[0x75, 0xf8], nops],
            "the branch at +18 leads to where the patch would stand",
        ),
        (
            vec![CMP_STATE, JE_JMP, &[0xcc], nops],
            "a breakpoint at +18 hides an instruction",
        ),
        (
            vec![CMP_STATE, &[0xcc], &JE_JMP[1..], nops],
            "a breakpoint at +10 hides an instruction",
        ),
    ] {
        assert_eq!(refusal::<E>(&parts, true), reason);
    }
}

pub(super) fn a_breakpoint_that_may_hide_something_else_is_refused<E: Engine>() {
    let hidden: &[u8] = &[0xcc, 0x3d, 0xf6, 0x0f, 0, 0];
    let magic: &[u8] = &[0x00, 0xba, 0x1c, 0x32];
    for parts in [
        // cmp byte, imm8 or cmp dword, imm8
        [hidden, &[0x01], JE_JMP],
        // cmp dword, imm32 or mov edi, [rip + disp32]; cmp rdi, 1
        [hidden, &[0x48, 0x83, 0xff, 0x01], JE_JMP],
        // jne in place of je
        [hidden, magic, &[0x75, 0x0c, 0xff, 0x25, 0xf6, 0x0f, 0, 0]],
        // je backwards, je into the jump
        [hidden, magic, &[0x74, 0xf0, 0xff, 0x25, 0xf6, 0x0f, 0, 0]],
        [hidden, magic, &[0x74, 0x02, 0xff, 0x25, 0xf6, 0x0f, 0, 0]],
        // call, jmp [rax + disp32]
        [hidden, magic, &[0x74, 0x0c, 0xff, 0x15, 0xf6, 0x0f, 0, 0]],
        [hidden, magic, &[0x74, 0x0c, 0xff, 0xa0, 0xf6, 0x0f, 0, 0]],
    ] {
        let reason = "a breakpoint at +0 hides an instruction";
        assert_eq!(refusal::<E>(&[&parts.concat(), GONE], true), reason);
    }
    // The je leads behind the function's end.
    let cut_off: [&[u8]; 3] = [hidden, magic, JE_JMP];
    assert_eq!(
        refusal::<E>(&cut_off, true),
        "a breakpoint at +0 hides an instruction"
    );
}
