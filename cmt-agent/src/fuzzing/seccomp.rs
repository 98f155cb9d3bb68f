//! The evaluator of seccomp filters against the kernel's: a child installs the filter and makes the call.
#![expect(unsafe_code, reason = "forks a child that makes bare system calls")]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};
use nix::sys::signal::{SigHandler, Signal, signal};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork};

use crate::injector::seccomp::{Instruction, allows};

/// Every operation that the kernel accepts in a seccomp filter (`seccomp_check_filter`).
const CODES: [u16; 41] = [
    0x20, 0x80, 0x81, 0x06, 0x16, 0x04, 0x0c, 0x14, 0x1c, 0x24, 0x2c, 0x34, 0x3c, 0x54, 0x5c, 0x44,
    0x4c, 0xa4, 0xac, 0x64, 0x6c, 0x74, 0x7c, 0x84, 0x00, 0x01, 0x07, 0x87, 0x60, 0x61, 0x02, 0x03,
    0x05, 0x15, 0x1d, 0x35, 0x3d, 0x25, 0x2d, 0x45, 0x4d,
];
/// Calls that take no arguments, do nothing, and return more than 0.
const CALLS: [i64; 3] = [libc::SYS_getpid, libc::SYS_gettid, libc::SYS_getppid];
const LOAD: u16 = 0x20;
const RETURN: u16 = 0x06;

/// A filter: 8 bytes choose the call and its arguments, and each further 8 are an instruction.
pub fn seccomp(data: &[u8]) {
    let Some((head, program)) = data.split_first_chunk::<8>() else {
        return;
    };
    let seed = u64::from_le_bytes(*head);
    let number = CALLS[(seed % 3) as usize];
    let args = std::array::from_fn(|index| seed.rotate_left(8 * index as u32));
    let mut filter: Vec<Instruction> = program.chunks_exact(8).take(64).map(instruction).collect();
    let len = filter.len();
    let Some(last) = filter.last_mut() else {
        return;
    };
    last.code = RETURN;
    for (index, it) in filter.iter_mut().enumerate() {
        let room = len - 1 - index;
        it.jt = (usize::from(it.jt) % room.max(1)) as u8;
        it.jf = (usize::from(it.jf) % room.max(1)) as u8;
        if it.code == 0x05 {
            it.k %= room.max(1) as u32;
        }
    }
    if let Some(allowed) = allowed_by_kernel(&filter, number, &args) {
        let ours = allows(&filter, number as u32, &args);
        assert_eq!(ours, allowed, "call {number} {args:?}: {filter:?}");
    }
}

/// An instruction that the kernel may accept.
fn instruction(bytes: &[u8]) -> Instruction {
    let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    let k = u32::from(word(4)) | u32::from(word(6)) << 16;
    let code = match word(0) {
        code if CODES.contains(&code) => code,
        code => CODES[usize::from(code) % CODES.len()],
    };
    let k = match code {
        // The address of the instruction that calls is not known beforehand.
        LOAD => match (k % 64) & !3 {
            8 | 12 => 0,
            offset => offset,
        },
        0x60 | 0x61 | 0x02 | 0x03 => k % 16,
        0x64 | 0x74 => k % 32,
        0x34 => k.max(1),
        _ => k,
    };
    Instruction {
        code,
        jt: bytes[2],
        jf: bytes[3],
        k,
    }
}

/// What the child says before it is ended.
struct Said {
    installed: AtomicU32,
    returned: AtomicI64,
}

/// Whether the kernel lets a process under `filter` make the call; `None` if it does not take the filter.
fn allowed_by_kernel(filter: &[Instruction], number: i64, args: &[u64; 6]) -> Option<bool> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    let len = std::num::NonZeroUsize::MIN;
    // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
    let page = unsafe { mmap_anonymous(None, len, prot, MapFlags::MAP_SHARED) }.expect("a page");
    let said: NonNull<Said> = page.cast();
    // SAFETY: the page is zeroed, which is a value of two atomic integers, and stays mapped to the end of this function.
    let said = unsafe { said.as_ref() };
    let us = Pid::this();
    // SAFETY: the child makes bare system calls and stores to the page, and allocates nothing.
    let child = match unsafe { fork() }.expect("a child") {
        ForkResult::Parent { child } => child,
        ForkResult::Child => run(filter, number, args, said),
    };
    let _ = waitpid(child, None);
    let installed = said.installed.load(Ordering::SeqCst) == 1;
    let wanted = if number == libc::SYS_getppid {
        us
    } else {
        child
    };
    let allowed = said.returned.load(Ordering::SeqCst) == i64::from(wanted.as_raw());
    // SAFETY: nothing borrows from the page any more.
    unsafe { nix::sys::mman::munmap(page, 1) }.expect("unmap a page");
    installed.then_some(allowed)
}

/// What the child does: it ends by an instruction, for which no filter can be asked.
fn run(filter: &[Instruction], number: i64, args: &[u64; 6], said: &Said) -> ! {
    for ends in [Signal::SIGILL, Signal::SIGSYS] {
        // SAFETY: the default action runs no code of ours.
        let _ = unsafe { signal(ends, SigHandler::SigDfl) };
    }
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_ptr().cast_mut().cast(),
    };
    let mode = libc::SECCOMP_SET_MODE_FILTER;
    let [a, b, c, d, e, f] = *args;
    // SAFETY: the kernel reads `program`, whose instructions have the layout of `sock_filter`; the call that follows takes
    // no arguments. Nothing else runs in this process, and it ends here.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        if libc::syscall(libc::SYS_seccomp, mode, 0, &raw const program) == 0 {
            said.installed.store(1, Ordering::SeqCst);
            let returned = libc::syscall(number, a, b, c, d, e, f);
            said.returned.store(returned, Ordering::SeqCst);
        }
        std::arch::asm!("ud2", options(noreturn));
    }
}
