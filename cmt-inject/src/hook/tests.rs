//! Functions made of bytes are hooked, called, and put back.
#![expect(
    unsafe_code,
    reason = "writes functions into executable memory and calls them"
)]

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::builtin::Builtin;
use super::{Function, HookEngine, HookError, Prepared};

type Seven = extern "C" fn(u64, u64, u64, u64, u64, u64, u64) -> u64;

const PAGE_BYTES: usize = 8192;
const PUSH_RBP: &[u8] = &[0x55];
const MOV_RBP_RSP: &[u8] = &[0x48, 0x89, 0xe5];
const ENDBR64: &[u8] = &[0xf3, 0x0f, 0x1e, 0xfa];
/// lea rax, [rdi + rsi]; add rax, rdx; add rax, rcx; add rax, r8; add rax, r9; add rax, [rbp + 16]: the seventh argument
/// lies behind the saved rbp and the return address.
const SUM_OF_SEVEN: &[u8] = &[
    0x48, 0x8d, 0x04, 0x37, 0x48, 0x01, 0xd0, 0x48, 0x01, 0xc8, 0x4c, 0x01, 0xc0, 0x4c, 0x01, 0xc8,
    0x48, 0x03, 0x45, 0x10,
];
const LEAVE_RET: &[u8] = &[0xc9, 0xc3];

/// Replacements find the trampoline here; one test uses it at a time.
static TRAMPOLINE: AtomicU64 = AtomicU64::new(0);
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Doubles what the original returns and adds its own weighted sum, so that each argument has to arrive.
extern "C" fn replacement(a: u64, b: u64, c: u64, d: u64, e: u64, f: u64, g: u64) -> u64 {
    let address = TRAMPOLINE.load(Ordering::SeqCst);
    // SAFETY: the test stored the trampoline of a function of this type.
    let original = unsafe { std::mem::transmute::<u64, Seven>(address) };
    let weighted = a + 10 * b + 100 * c + 1_000 * d + 10_000 * e + 100_000 * f + 1_000_000 * g;
    original(a, b, c, d, e, f, g) * 100_000_000 + weighted
}

/// A function in writable and executable memory that is never unmapped, `int3` behind it.
struct Code {
    address: u64,
    size: u64,
}

impl Code {
    fn new(parts: &[&[u8]]) -> Self {
        let bytes = parts.concat();
        // SAFETY: a new anonymous mapping; no memory in use changes.
        let page = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PAGE_BYTES,
                libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(page, libc::MAP_FAILED);
        let code = Self {
            address: page as u64,
            size: bytes.len() as u64,
        };
        code.write(0, &[0xcc; PAGE_BYTES]);
        code.write(0, &bytes);
        code
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        assert!(offset as usize + bytes.len() <= PAGE_BYTES);
        // SAFETY: inside the page, which only this test knows.
        unsafe {
            std::ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                (self.address + offset) as *mut u8,
                bytes.len(),
            );
        }
    }

    fn bytes(&self) -> Vec<u8> {
        // SAFETY: inside the page, which stays mapped.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.size as usize) }
            .to_vec()
    }

    fn call(&self) -> u64 {
        // SAFETY: the page holds a function that takes seven integers and returns one.
        let function = unsafe { std::mem::transmute::<u64, Seven>(self.address) };
        function(1, 2, 3, 4, 5, 6, 7)
    }

    fn prepare(&self) -> Result<Prepared, HookError> {
        prepare(self.address, self.size)
    }
}

fn prepare(address: u64, size: u64) -> Result<Prepared, HookError> {
    let mut engine = Builtin::default();
    let replacement = replacement as *const () as u64;
    let prepared = engine.prepare(Function { address, size }, replacement);
    engine.seal().expect("seal");
    prepared
}

/// Hooks a function that returns the sum of its seven arguments, calls it, puts it back; returns what was prepared.
fn hook_and_restore(code: &Code) -> Prepared {
    let _guard = ONE_AT_A_TIME
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    assert_eq!(code.call(), 28, "the function itself");
    let before = code.bytes();
    let prepared = code.prepare().expect("prepare");
    assert_eq!(code.bytes(), before, "preparing must patch nothing");

    let offset = prepared.window - code.address;
    assert_eq!(prepared.original.len(), prepared.patched.len());
    assert_eq!(prepared.relocated[0].from, prepared.window);
    TRAMPOLINE.store(prepared.trampoline, Ordering::SeqCst);
    code.write(offset, &prepared.patched);
    assert_eq!(code.bytes()[0], before[0], "the first instruction stays");
    assert_eq!(code.call(), 28 * 100_000_000 + 7_654_321, "hooked");

    code.write(offset, &prepared.original);
    assert_eq!(code.bytes(), before, "restored");
    assert_eq!(code.call(), 28, "the original again");
    prepared
}

