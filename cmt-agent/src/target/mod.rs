//! A live process that `cmt` is to attach to: what it is, whether it can be served, and where its functions are.
//!
//! Nothing here changes the target. Every refusal names the cause and the remedy.

mod error;
pub mod file;
pub mod maps;
pub mod memory;
pub mod symbols;
pub mod text;

use std::io;

use cmt_common::api::{COPY_FNS, DRIVER_FNS, HOOKED};
use cmt_common::control::{CONTROL_NAME, PAYLOAD_NAME};
use nix::unistd::Uid;
use procfs::ProcError;
use procfs::process::Process;

use crate::probes::rights::{self, Capability, Deed, Standing};
pub use error::TargetError;
use file::Access;
use maps::Mapping;
use memory::Memory;
use symbols::{Symbol, Symbols};

/// Functions of the target's libc that the bootstrap calls.
#[derive(Clone, Copy, Debug)]
pub struct Libc {
    /// `pthread_create`
    pub pthread_create: u64,
    /// `pthread_detach`
    pub pthread_detach: u64,
    /// `__errno_location`
    pub errno_location: u64,
    /// `dlopen`
    pub dlopen: u64,
    /// `dlsym`
    pub dlsym: u64,
    /// `dlerror`
    pub dlerror: u64,
}

/// Functions of the target's libcuda.
#[derive(Clone, Debug)]
pub struct Cuda {
    /// The hooked functions by position in `COPY_FNS`.
    pub hooked: [Option<Symbol>; HOOKED],
    /// What the copy engine calls, by position in `DRIVER_FNS`.
    pub driver: [Option<Symbol>; DRIVER_FNS.len()],
}

/// What tells a running program from another, later one in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    /// When the process started, in clock ticks: tells it from a later one with the same id.
    started: u64,
    /// Where its stack begins, which is random: tells it from a program that it became by exec.
    stack: u64,
}

impl Identity {
    fn of(stat: &procfs::process::Stat) -> Self {
        Self {
            started: stat.starttime,
            stack: stat.startstack,
        }
    }
}

/// A process that has passed the preflight.
#[derive(Debug)]
pub struct Target {
    /// Process id as we see it.
    pub pid: u32,
    /// Its name.
    pub comm: String,
    /// Its memory.
    pub memory: Memory,
    /// Its mappings at the time of the preflight.
    pub maps: Vec<Mapping>,
    process: Process,
    identity: Identity,
}

impl Target {
    /// Opens `pid` after checking that it can be attached to: exists, alive, ours to touch, x86-64, glibc.
    pub fn open(pid: u32) -> Result<Self, TargetError> {
        Self::open_for(pid, true)
    }

    /// The same for somebody who only reads: it may be stopped, or held by another tool.
    pub fn look_at(pid: u32) -> Result<Self, TargetError> {
        Self::open_for(pid, false)
    }

