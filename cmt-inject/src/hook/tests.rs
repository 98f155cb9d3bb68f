//! One suite for all engines: functions made of bytes are hooked, called, and put back.
#![expect(
    unsafe_code,
    reason = "writes functions into executable memory and calls them"
)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::builtin::Builtin;
#[cfg(feature = "frida")]
use super::frida::Frida;
use super::{Function, HookEngine, HookError, Prepared};

mod stub;

use stub::*;

/// What the suite needs of an engine.
trait Engine: HookEngine + Default {}
impl<E: HookEngine + Default> Engine for E {}

/// Makes a test of each case, for each engine that is built in.
macro_rules! suite {
    ($($case:ident)*) => {
        mod builtin {
            $(#[test]
            fn $case() {
                super::$case::<super::Builtin>();
            })*
        }
        #[cfg(feature = "frida")]
        mod frida {
            $(#[test]
            fn $case() {
                super::$case::<super::Frida>();
            })*
        }
    };
}

suite! {
    the_prologue_of_libcuda_gets_a_window_of_two_instructions
    an_operand_relative_to_rip_is_moved
    behind_endbr64_the_next_instruction_stays_too
    other_first_instructions_are_undone
    a_probe_on_the_first_instruction_is_seen_through
    hooks_of_one_library_share_a_page
    what_cannot_be_patched_is_refused_by_name
    a_branch_into_the_window_is_refused_wherever_it_stands
    a_loop_to_the_function_itself_is_no_obstacle
    nothing_stays_writable
    what_was_sealed_runs_on_while_more_is_prepared
    a_branch_behind_the_window_is_no_obstacle
    a_stub_is_hooked_behind_its_compare
    a_probe_on_a_stub_is_seen_through
    a_displacement_like_an_instruction_hides_no_stub
    a_stub_may_end_with_a_relative_jump
    a_branch_behind_a_compare_is_moved
    what_is_no_stub_is_refused_by_name
    a_breakpoint_that_may_hide_something_else_is_refused
}

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
/// An engine may open its pages from the first `prepare` to `seal`; a payload has one thread that does this.
static ONE_PREPARES: Mutex<()> = Mutex::new(());

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

    fn prepare<E: Engine>(&self) -> Result<Prepared, HookError> {
        prepare::<E>(self.address, self.size)
    }

    /// Takes the right to write the page away, as a library's code is mapped.
    fn protect(&self) {
        let rights = libc::PROT_READ | libc::PROT_EXEC;
        // SAFETY: the page is this test's own.
        let done = unsafe { libc::mprotect(self.address as *mut _, PAGE_BYTES, rights) };
        assert_eq!(done, 0);
    }
}