/// The prologue of libcuda's copy functions, with the compare that reads memory relative to rip.
fn driver_function() -> Code {
    Code::new(&[
        PUSH_RBP,
        MOV_RBP_RSP,
        &[0x41, 0x54],                         // push r12
        &[0x53],                               // push rbx
        &[0x48, 0x83, 0xec, 0x08],             // sub rsp, 8
        &[0x80, 0x3d, 0xee, 0x0f, 0, 0, 0xcc], // cmp byte [rip + 0xfee], 0xcc
        &[0x75, 0x14],                         // jne: never taken, the page is full of int3
        SUM_OF_SEVEN,
        &[0x48, 0x83, 0xc4, 0x08], // add rsp, 8
        &[0x5b],                   // pop rbx
        &[0x41, 0x5c],             // pop r12
        &[0x5d, 0xc3],             // pop rbp; ret
    ])
}

#[test]
fn the_prologue_of_libcuda_gets_a_window_of_two_instructions() {
    let code = driver_function();
    let prepared = hook_and_restore(&code);
    assert_eq!(prepared.window, code.address + 1);
    assert_eq!(prepared.original, [0x48, 0x89, 0xe5, 0x41, 0x54]);
    let from: Vec<u64> = prepared.relocated.iter().map(|moved| moved.from).collect();
    assert_eq!(from, [code.address + 1, code.address + 4]);
    let to: Vec<u64> = prepared.relocated.iter().map(|moved| moved.to).collect();
    assert_eq!(to, [prepared.trampoline + 1, prepared.trampoline + 4]);
}

#[test]
fn an_operand_relative_to_rip_is_moved() {
    // mov rax, [rip + d] reads the eight bytes at offset 4096, then they are added to the sum as 0.
    let code = Code::new(&[
        PUSH_RBP,
        MOV_RBP_RSP,
        &[0x4c, 0x8b, 0x15, 0xf5, 0x0f, 0, 0], // mov r10, [rip + 0xff5]: address + 4096
        SUM_OF_SEVEN,
        &[0x4c, 0x01, 0xd0], // add rax, r10
        LEAVE_RET,
    ]);
    code.write(4096, &0u64.to_le_bytes());
    let prepared = hook_and_restore(&code);
    assert_eq!(prepared.original.len(), 10);
    assert_eq!(
        prepared.patched[5..],
        [0xcc; 5],
        "nothing half is left to run"
    );
}

#[test]
fn behind_endbr64_the_next_instruction_stays_too() {
    let code = Code::new(&[
        ENDBR64,
        PUSH_RBP,
        MOV_RBP_RSP,
        &[0x0f, 0x1f, 0x00],
        SUM_OF_SEVEN,
        LEAVE_RET,
    ]);
    let prepared = hook_and_restore(&code);
    assert_eq!(prepared.window, code.address + 5);
}

#[test]
fn other_first_instructions_are_undone() {
    let start: [(&[u8], &[u8]); 2] = [
        // push r12
        (&[0x41, 0x54], &[0x41, 0x5c]),
        // sub rsp, 8
        (&[0x48, 0x83, 0xec, 0x08], &[0x48, 0x83, 0xc4, 0x08]),
    ];
    for (first, last) in start {
        // The sum reads [rbp + 16]; with rbp = rsp it is where it is behind `push rbp`.
        let code = Code::new(&[
            first,
            &[0x49, 0x89, 0xeb], // mov r11, rbp
            &[0x48, 0x8b, 0xec], // mov rbp, rsp
            SUM_OF_SEVEN,
            &[0x4c, 0x89, 0xdd], // mov rbp, r11
            last,
            &[0xc3],
        ]);
        let prepared = hook_and_restore(&code);
        assert_eq!(prepared.window, code.address + first.len() as u64);
    }
    // A nop needs no undoing: the frame is made in the window.
    let code = Code::new(&[
        &[0x0f, 0x1f, 0x44, 0x00, 0x00],
        PUSH_RBP,
        MOV_RBP_RSP,
        &[0x0f, 0x1f, 0x00],
        SUM_OF_SEVEN,
        LEAVE_RET,
    ]);
    hook_and_restore(&code);
}

#[test]
fn a_probe_on_the_first_instruction_is_seen_through() {
    for (probed, start) in [
        (0, [PUSH_RBP, MOV_RBP_RSP].concat()),
        (0, [ENDBR64, PUSH_RBP, MOV_RBP_RSP].concat()),
        (4, [ENDBR64, PUSH_RBP, MOV_RBP_RSP].concat()),
    ] {
        let code = Code::new(&[&start, &[0x41, 0x54, 0x41, 0x5c], SUM_OF_SEVEN, LEAVE_RET]);
        let clean = code.prepare().expect("clean");
        code.write(probed, &[0xcc]);
        let prepared = code.prepare().expect("probed");
        assert_eq!(prepared.window, clean.window);
        assert_eq!(prepared.original, clean.original);
        // The trampoline runs what the breakpoint hides.
        code.write(probed, &start[probed as usize..][..1]);
        let _guard = ONE_AT_A_TIME
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        TRAMPOLINE.store(prepared.trampoline, Ordering::SeqCst);
        assert_eq!(replacement(1, 2, 3, 4, 5, 6, 7), 2_807_654_321);
    }
}

