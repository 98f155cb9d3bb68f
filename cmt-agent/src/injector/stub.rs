//! The machine code that runs in the target before the payload does, and the data it reads.
//!
//! It is copied into unused bytes at the end of one of the target's code pages (a *cave*). One thread of the target is
//! pointed at [`HIJACK_OFFSET`]; from then on everything happens without us: the thread creates a second one, restores
//! all its registers and goes on where it was. So `cmt` may die at any moment after that. The second thread makes the
//! control block and the payload's memfd, waits for us to fill them (10 s at most), loads the payload and ends.
#![expect(unsafe_code, reason = "the stub is assembly")]

use std::mem::offset_of;

use cmt_common::control::{Boot, CONTROL_BYTES, boot};

/// What the stub reads: the first bytes of the cave.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct StubData {
    /// Where the hijacked thread goes on.
    pub resume_rip: u64,
    /// Its stack pointer there.
    pub resume_rsp: u64,
    /// `pthread_create` in the target.
    pub pthread_create: u64,
    /// `pthread_detach` in the target.
    pub pthread_detach: u64,
    /// `__errno_location` in the target.
    pub errno_location: u64,
    /// The payload's entry where it is loaded already, else 0.
    pub entry: u64,
    /// The control block's address where the payload is loaded already, else 0.
    pub control: u64,
    /// 1 where the target has no `/proc` to load the payload from, else 0.
    pub without_proc: u64,
    /// Name of the control block's memfd.
    pub control_name: [u8; 16],
    /// Name of the payload's memfd.
    pub payload_name: [u8; 16],
    /// Name of the new thread.
    pub thread_name: [u8; 16],
}

/// How the bootstrap thread is called while it runs the stub.
pub const THREAD_NAME: &str = "cmt-boot";

impl StubData {
    /// As the bytes that the stub reads.
    pub fn to_bytes(self) -> Vec<u8> {
        let words = [
            self.resume_rip,
            self.resume_rsp,
            self.pthread_create,
            self.pthread_detach,
            self.errno_location,
            self.entry,
            self.control,
            self.without_proc,
        ];
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.extend(self.control_name);
        bytes.extend(self.payload_name);
        bytes.extend(self.thread_name);
        bytes
    }
}

/// General registers as the stub pops them at its end, from the lowest address up.
#[derive(Clone, Copy)]
pub struct SavedRegisters(pub [u64; 16]);

impl SavedRegisters {
    /// Takes them from a stopped thread, with `rax` as it is to be afterwards.
    pub fn new(regs: &libc::user_regs_struct, rax: u64) -> Self {
        Self([
            regs.r15,
            regs.r14,
            regs.r13,
            regs.r12,
            regs.rbp,
            regs.rbx,
            regs.r11,
            regs.r10,
            regs.r9,
            regs.r8,
            rax,
            regs.rcx,
            regs.rdx,
            regs.rsi,
            regs.rdi,
            regs.eflags,
        ])
    }

    /// As they lie in memory.
    pub fn to_bytes(self) -> Vec<u8> {
        self.0.iter().flat_map(|word| word.to_le_bytes()).collect()
    }
}

