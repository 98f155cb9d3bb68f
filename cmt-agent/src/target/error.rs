//! Why a process cannot be attached to: every refusal names the cause and the remedy.

use std::io;

use procfs::ProcError;

use super::symbols::SymbolsError;

/// Why a process cannot be attached to. The target is untouched in every case.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// There is no such process.
    #[error("there is no process {pid}; `cmt status` and `pgrep -a` list what runs")]
    NoSuchProcess {
        /// As given.
        pid: u32,
    },
    /// A thread's id.
    #[error("{pid} is a thread of process {process}; name the process")]
    Thread {
        /// As given.
        pid: u32,
        /// Whose it is.
        process: i32,
    },
    /// It is not the one that was looked at before.
    #[error(
        "process {pid} has ended or become another program meanwhile; nothing was changed in what runs now"
    )]
    Replaced {
        /// As given.
        pid: u32,
    },
    /// The process is a kernel thread.
    #[error(
        "process {pid} ({comm}) is a kernel thread; only programs that use CUDA can be attached to"
    )]
    KernelThread {
        /// As given.
        pid: u32,
        /// Its name.
        comm: String,
    },
    /// It is `cmt` itself.
    #[error("process {pid} is this cmt; name the program that copies")]
    Ourselves {
        /// As given.
        pid: u32,
    },
    /// It has exited and waits for its parent, or its main thread has ended: then the kernel shows us no memory.
    #[error("process {pid} ({comm}) has exited, or its main thread has; it cannot be attached to")]
    Exited {
        /// As given.
        pid: u32,
        /// Its name.
        comm: String,
    },
    /// It is stopped.
    #[error("process {pid} ({comm}) is stopped; continue it first: kill -CONT {pid}")]
    Stopped {
        /// As given.
        pid: u32,
        /// Its name.
        comm: String,
    },
    /// Another tracer holds it.
    #[error(
        "process {pid} ({comm}) is already traced by process {tracer}; end that debugger or strace first"
    )]
    Traced {
        /// As given.
        pid: u32,
        /// Its name.
        comm: String,
        /// Who traces it.
        tracer: i32,
    },
    /// It runs under strict seccomp.
    #[error(
        "process {pid} ({comm}) runs under strict seccomp, which forbids every call that attaching needs"
    )]
    StrictSeccomp {
        /// As given.
        pid: u32,
        /// Its name.
        comm: String,
    },
    /// The kernel does not let us look at it.
    #[error("process {pid} ({comm}, user {uid}) may not be inspected: {reason}")]
    NoPermission {
        /// As given.
        pid: u32,
        /// Its name.
        comm: String,
        /// Whose it is.
        uid: u32,
        /// Why, and the remedy.
        reason: String,
    },
    /// The kernel does not let us see it.
    #[error("process {pid} may not be inspected: {reason}")]
    Hidden {
        /// As given.
        pid: u32,
        /// Why, and the remedy.
        reason: String,
    },
    /// Another machine's program.
    #[error("process {pid} ({comm}) is {found}; this cmt attaches to x86-64 programs only")]
    Architecture {
        /// As given.
        pid: u32,
        /// Its name.
        comm: String,
        /// What its ELF header says.
        found: String,
    },
    /// No dynamic loader.
    #[error(
        "process {pid} ({comm}) is statically linked, so the payload cannot be loaded; `cmt trace` still works if it maps libcuda"
    )]
    StaticBinary {
        /// As given.
        pid: u32,
        /// Its name.
        comm: String,
    },
    /// Another libc than glibc.
    #[error("process {pid} ({comm}) runs on musl libc; only glibc programs can be attached to")]
    Musl {
        /// As given.
        pid: u32,
        /// Its name.
        comm: String,
    },
    /// No libc that we can use.
    #[error("process {pid} ({comm}): glibc's {function} was not found in its memory")]
    NoLibc {
        /// As given.
        pid: u32,
        /// Its name.
        comm: String,
        /// What is missing.
        function: &'static str,
    },
    /// It does not use CUDA (yet).
    #[error(
        "process {pid} ({comm}) has not loaded libcuda.so.1, so it copies nothing to a GPU; attach once it uses CUDA"
    )]
    NoCuda {
        /// As given.
        pid: u32,
        /// Its name.
        comm: String,
    },
    /// It may map little more.
    #[error(
        "process {pid} ({comm}) may map only {left_mib} MiB more (RLIMIT_AS); attaching needs {needed_mib} MiB. Raise it with: prlimit --pid {pid} --as"
    )]
    AddressSpace {
        /// As given.
        pid: u32,
        /// Its name.
        comm: String,
        /// What is left.
        left_mib: u64,
        /// What there must be.
        needed_mib: u64,
    },
    /// Its symbols could not be read.
    #[error("process {pid}: reading the symbols of {library}")]
    Symbols {
        /// As given.
        pid: u32,
        /// Which library.
        library: String,
        /// Why.
        #[source]
        source: SymbolsError,
    },
    /// `/proc` could not be read.
    #[error("process {pid}: reading /proc")]
    Proc {
        /// As given.
        pid: u32,
        /// Why.
        #[source]
        source: ProcError,
    },
    /// Its memory could not be opened.
    #[error("process {pid}: opening its memory")]
    Memory {
        /// As given.
        pid: u32,
        /// Why.
        #[source]
        source: io::Error,
    },
}