#[test]
fn hooks_of_one_library_share_a_page() {
    let mut engine = Builtin::default();
    let (one, other) = (driver_function(), driver_function());
    let trampolines: Vec<u64> = [&one, &other]
        .map(|code| {
            let function = Function {
                address: code.address,
                size: code.size,
            };
            engine.prepare(function, 1).expect("prepare").trampoline
        })
        .to_vec();
    assert_ne!(trampolines[0], trampolines[1]);
    assert_eq!(trampolines[0] & !4095, trampolines[1] & !4095);
}

/// The refusal of a function, which stays as it was.
fn refusal(parts: &[&[u8]], size_known: bool) -> String {
    let code = Code::new(parts);
    let before = code.bytes();
    let size = if size_known { code.size } else { 0 };
    let refused = match prepare(code.address, size) {
        Ok(_) => panic!("not refused: {before:02x?}"),
        Err(refused) => refused,
    };
    assert_eq!(code.bytes(), before);
    refused.to_string()
}

#[test]
fn what_cannot_be_patched_is_refused_by_name() {
    let nops: &[u8] = &[0x90; 8];
    for (parts, reason) in [
        (
            vec![&[0xc3][..], nops],
            "starts with Ret, which a thunk cannot undo",
        ),
        (
            vec![&[0xe9, 0, 1, 0, 0][..], nops],
            "starts with Jmp, which a thunk cannot undo",
        ),
        (
            vec![&[0x54][..], nops],
            "starts with Push, which a thunk cannot undo",
        ),
        (
            vec![ENDBR64, &[0x48, 0x89, 0xf8], nops],
            "starts with Mov, which a thunk cannot undo",
        ),
        (
            vec![PUSH_RBP, MOV_RBP_RSP, &[0x5d, 0xc3], nops],
            "Ret at +5 stands where the patch would",
        ),
        (
            vec![PUSH_RBP, &[0xe8, 0, 1, 0, 0], nops],
            "Call at +1 stands where the patch would",
        ),
        (
            vec![PUSH_RBP, &[0x74, 0x10], nops],
            "Je at +1 stands where the patch would",
        ),
        (
            vec![PUSH_RBP, MOV_RBP_RSP, &[0xcc, 0x54], nops],
            "a breakpoint at +4 hides an instruction",
        ),
        (
            vec![&[0xcc][..], &[0x48, 0x83, 0xec, 0x08], nops],
            "a breakpoint at +0 hides an instruction",
        ),
        (
            vec![PUSH_RBP, MOV_RBP_RSP],
            "is 4 bytes long, too short: the patch ends at +6",
        ),
    ] {
        assert_eq!(refusal(&parts, true), reason);
    }
    assert_eq!(
        prepare(replacement as *const () as u64 & 0xfff, 0)
            .err()
            .map(|refused| matches!(refused, HookError::NotCode { .. })),
        Some(true)
    );
}

#[test]
fn a_branch_into_the_window_is_refused_wherever_it_stands() {
    let prologue = [PUSH_RBP, MOV_RBP_RSP, &[0x41, 0x54]].concat();
    // jne to the second instruction of the window, behind an early return that something jumps over.
    let parts: [&[u8]; 4] = [
        &prologue,
        &[0x74, 0x04],             // je over the return
        &[0x41, 0x5c, 0x5d, 0xc3], // pop r12; pop rbp; ret
        &[0x75, 0xf6],             // jne -10: offset 4
    ];
    for size_known in [true, false] {
        let reason = refusal(&parts, size_known);
        assert_eq!(
            reason,
            "the branch at +12 leads to where the patch would stand"
        );
    }
    // A breakpoint in the body hides an instruction that could be such a branch.
    let probed: [&[u8]; 3] = [&prologue, &[0xcc, 0xf6], &[0x41, 0x5c, 0x5d, 0xc3]];
    assert_eq!(
        refusal(&probed, true),
        "a breakpoint at +6 hides an instruction"
    );
}

#[test]
fn a_loop_to_the_function_itself_is_no_obstacle() {
    let parts: [&[u8]; 3] = [
        &[0x55, 0x48, 0x89, 0xe5, 0x41, 0x54],
        &[0x41, 0x5c, 0x5d],
        &[0xeb, 0xf5], // jmp to the first byte: a tail call of itself
    ];
    let code = Code::new(&parts);
    code.prepare().expect("prepare");
}