// Registers at `cmt_stub_hijack`: rsp = rbx = 64-byte aligned xsave image, rbp = saved general registers above it.
// Signals 32 and 33 are glibc's own (cancellation, setuid across threads) and must stay open in every thread.
std::arch::global_asm!(
    ".pushsection .text.cmt_stub,\"ax\",@progbits",
    ".balign 16",
    ".globl cmt_stub_start",
    ".hidden cmt_stub_start",
    "cmt_stub_start:",
    ".globl cmt_stub_hijack",
    ".hidden cmt_stub_hijack",
    ".globl cmt_stub_end",
    ".hidden cmt_stub_end",
    "1: .fill {data_len}, 1, 0",
    "cmt_stub_hijack:",
    "cld",
    "sub rsp, 64",
    "call qword ptr [rip + 1b + {errno_location}]",
    "mov r12, rax",
    "mov r13d, dword ptr [rax]",
    // The new thread starts with all signals blocked: no handler of the application runs on it.
    "mov rax, {all_but_glibc}",
    "mov qword ptr [rsp + 8], rax",
    "xor edi, edi", // SIG_BLOCK
    "lea rsi, [rsp + 8]",
    "lea rdx, [rsp + 16]",
    "mov r10d, 8",
    "mov eax, 14", // rt_sigprocmask
    "syscall",
    "mov rdi, rsp",
    "xor esi, esi",
    "lea rdx, [rip + 2f]",
    "xor ecx, ecx",
    "call qword ptr [rip + 1b + {pthread_create}]",
    "test eax, eax",
    "jnz 3f",
    "mov rdi, qword ptr [rsp]",
    "call qword ptr [rip + 1b + {pthread_detach}]",
    "3:",
    "mov edi, 2", // SIG_SETMASK
    "lea rsi, [rsp + 16]",
    "xor edx, edx",
    "mov r10d, 8",
    "mov eax, 14",
    "syscall",
    "mov dword ptr [r12], r13d",
    "mov eax, -1",
    "mov edx, -1",
    "xrstor64 [rbx]",
    "mov rsp, rbp",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbp",
    "pop rbx",
    "pop r11",
    "pop r10",
    "pop r9",
    "pop r8",
    "pop rax",
    "pop rcx",
    "pop rdx",
    "pop rsi",
    "pop rdi",
    "popfq",
    "mov rsp, qword ptr [rip + 1b + {resume_rsp}]",
    "jmp qword ptr [rip + 1b + {resume_rip}]",
    // The new thread. rbx: control block, r12d: its memfd, r13d: the payload's memfd.
    "2:",
    "push rbx",
    "push r12",
    "push r13",
    "push r14",
    "push rbp",
    "sub rsp, 32",
    "mov edi, 15", // PR_SET_NAME
    "lea rsi, [rip + 1b + {thread_name}]",
    "mov eax, 157", // prctl
    "syscall",
    "mov rbx, qword ptr [rip + 1b + {control}]",
    "mov rax, qword ptr [rip + 1b + {entry}]",
    "test rax, rax",
    "jnz 7f",
    "lea rdi, [rip + 1b + {control_name}]",
    "mov esi, 3", // MFD_CLOEXEC | MFD_ALLOW_SEALING
    "mov eax, 319", // memfd_create
    "syscall",
    "test eax, eax",
    "js 9f",
    "mov r12d, eax",
    "mov edi, eax",
    "mov esi, {control_bytes}",
    "mov eax, 77", // ftruncate
    "syscall",
    "xor edi, edi",
    "mov esi, {control_bytes}",
    "mov edx, 3",
    "mov r10d, 1",
    "mov r8d, r12d",
    "xor r9d, r9d",
    "mov eax, 9", // mmap
    "syscall",
    "cmp rax, -4096",
    "ja 10f",
    "mov rbx, rax",
    "lea rdi, [rip + 1b + {payload_name}]",
    "mov esi, 1",
    "mov eax, 319",
    "syscall",
    "mov dword ptr [rbx + {payload_fd}], eax",
    "mov dword ptr [rbx + {control_fd}], r12d",
    "cmp qword ptr [rip + 1b + {without_proc}], 0",
    "je 14f",
    "mov edi, 1",       // AF_UNIX
    "mov esi, 0x80001", // SOCK_STREAM | SOCK_CLOEXEC
    "xor edx, edx",
    "lea r10, [rbx + {sockets}]",
    "mov eax, 53", // socketpair
    "syscall",
    "test eax, eax",
    "jz 14f",
    // The kernel may have left numbers behind that are nobody's by now; 0 would be the application's own input.
    "mov qword ptr [rbx + {sockets}], -1",
    "14:",
    "mov eax, 186", // gettid
    "syscall",
    "mov dword ptr [rbx + {tid}], eax",
    "mov dword ptr [rbx + {state}], {READY}",
    // Waits 200 times 50 ms for the host.
    "mov r14d, 200",
    "4:",
    "mov eax, dword ptr [rbx + {state}]",
    "cmp eax, {READY}",
    "jne 5f",
    "mov qword ptr [rsp], 0",
    "mov qword ptr [rsp + 8], 50000000",
    "lea rdi, [rbx + {state}]",
    "xor esi, esi",
    "mov edx, {READY}",
    "mov r10, rsp",
    "mov eax, 202", // futex wait
    "syscall",
    "dec r14d",
    "jnz 4b",
    "5:",
    "cmp eax, {LOAD}",
    "jne 13f",
    // Without /proc the host sends the directory that the payload is loaded from. This thread alone moves there; where it
    // cannot, nothing is loaded: what has that name in the application's own directory is not ours.
    "cmp qword ptr [rip + 1b + {without_proc}], 0",
    "je 16f",
    "mov edi, dword ptr [rbx + {sockets}]",
    "lea rsi, [rbx + {message_header}]",
    "mov edx, 0x40000040", // MSG_CMSG_CLOEXEC | MSG_DONTWAIT
    "mov eax, 47",         // recvmsg
    "syscall",
    "xor r14d, r14d",
    "cmp rax, 1",
    "jne 15f",
    "mov eax, dword ptr [rbx + {maps_fd_received}]",
    "inc eax",
    "mov dword ptr [rbx + {maps_fd}], eax",
    "mov edi, dword ptr [rbx + {folder_received}]",
    "test eax, eax",
    "jz 17f", // No room for both.
    "mov edi, 0x200", // CLONE_FS
    "mov eax, 272",   // unshare
    "syscall",
    "mov edi, dword ptr [rbx + {folder_received}]",
    "test eax, eax",
    "jnz 17f",
    "mov eax, 81", // fchdir
    "syscall",
    "test eax, eax",
    "setz r14b",
    "17:",
    "mov eax, 3",
    "syscall",
    "15:",
    "mov edi, dword ptr [rbx + {sockets}]",
    "mov eax, 3",
    "syscall",
    "mov edi, dword ptr [rbx + {sockets} + 4]",
    "mov eax, 3",
    "syscall",
    "test r14d, r14d",
    "jz 8f",
    "16:",
    "lea rdi, [rbx + {path}]",
    "mov esi, 2",
    "call qword ptr [rbx + {dlopen}]",
    "test rax, rax",
    "jz 6f",
    "mov rdi, rax",
    "lea rsi, [rbx + {symbol}]",
    "call qword ptr [rbx + {dlsym}]",
    "test rax, rax",
    "jnz 7f",
    "6:",
    "call qword ptr [rbx + {dlerror}]",
    "test rax, rax",
    "jz 8f",
    "xor ecx, ecx",
    "11:",
    "mov dl, byte ptr [rax + rcx]",
    "mov byte ptr [rbx + rcx + {message}], dl",
    "test dl, dl",
    "jz 8f",
    "inc ecx",
    "cmp ecx, 254",
    "jb 11b",
    "jmp 8f",
    "7:",
    "mov rdi, rbx",
    "call rax",
    "test eax, eax",
    "jnz 8f",
    "mov dword ptr [rbx + {state}], {RUNNING}",
    "jmp 12f",
    "8:",
    "mov dword ptr [rbx + {state}], {FAILED}",
    "12:",
    "lea rdi, [rbx + {state}]",
    "mov esi, 1",
    "mov edx, 0x7fffffff",
    "mov eax, 202", // futex wake
    "syscall",
    "jmp 9f",
    // Given up before anything was loaded: nothing stays.
    "13:",
    "mov edi, dword ptr [rbx + {payload_fd}]",
    "mov eax, 3",
    "syscall",
    "cmp qword ptr [rip + 1b + {without_proc}], 0",
    "je 18f",
    "mov edi, dword ptr [rbx + {sockets}]",
    "mov eax, 3",
    "syscall",
    "mov edi, dword ptr [rbx + {sockets} + 4]",
    "mov eax, 3",
    "syscall",
    "18:",
    "mov rdi, rbx",
    "mov esi, {control_bytes}",
    "mov eax, 11", // munmap
    "syscall",
    "10:",
    "mov edi, r12d",
    "mov eax, 3", // close
    "syscall",
    "9:",
    "xor eax, eax",
    "add rsp, 32",
    "pop rbp",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbx",
    "ret",
    "cmt_stub_end:",
    ".popsection",
    data_len = const size_of::<StubData>(),
    errno_location = const offset_of!(StubData, errno_location),
    pthread_create = const offset_of!(StubData, pthread_create),
    pthread_detach = const offset_of!(StubData, pthread_detach),
    resume_rsp = const offset_of!(StubData, resume_rsp),
    resume_rip = const offset_of!(StubData, resume_rip),
    control = const offset_of!(StubData, control),
    without_proc = const offset_of!(StubData, without_proc),
    entry = const offset_of!(StubData, entry),
    control_name = const offset_of!(StubData, control_name),
    payload_name = const offset_of!(StubData, payload_name),
    thread_name = const offset_of!(StubData, thread_name),
    all_but_glibc = const !(0b11u64 << 31) as i64,
    control_bytes = const CONTROL_BYTES,
    payload_fd = const offset_of!(Boot, payload_fd),
    control_fd = const offset_of!(Boot, control_fd),
    tid = const offset_of!(Boot, tid),
    sockets = const offset_of!(Boot, sockets),
    maps_fd = const offset_of!(Boot, maps_fd),
    message_header = const offset_of!(Boot, message_header),
    folder_received = const offset_of!(Boot, message_header.rights) + 16,
    maps_fd_received = const offset_of!(Boot, message_header.rights) + 20,
    state = const offset_of!(Boot, state),
    path = const offset_of!(Boot, path),
    symbol = const offset_of!(Boot, symbol),
    message = const offset_of!(Boot, message),
    dlopen = const offset_of!(Boot, dlopen),
    dlsym = const offset_of!(Boot, dlsym),
    dlerror = const offset_of!(Boot, dlerror),
    READY = const boot::READY,
    LOAD = const boot::LOAD,
    RUNNING = const boot::RUNNING,
    FAILED = const boot::FAILED,
);

unsafe extern "C" {
    static cmt_stub_start: u8;
    static cmt_stub_hijack: u8;
    static cmt_stub_end: u8;
}

/// Where in the stub the hijacked thread starts.
pub const HIJACK_OFFSET: usize = size_of::<StubData>();

/// The stub with `data` in front, ready to be written to the cave.
pub fn image(data: StubData) -> Vec<u8> {
    let start = &raw const cmt_stub_start;
    let end = &raw const cmt_stub_end;
    let len = end.addr() - start.addr();
    // SAFETY: the linker keeps the bytes between the two labels of one section together; they are mapped readable.
    let code = unsafe { std::slice::from_raw_parts(start, len) };
    debug_assert_eq!(
        (&raw const cmt_stub_hijack).addr() - start.addr(),
        HIJACK_OFFSET
    );
    let mut image = data.to_bytes();
    image.extend(&code[HIJACK_OFFSET..]);
    image
}
