//! Would a target's seccomp filters let the payload in?
//!
//! The filters are read with ptrace and evaluated for every system call that the bootstrap and the payload make. Docker's
//! default profile shows `Seccomp: 2` too and allows them all, so the mode alone says nothing.
#![expect(unsafe_code, reason = "a ptrace request that nix does not wrap")]

use nix::errno::Errno;

use super::threads::Stopped;

/// `struct sock_filter` of `linux/filter.h`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Instruction {
    /// Operation.
    pub code: u16,
    /// Instructions to skip if the comparison holds.
    pub jt: u8,
    /// Instructions to skip if it does not.
    pub jf: u8,
    /// Operand.
    pub k: u32,
}

/// The action that lets a call through.
const ALLOW: u32 = 0x7fff_0000;
/// Lets it through and logs it.
const LOG: u32 = 0x7ffc_0000;
/// Makes it fail.
const ERRNO: u32 = 0x0005_0000;
const ACTION_MASK: u32 = 0xffff_0000;
const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;
/// `CLONE_VM|FS|FILES|SIGHAND|THREAD|SYSVSEM|SETTLS|PARENT_SETTID|CHILD_CLEARTID`, as `pthread_create` passes them.
const THREAD_FLAGS: u64 = 0x003d_0f00;

/// What the bootstrap and the payload call, with the arguments that filters look at.
const NEEDED: &[(&str, i64, [u64; 6])] = &[
    ("memfd_create", libc::SYS_memfd_create, [0, 1, 0, 0, 0, 0]),
    ("ftruncate", libc::SYS_ftruncate, [0; 6]),
    ("mmap", libc::SYS_mmap, [0, 4096, 5, 1, 3, 0]),
    ("mprotect", libc::SYS_mprotect, [0, 4096, 3, 0, 0, 0]),
    ("munmap", libc::SYS_munmap, [0; 6]),
    ("madvise", libc::SYS_madvise, [0, 4096, 18, 0, 0, 0]),
    ("clone", libc::SYS_clone, [THREAD_FLAGS, 0, 0, 0, 0, 0]),
    ("futex", libc::SYS_futex, [0; 6]),
    (
        "rt_sigprocmask",
        libc::SYS_rt_sigprocmask,
        [2, 0, 0, 8, 0, 0],
    ),
    ("gettid", libc::SYS_gettid, [0; 6]),
    (
        "prctl",
        libc::SYS_prctl,
        [libc::PR_SET_NAME as u64, 0, 0, 0, 0, 0],
    ),
    (
        "openat",
        libc::SYS_openat,
        [libc::AT_FDCWD as u64, 0, 0, 0, 0, 0],
    ),
    ("read", libc::SYS_read, [0; 6]),
    ("pread64", libc::SYS_pread64, [0; 6]),
    ("pwrite64", libc::SYS_pwrite64, [0; 6]),
    ("lseek", libc::SYS_lseek, [0; 6]),
    ("newfstatat", libc::SYS_newfstatat, [3, 0, 0, 0x1000, 0, 0]),
    ("set_robust_list", libc::SYS_set_robust_list, [0; 6]),
    ("sched_setaffinity", libc::SYS_sched_setaffinity, [0; 6]),
    ("close", libc::SYS_close, [0; 6]),
    ("sched_getaffinity", libc::SYS_sched_getaffinity, [0; 6]),
    ("clock_nanosleep", libc::SYS_clock_nanosleep, [0; 6]),
    ("exit", libc::SYS_exit, [0; 6]),
];

/// What comes on top where the target sees no `/proc`.
const NEEDED_WITHOUT_PROC: &[(&str, i64, [u64; 6])] = &[
    ("socketpair", libc::SYS_socketpair, [1, 0x80001, 0, 0, 0, 0]),
    ("recvmsg", libc::SYS_recvmsg, [3, 0, 0x4000_0040, 0, 0, 0]),
    (
        "unshare",
        libc::SYS_unshare,
        [libc::CLONE_FS as u64, 0, 0, 0, 0, 0],
    ),
    ("fchdir", libc::SYS_fchdir, [3, 0, 0, 0, 0, 0]),
];