fn lock(mutex: &'static Mutex<()>) -> MutexGuard<'static, ()> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn prepare<E: Engine>(address: u64, size: u64) -> Result<Prepared, HookError> {
    let _guard = lock(&ONE_PREPARES);
    let mut engine = E::default();
    let replacement = replacement as *const () as u64;
    let prepared = engine.prepare(Function { address, size }, replacement);
    engine.seal().expect("seal");
    prepared
}

/// Hooks a function that returns the sum of its seven arguments, calls it, puts it back; returns what was prepared.
fn hook_and_restore<E: Engine>(code: &Code) -> Prepared {
    let _guard = lock(&ONE_AT_A_TIME);
    assert_eq!(code.call(), 28, "the function itself");
    let before = code.bytes();
    let prepared = code.prepare::<E>().expect("prepare");
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

fn the_prologue_of_libcuda_gets_a_window_of_two_instructions<E: Engine>() {
    let code = driver_function();
    let prepared = hook_and_restore::<E>(&code);
    assert_eq!(prepared.window, code.address + 1);
    assert_eq!(prepared.original, [0x48, 0x89, 0xe5, 0x41, 0x54]);
    let from: Vec<u64> = prepared.relocated.iter().map(|moved| moved.from).collect();
    assert_eq!(from, [code.address + 1, code.address + 4]);
    // A thread that stands on either goes on at a copy of it.
    for (moved, bytes) in prepared.relocated.iter().zip([MOV_RBP_RSP, &[0x41, 0x54]]) {
        // SAFETY: the engine put an instruction there, and trampolines stay.
        let copy = unsafe { std::slice::from_raw_parts(moved.to as *const u8, bytes.len()) };
        assert_eq!(copy, bytes);
    }
}

fn an_operand_relative_to_rip_is_moved<E: Engine>() {
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
    let prepared = hook_and_restore::<E>(&code);
    assert_eq!(prepared.original.len(), 10);
    assert_eq!(
        prepared.patched[5..],
        [0xcc; 5],
        "nothing half is left to run"
    );
}

fn behind_endbr64_the_next_instruction_stays_too<E: Engine>() {
    let code = Code::new(&[
        ENDBR64,
        PUSH_RBP,
        MOV_RBP_RSP,
        &[0x0f, 0x1f, 0x00],
        SUM_OF_SEVEN,
        LEAVE_RET,
    ]);
    let prepared = hook_and_restore::<E>(&code);
    assert_eq!(prepared.window, code.address + 5);
}

fn other_first_instructions_are_undone<E: Engine>() {
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
        let prepared = hook_and_restore::<E>(&code);
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
    hook_and_restore::<E>(&code);
}

fn a_probe_on_the_first_instruction_is_seen_through<E: Engine>() {
    for (probed, start) in [
        (0, [PUSH_RBP, MOV_RBP_RSP].concat()),
        (0, [ENDBR64, PUSH_RBP, MOV_RBP_RSP].concat()),
        (4, [ENDBR64, PUSH_RBP, MOV_RBP_RSP].concat()),
    ] {
        let code = Code::new(&[&start, &[0x41, 0x54, 0x41, 0x5c], SUM_OF_SEVEN, LEAVE_RET]);
        let clean = code.prepare::<E>().expect("clean");
        code.write(probed, &[0xcc]);
        let prepared = code.prepare::<E>().expect("probed");
        assert_eq!(prepared.window, clean.window);
        assert_eq!(prepared.original, clean.original);
        // The trampoline runs what the breakpoint hides.
        code.write(probed, &start[probed as usize..][..1]);
        let _guard = lock(&ONE_AT_A_TIME);
        TRAMPOLINE.store(prepared.trampoline, Ordering::SeqCst);
        assert_eq!(replacement(1, 2, 3, 4, 5, 6, 7), 2_807_654_321);
    }
}

fn hooks_of_one_library_share_a_page<E: Engine>() {
    let _guard = lock(&ONE_PREPARES);
    let mut engine = E::default();
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
    engine.seal().expect("seal");
    assert_ne!(trampolines[0], trampolines[1]);
    assert_eq!(trampolines[0] & !4095, trampolines[1] & !4095);
}

/// The refusal of a function, which stays as it was.
fn refusal<E: Engine>(parts: &[&[u8]], size_known: bool) -> String {
    let code = Code::new(parts);
    let before = code.bytes();
    let size = if size_known { code.size } else { 0 };
    let refused = match prepare::<E>(code.address, size) {
        Ok(_) => panic!("not refused: {before:02x?}"),
        Err(refused) => refused,
    };
    assert_eq!(code.bytes(), before);
    refused.to_string()
}

fn what_cannot_be_patched_is_refused_by_name<E: Engine>() {
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
        assert_eq!(refusal::<E>(&parts, true), reason);
    }
    assert_eq!(
        prepare::<E>(replacement as *const () as u64 & 0xfff, 0)
            .err()
            .map(|refused| matches!(refused, HookError::NotCode { .. })),
        Some(true)
    );
}

fn a_branch_into_the_window_is_refused_wherever_it_stands<E: Engine>() {
    let prologue = [PUSH_RBP, MOV_RBP_RSP, &[0x41, 0x54]].concat();
    // jne to the second instruction of the window, behind an early return that something jumps over.
    let parts: [&[u8]; 4] = [
        &prologue,
        &[0x74, 0x04],             // je over the return
        &[0x41, 0x5c, 0x5d, 0xc3], // pop r12; pop rbp; ret
        &[0x75, 0xf6],             // jne -10: offset 4
    ];
    for size_known in [true, false] {
        let reason = refusal::<E>(&parts, size_known);
        assert_eq!(
            reason,
            "the branch at +12 leads to where the patch would stand"
        );
    }
    // A breakpoint in the body hides an instruction that could be such a branch.
    let probed: [&[u8]; 3] = [&prologue, &[0xcc, 0xf6], &[0x41, 0x5c, 0x5d, 0xc3]];
    assert_eq!(
        refusal::<E>(&probed, true),
        "a breakpoint at +6 hides an instruction"
    );
}

fn a_loop_to_the_function_itself_is_no_obstacle<E: Engine>() {
    let parts: [&[u8]; 3] = [
        &[0x55, 0x48, 0x89, 0xe5, 0x41, 0x54],
        &[0x41, 0x5c, 0x5d, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0], // pop r12; pop rbp; nop
        &[0xeb, 0xed], // jmp to the first byte: a tail call of itself
    ];
    let code = Code::new(&parts);
    code.prepare::<E>().expect("prepare");
}

/// The line of the maps that holds an address.
fn mapping(address: u64) -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    let holds = |line: &&str| {
        let (start, end) = line
            .split(' ')
            .next()
            .and_then(|range| range.split_once('-'))
            .expect("a range");
        let parse = |text| u64::from_str_radix(text, 16).expect("an address");
        (parse(start)..parse(end)).contains(&address)
    };
    maps.lines().find(holds).expect("mapped").to_owned()
}