    fn open_for(pid: u32, to_change: bool) -> Result<Self, TargetError> {
        let deed = |own| match to_change {
            true => Deed::Attach { own },
            false => Deed::Look { own },
        };
        let gone = |error| match error {
            ProcError::NotFound(_) if rights::is_hidden(pid) => TargetError::Hidden {
                pid,
                reason: rights::refusal(deed(false)),
            },
            ProcError::NotFound(_) => TargetError::NoSuchProcess { pid },
            source => TargetError::Proc { pid, source },
        };
        if pid == std::process::id() {
            return Err(TargetError::Ourselves { pid });
        }
        let number = i32::try_from(pid).map_err(|_| TargetError::NoSuchProcess { pid })?;
        let process = Process::new(number).map_err(gone)?;
        let status = text::status(&process).map_err(gone)?;
        // `/proc/TID` answers for a thread too; only process ids are meant.
        if status.tgid != number {
            return Err(TargetError::Thread {
                pid,
                process: status.tgid,
            });
        }
        let comm = text::comm(&process).map_err(gone)?;
        let no_permission = || TargetError::NoPermission {
            pid,
            comm: comm.clone(),
            uid: status.euid,
            reason: rights::refusal(deed(rights::is_own(pid))),
        };
        let stat = process.stat().map_err(gone)?;
        let identity = Identity::of(&stat);
        if stat.flags & PF_KTHREAD != 0 {
            return Err(TargetError::KernelThread { pid, comm });
        }
        match status.state.chars().next() {
            Some('Z' | 'X') => return Err(TargetError::Exited { pid, comm }),
            Some('T') if to_change => return Err(TargetError::Stopped { pid, comm }),
            _ => {}
        }
        if to_change && status.tracerpid != 0 {
            return Err(TargetError::Traced {
                pid,
                comm,
                tracer: status.tracerpid,
            });
        }
        if to_change && status.seccomp == Some(1) {
            return Err(TargetError::StrictSeccomp { pid, comm });
        }
        let maps = match maps::of(&process) {
            Ok(maps) => maps,
            Err(ProcError::PermissionDenied(_)) => return Err(no_permission()),
            Err(error) => return Err(gone(error)),
        };
        check_architecture(pid, &comm)?;
        let access = match to_change {
            true => Access::ReadWrite,
            false => Access::Read,
        };
        let memory = match Memory::open(pid, access) {
            Ok(memory) => memory,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return Err(no_permission());
            }
            Err(source) => return Err(TargetError::Memory { pid, source }),
        };
        if !may_ptrace(&status) {
            return Err(no_permission());
        }
        let target = Self {
            pid,
            comm,
            memory,
            maps,
            process,
            identity,
        };
        target.check_libc()?;
        Ok(target)
    }

    /// Refuses a process near its limit: an allocation that fails inside the payload would end it.
    pub fn check_address_space(&self) -> Result<(), TargetError> {
        const NEEDED: u64 = 64 << 20;
        let limit = self.process.limits().map(|limits| limits.max_address_space);
        let size = self.process.stat().map(|stat| stat.vsize);
        let (Ok(limit), Ok(size)) = (limit, size) else {
            return Ok(()); // The bootstrap finds out.
        };
        if let procfs::process::LimitValue::Value(most) = limit.soft_limit
            && most.saturating_sub(size) < NEEDED
        {
            return Err(TargetError::AddressSpace {
                pid: self.pid,
                comm: self.comm.clone(),
                left_mib: most.saturating_sub(size) >> 20,
                needed_mib: NEEDED >> 20,
            });
        }
        Ok(())
    }

    /// True once the process has exited, or its main thread has.
    pub fn has_ended(&self) -> bool {
        self.process
            .stat()
            .map_or(true, |stat| matches!(stat.state, 'Z' | 'X'))
    }

    /// Clock ticks from the start of the machine to that of the process: tells it from a later one with the same id.
    pub fn started(&self) -> u64 {
        self.identity.started
    }

    /// True if the process still runs the program that it ran at the preflight. Where all its threads stand still it goes
    /// on doing so.
    ///
    /// By exec it may become a program with more rights than it has itself, which it must not make us change.
    pub fn is_same_program(&self) -> bool {
        self.process
            .stat()
            .is_ok_and(|stat| Identity::of(&stat) == self.identity)
    }

    /// Refuses a process that runs another program than at the preflight.
    pub fn check_same_program(&self) -> Result<(), TargetError> {
        match self.is_same_program() {
            true => Ok(()),
            false => Err(TargetError::Replaced { pid: self.pid }),
        }
    }

    /// True if `tid` is one of its threads, and not one of another process that got the id since.
    pub fn has_thread(&self, tid: i32) -> bool {
        self.process.task_from_tid(tid).is_ok()
    }

    /// Reads the mappings again.
    pub fn refresh_maps(&mut self) -> Result<(), TargetError> {
        self.maps = maps::of(&self.process).map_err(|source| TargetError::Proc {
            pid: self.pid,
            source,
        })?;
        Ok(())
    }

    /// Thread ids at this moment.
    pub fn threads(&self) -> Result<Vec<i32>, TargetError> {
        let tasks = self.process.tasks().map_err(|source| TargetError::Proc {
            pid: self.pid,
            source,
        })?;
        Ok(tasks.flatten().map(|task| task.tid).collect())
    }

    /// Start addresses of control blocks: one, unless an attach was once given up halfway.
    ///
    /// Only mappings that the target itself can write count: nothing is opened for it that it could not open.
    pub fn control_addresses(&self) -> Vec<u64> {
        self.memfd_maps(CONTROL_NAME)
            .filter(|map| map.readable && map.writable && map.shared)
            .map(|map| map.start)
            .collect()
    }

    /// Inode of the control block that stands at `address` now.
    pub fn control_inode(&mut self, address: u64) -> Result<Option<u64>, TargetError> {
        self.refresh_maps()?;
        let there = self.control_addresses().contains(&address);
        let map = self.maps.iter().find(|map| map.start == address);
        Ok(map.filter(|_| there).map(Mapping::inode))
    }

    /// Whether it has a `/proc` where one is expected.
    pub fn sees_proc(&self) -> bool {
        // The link's text says who asks; that it is there says that this is a procfs.
        std::fs::symlink_metadata(format!("/proc/{}/root/proc/self", self.pid))
            .is_ok_and(|link| link.is_symlink())
    }

    /// The process id that the process sees itself under (its own pid namespace's).
    pub fn own_pid(&self) -> Option<u32> {
        let status = text::status(&self.process).ok()?;
        status
            .nspid?
            .last()
            .and_then(|&pid| u32::try_from(pid).ok())
    }

    /// True if `address` lies in an executable mapping of the payload.
    pub fn is_payload_code(&self, address: u64) -> bool {
        self.memfd_maps(PAYLOAD_NAME)
            .chain(self.preloaded_maps())
            .any(|map| map.executable && map.contains(address))
    }

    /// Whether `cmt tune` has started it, or a process that has become it.
    pub fn was_launched(&self) -> bool {
        self.preloaded_maps().next().is_some()
    }

    /// The payload as a file of its own.
    fn preloaded_maps(&self) -> impl Iterator<Item = &Mapping> {
        self.maps.iter().filter(|map| {
            let name = map.file_name();
            name.is_some_and(|name| name.starts_with(PAYLOAD_NAME) && name.ends_with(".so"))
        })
    }

    fn memfd_maps(&self, name: &str) -> impl Iterator<Item = &Mapping> {
        let path = format!("/memfd:{name} (deleted)");
        self.maps.iter().filter(move |map| map.is_called(&path))
    }

    /// Libraries and programs that the loader has loaded: file name and load address.
    pub fn loaded(&self) -> impl Iterator<Item = (&str, u64)> {
        maps::loaded(&self.maps).into_iter()
    }

    /// Load address of the library whose file name satisfies `wanted`.
    pub fn library(&self, wanted: impl Fn(&str) -> bool) -> Option<u64> {
        self.loaded()
            .find(|&(name, _)| wanted(name))
            .map(|(_, base)| base)
    }

    /// True for mappings of the program itself and of libraries that no program unloads.
    pub fn stays_loaded(&self, map: &Mapping) -> bool {
        const STAY: [&str; 5] = ["libc", "libm", "libpthread", "libdl", "libcuda"];
        let program = self.process.exe().ok();
        let is_program = program.is_some() && map.path() == program.as_deref();
        is_program
            || map.file_name().is_some_and(|name| {
                STAY.iter().any(|stem| {
                    name.strip_prefix(stem)
                        .is_some_and(|rest| rest.starts_with(".so") || rest.starts_with("-2."))
                })
            })
    }

    /// True if `address` lies in code that stands in a file.
    fn is_code(&self, address: u64) -> bool {
        self.maps
            .iter()
            .any(|map| map.contains(address) && map.readable && map.executable && map.is_file())
    }

    /// The libc functions that the bootstrap needs.
    pub fn libc(&self) -> Result<Libc, TargetError> {
        // From glibc 2.34 on all stand in libc.so.6; before, in libraries of their own.
        let libraries: Vec<Symbols> = ["libc.so.6", "libpthread.so.0", "libdl.so.2"]
            .iter()
            .filter_map(|&name| Some((name, self.library(|found| is_library(found, name))?)))
            .map(|(name, base)| self.symbols(name, base))
            .collect::<Result<_, _>>()?;
        let find = |function: &'static str| {
            libraries
                .iter()
                .find_map(|symbols| symbols.get(function))
                .map(|symbol| symbol.address)
                .filter(|&address| self.is_code(address))
                .ok_or(TargetError::NoLibc {
                    pid: self.pid,
                    comm: self.comm.clone(),
                    function,
                })
        };
        Ok(Libc {
            pthread_create: find("pthread_create")?,
            pthread_detach: find("pthread_detach")?,
            errno_location: find("__errno_location")?,
            dlopen: find("dlopen")?,
            dlsym: find("dlsym")?,
            dlerror: find("dlerror")?,
        })
    }

    /// The libcuda functions that the payload hooks and calls.
    pub fn cuda(&self) -> Result<Cuda, TargetError> {
        let name = "libcuda.so.1";
        let base = self
            .library(|found| found.starts_with("libcuda.so"))
            .ok_or(TargetError::NoCuda {
                pid: self.pid,
                comm: self.comm.clone(),
            })?;
        let symbols = self.symbols(name, base)?;
        let find = |name| {
            symbols
                .get(name)
                .filter(|symbol| self.is_code(symbol.address))
        };
        Ok(Cuda {
            hooked: std::array::from_fn(|index| find(COPY_FNS[index].name)),
            driver: std::array::from_fn(|index| find(DRIVER_FNS[index])),
        })
    }

    fn symbols(&self, library: &str, base: u64) -> Result<Symbols, TargetError> {
        Symbols::read(&self.memory, base).map_err(|source| TargetError::Symbols {
            pid: self.pid,
            library: library.to_owned(),
            source,
        })
    }

    fn check_libc(&self) -> Result<(), TargetError> {
        let (pid, comm) = (self.pid, self.comm.clone());
        if self.library(|name| is_library(name, "libc.so.6")).is_some() {
            return Ok(());
        }
        if self
            .library(|name| {
                // Debian's loader is a link to musl's own name.
                name.starts_with("ld-musl-") || name.starts_with("libc.musl-") || name == "libc.so"
            })
            .is_some()
        {
            return Err(TargetError::Musl { pid, comm });
        }
        Err(TargetError::StaticBinary { pid, comm })
    }
}