/// What the payload calls and does without where it fails: but it must not end the target.
const DONE_WITHOUT: &[(&str, i64)] = &[
    ("mincore", libc::SYS_mincore),
    ("nanosleep", libc::SYS_nanosleep),
    ("sched_yield", libc::SYS_sched_yield),
    ("sched_getscheduler", libc::SYS_sched_getscheduler),
    ("sched_setscheduler", libc::SYS_sched_setscheduler),
    ("getpriority", libc::SYS_getpriority),
    ("setpriority", libc::SYS_setpriority),
];

/// The first system call that a filter of this thread forbids; `None` if all are allowed or it has no filter.
///
/// Where the filters cannot be read (that takes CAP_SYS_ADMIN) the answer is `None` too: then the bootstrap finds out.
pub fn forbidden(thread: &Stopped, without_proc: bool) -> Option<&'static str> {
    let filters: Vec<_> = (0..)
        .map_while(|index| read_filter(thread.tid, index))
        .collect();
    let more = if without_proc {
        NEEDED_WITHOUT_PROC
    } else {
        &[]
    };
    NEEDED
        .iter()
        .chain(more)
        .find(|(_, number, args)| {
            filters
                .iter()
                .any(|filter| !allows(filter, *number as u32, args))
        })
        .map(|&(name, ..)| name)
        .or_else(|| {
            let deadly = |number: i64| {
                filters
                    .iter()
                    .any(|filter| !survives(filter, number as u32))
            };
            let found = DONE_WITHOUT.iter().find(|(_, number)| deadly(*number));
            found.map(|&(name, _)| name)
        })
}

/// Whether a call without arguments fails at worst.
fn survives(filter: &[Instruction], number: u32) -> bool {
    let action = evaluate(filter, &data(number, &[0; 6])).map(|action| action & ACTION_MASK);
    matches!(action, Some(ALLOW | LOG | ERRNO))
}

/// Whether a filter lets a call through. A program that makes no sense does not.
pub fn allows(filter: &[Instruction], number: u32, args: &[u64; 6]) -> bool {
    matches!(
        evaluate(filter, &data(number, args)).map(|action| action & ACTION_MASK),
        Some(ALLOW | LOG)
    )
}

fn read_filter(tid: i32, index: usize) -> Option<Vec<Instruction>> {
    /// `PTRACE_SECCOMP_GET_FILTER` of `linux/ptrace.h`.
    const GET_FILTER: libc::c_uint = 0x420c;
    /// `BPF_MAXINSNS`.
    const MOST: usize = 4096;
    let mut filter = vec![Instruction::default(); MOST];
    // SAFETY: the kernel writes at most `BPF_MAXINSNS` instructions, for which there is room.
    let count = unsafe { libc::ptrace(GET_FILTER, tid, index, filter.as_mut_ptr()) };
    let count = Errno::result(count).ok()?;
    filter.truncate(usize::try_from(count).ok()?);
    Some(filter)
}

/// `struct seccomp_data` as 32-bit words.
fn data(number: u32, args: &[u64; 6]) -> [u32; 16] {
    let mut words = [0; 16];
    words[0] = number;
    words[1] = AUDIT_ARCH_X86_64;
    for (index, &arg) in args.iter().enumerate() {
        words[4 + index * 2] = arg as u32;
        words[5 + index * 2] = (arg >> 32) as u32;
    }
    words
}