fn nothing_stays_writable<E: Engine>() {
    let code = driver_function();
    code.protect();
    let before = mapping(code.address);
    let prepared = code.prepare::<E>().expect("prepare");
    let _guard = lock(&ONE_PREPARES);
    assert_eq!(
        mapping(code.address),
        before,
        "the kernel puts no uprobe into a writable page"
    );
    for address in [prepared.trampoline, prepared.relocated[0].to] {
        let line = mapping(address);
        let writable = line.split(' ').nth(1).expect("rights").contains('w');
        assert!(!writable, "{line}");
    }
}

fn what_was_sealed_runs_on_while_more_is_prepared<E: Engine>() {
    let _guards = (lock(&ONE_AT_A_TIME), lock(&ONE_PREPARES));
    let mut engine = E::default();
    let mut hooked = Vec::new();
    for _ in 0..3 {
        let code = driver_function();
        let function = Function {
            address: code.address,
            size: code.size,
        };
        let prepared = engine
            .prepare(function, replacement as *const () as u64)
            .expect("prepare");
        engine.seal().expect("seal");
        code.write(1, &prepared.patched);
        hooked.push((code, prepared));
        for (code, prepared) in &hooked {
            TRAMPOLINE.store(prepared.trampoline, Ordering::SeqCst);
            assert_eq!(code.call(), 2_807_654_321);
        }
    }
}