/// `PF_KTHREAD` of the kernel's `sched.h`.
const PF_KTHREAD: u32 = 0x0020_0000;

/// True for `libc.so.6` and for the older naming `libc-2.31.so`.
pub fn is_library(found: &str, soname: &str) -> bool {
    let stem = soname.split(".so").next().unwrap_or(soname);
    found == soname
        || found
            .strip_prefix(stem)
            .is_some_and(|rest| rest.starts_with("-2.") && rest.ends_with(".so"))
}

fn check_architecture(pid: u32, comm: &str) -> Result<(), TargetError> {
    let mut head = [0u8; 20];
    let read = std::fs::File::open(format!("/proc/{pid}/exe"))
        .and_then(|mut file| io::Read::read_exact(&mut file, &mut head));
    let found = match read {
        Err(_) => return Ok(()), // Deleted or unreadable: the memory checks that follow decide.
        Ok(()) => match (head[4], u16::from_le_bytes([head[18], head[19]])) {
            (2, 62) => return Ok(()),
            (1, _) => "a 32-bit program".to_owned(),
            (_, machine) => format!("built for ELF machine {machine}"),
        },
    };
    Err(TargetError::Architecture {
        pid,
        comm: comm.to_owned(),
        found,
    })
}

/// Whether a ptrace attach is allowed, as far as it can be told without trying: root, or the same user.
fn may_ptrace(status: &procfs::process::Status) -> bool {
    let capable = Capability::SysPtrace.is_granted_by(Standing::ours().effective);
    let euid = Uid::effective().as_raw();
    capable || (euid == status.ruid && euid == status.euid && euid == status.suid)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_program_that_came_by_exec_is_another_one() {
        let mut child = Command::new("sh")
            .args(["-c", "read line; exec sleep 60"])
            .stdin(Stdio::piped())
            .spawn()
            .expect("a shell");
        let mut stdin = child.stdin.take().expect("piped");
        // Its loader may be at work still.
        let target = loop {
            match Target::open(child.id()) {
                Err(TargetError::StaticBinary { .. }) => std::thread::yield_now(),
                opened => break opened.expect("a program on glibc"),
            }
        };
        assert!(target.is_same_program());
        assert!(target.has_thread(child.id() as i32) && !target.has_thread(1));
        stdin.write_all(b"\n").expect("it reads");
        while text::comm(&target.process).expect("its name") != "sleep" {
            std::thread::yield_now();
        }
        assert!(!target.is_same_program());
        assert!(target.check_same_program().is_err());
        child.kill().expect("our child");
        child.wait().expect("our child");
        assert!(!target.is_same_program());
    }
}