/// Runs a classic BPF program as the kernel does for seccomp; `None` if it does what the kernel would not have loaded.
fn evaluate(filter: &[Instruction], data: &[u32; 16]) -> Option<u32> {
    let (mut a, mut x) = (0u32, 0u32);
    let mut memory = [0u32; 16];
    let mut pc = 0usize;
    // Jumps only go forward, so each instruction runs once at most.
    while let Some(&Instruction { code, jt, jf, k }) = filter.get(pc) {
        pc += 1;
        let operand = if code & 0x08 == 0 { k } else { x };
        match code & 0x07 {
            // BPF_LD, BPF_LDX
            class @ (0 | 1) => {
                let value = match code & 0xe0 {
                    0x20 if k % 4 == 0 => *data.get(k as usize / 4)?, // BPF_ABS
                    0x00 => k,                                        // BPF_IMM
                    0x60 => *memory.get(k as usize)?,                 // BPF_MEM
                    0x80 => 64,                                       // BPF_LEN
                    _ => return None,
                };
                if class == 0 { a = value } else { x = value }
            }
            2 => *memory.get_mut(k as usize)? = a,
            3 => *memory.get_mut(k as usize)? = x,
            4 => {
                a = match code & 0xf0 {
                    0x00 => a.wrapping_add(operand),
                    0x10 => a.wrapping_sub(operand),
                    0x20 => a.wrapping_mul(operand),
                    0x30 => a.checked_div(operand)?,
                    0x40 => a | operand,
                    0x50 => a & operand,
                    // By more than 31 as the processor does it: only a constant is checked when it is loaded.
                    0x60 => a.wrapping_shl(operand),
                    0x70 => a.wrapping_shr(operand),
                    0x80 => a.wrapping_neg(),
                    0xa0 => a ^ operand,
                    _ => return None,
                }
            }
            5 => {
                let holds = match code & 0xf0 {
                    0x00 => {
                        pc = pc.checked_add(k as usize)?;
                        continue;
                    }
                    0x10 => a == operand,
                    0x20 => a > operand,
                    0x30 => a >= operand,
                    0x40 => a & operand != 0,
                    _ => return None,
                };
                pc += usize::from(if holds { jt } else { jf });
            }
            6 => return Some(if code & 0x18 == 0x10 { a } else { k }),
            // BPF_MISC: TAX, TXA
            _ if code & 0x80 == 0 => x = a,
            _ => a = x,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAD_NUMBER: Instruction = Instruction {
        code: 0x20,
        jt: 0,
        jf: 0,
        k: 0,
    };

    fn ret(action: u32) -> Instruction {
        Instruction {
            code: 0x06,
            jt: 0,
            jf: 0,
            k: action,
        }
    }

    fn forbid(number: i64) -> Vec<Instruction> {
        let equal = Instruction {
            code: 0x15,
            jt: 0,
            jf: 1,
            k: number as u32,
        };
        vec![LOAD_NUMBER, equal, ret(0x0005_0001), ret(ALLOW)]
    }

    #[test]
    fn one_forbidden_call_is_told_from_the_others() {
        let filter = forbid(libc::SYS_memfd_create);
        assert!(!allows(&filter, libc::SYS_memfd_create as u32, &[0; 6]));
        assert!(allows(&filter, libc::SYS_mmap as u32, &[0; 6]));
    }

    #[test]
    fn a_call_that_is_done_without_may_fail_and_must_not_kill() {
        let mut filter = forbid(libc::SYS_mincore);
        assert!(survives(&filter, libc::SYS_mincore as u32));
        filter[2] = ret(0x8000_0000);
        assert!(!survives(&filter, libc::SYS_mincore as u32));
        assert!(survives(&filter, libc::SYS_nanosleep as u32));
    }

    #[test]
    fn arguments_are_seen() {
        // Allows mmap unless PROT_EXEC is asked for, as systemd's MemoryDenyWriteExecute did.
        let filter = [
            Instruction {
                code: 0x20,
                jt: 0,
                jf: 0,
                k: 32,
            },
            Instruction {
                code: 0x45,
                jt: 0,
                jf: 1,
                k: 4,
            },
            ret(0x8000_0000),
            ret(ALLOW),
        ];
        assert!(!allows(
            &filter,
            libc::SYS_mmap as u32,
            &[0, 4096, 5, 1, 3, 0]
        ));
        assert!(allows(
            &filter,
            libc::SYS_mmap as u32,
            &[0, 4096, 3, 1, 3, 0]
        ));
    }

    #[test]
    fn shifts_take_five_bits_of_the_register() {
        let step = |code, k| Instruction {
            code,
            jt: 0,
            jf: 0,
            k,
        };
        // X = 32; A = ALLOW; A <<= X; return A
        for code in [0x6c, 0x7c] {
            let filter = [
                step(0x01, 32),
                step(0x00, ALLOW),
                step(code, 0),
                step(0x16, 0),
            ];
            assert!(allows(&filter, 0, &[0; 6]), "{code:#x}");
        }
    }

    #[test]
    fn nonsense_allows_nothing() {
        for filter in [
            &[][..],
            &[LOAD_NUMBER],
            &[Instruction {
                code: 0xff,
                jt: 9,
                jf: 9,
                k: u32::MAX,
            }],
        ] {
            assert!(!allows(filter, 0, &[0; 6]));
        }
    }
}