/// gum moves 16 bytes, although the jump takes five; the built-in engine is content with less.
#[cfg(feature = "frida")]
#[test]
fn what_gum_would_move_wrongly_is_refused_by_name() {
    let nine: &[u8] = &[0x0f, 0x1f, 0x80, 0, 0, 0, 0, 0x90, 0x90];
    let start = [PUSH_RBP, MOV_RBP_RSP].concat();
    for (rest, size_known, reason) in [
        (
            LEAVE_RET,
            true,
            "is 15 bytes long, too short: the patch ends at +17",
        ),
        (LEAVE_RET, false, "Ret at +14 stands where the patch would"),
        (
            &[0xe2, 0x00, 0x90, 0x90, 0xc9, 0xc3],
            true,
            "Loop at +13 stands where the patch would",
        ),
        (
            &[0x8f, 0x05, 0, 0, 0, 0, 0xc9, 0xc3],
            true,
            "Pop at +13 stands where the patch would",
        ),
    ] {
        let parts: [&[u8]; 3] = [&start, nine, rest];
        assert_eq!(refusal::<Frida>(&parts, size_known), reason);
        Code::new(&parts).prepare::<Builtin>().expect("builtin");
    }
}

/// A branch that gum moves goes where it went.
fn a_branch_behind_the_window_is_no_obstacle<E: Engine>() {
    for flag in [0x74, 0x75] {
        let code = Code::new(&[
            PUSH_RBP,
            MOV_RBP_RSP,
            &[0x41, 0x54],                   // push r12
            &[0x4c, 0x8b, 0x65, 0x00],       // mov r12, [rbp]
            &[0x48, 0x85, 0xff, flag, 0x01], // test rdi, rdi; je or jne over the next
            &[0x90],                         // nop
            SUM_OF_SEVEN,
            &[0x41, 0x5c],
            LEAVE_RET,
        ]);
        hook_and_restore::<E>(&code);
    }
}

/// Under `PR_SET_MDWE` no memory may become executable after it was writable: gum would crash, so it is not asked.
#[cfg(feature = "frida")]
#[test]
fn where_code_must_not_be_writable_gum_is_refused_by_name() {
    let test = "hook::tests::in_a_process_where_code_must_not_be_writable";
    let finished = std::process::Command::new(std::env::current_exe().expect("this program"))
        .args([test, "--exact", "--ignored"])
        .output()
        .expect("start this program");
    assert!(finished.status.success(), "{finished:?}");
    assert!(String::from_utf8_lossy(&finished.stdout).contains("1 passed"));
}

#[cfg(feature = "frida")]
#[test]
#[ignore = "changes its process; the test above starts it in one of its own"]
fn in_a_process_where_code_must_not_be_writable() {
    let code = driver_function();
    // SAFETY: forbids what this process does not do from here on.
    if unsafe { libc::prctl(libc::PR_SET_MDWE, libc::PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0) } != 0 {
        return; // Linux before 6.3
    }
    let refused = code.prepare::<Frida>().err().expect("refused").to_string();
    let reason = "mapping writable and executable memory for frida-gum failed";
    assert_eq!(refused, reason);
    hook_and_restore::<Builtin>(&code);
}

/// The figures of docs/hooks.md.
fn figures<E: Engine>() {
    const FUNCTIONS: usize = 24;
    let _guard = lock(&ONE_PREPARES);
    let codes: Vec<Code> = (0..FUNCTIONS).map(|_| driver_function()).collect();
    let mut engine = E::default();
    let mut times = Vec::new();
    let mut prepared = None;
    for code in &codes {
        let function = Function {
            address: code.address,
            size: code.size,
        };
        let start = Instant::now();
        prepared = Some(engine.prepare(function, 1).expect("prepare"));
        times.push(start.elapsed());
    }
    let start = Instant::now();
    engine.seal().expect("seal");
    let (seal, first) = (start.elapsed(), times[0]);
    times.sort();
    let patch = prepared.expect("one at least").patched.len();
    println!(
        "{}: first {first:?}, median {:?}, seal {seal:?}, patch {patch} bytes",
        engine.name(),
        times[FUNCTIONS / 2],
    );
}

#[test]
#[ignore = "prints figures, checks nothing"]
fn figures_of_builtin() {
    figures::<Builtin>();
}

#[cfg(feature = "frida")]
#[test]
#[ignore = "prints figures, checks nothing"]
fn figures_of_frida() {
    figures::<Frida>();
}
