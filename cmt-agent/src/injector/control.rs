//! The control block as the host maps it.
//!
//! The target writes to it too, at any time, so nothing is borrowed from it but atomics; everything else is copied out
//! with volatile reads and checked afterwards.
#![expect(unsafe_code, reason = "memory shared with another process")]

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Deref;
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cmt_common::api::HOOKED;
use cmt_common::control::{
    CONTROL_BYTES, Control, HookSlot, Plan, RELOCATED_MAX, Relocated, WINDOW_MAX, command, hook,
};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
#[cfg(any(test, feature = "fuzzing"))]
use nix::sys::mman::mmap_anonymous;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

use super::InjectError;
use crate::cores;
use crate::target::Target;
use crate::target::file::{Access, open_regular};
use crate::target::text::printable;

/// A mapped control block.
#[derive(Debug)]
pub struct ControlMap {
    at: NonNull<Control>,
    in_target: u64,
}

// SAFETY: the mapping is this value's alone in this process, and can be used and unmapped by any thread.
unsafe impl Send for ControlMap {}

const PAGE: u64 = 4096;

/// What a hook slot said at one moment.
#[derive(Clone, Debug)]
pub struct HookState {
    /// One of [`hook`].
    pub status: u32,
    /// Address of the window.
    pub window: u64,
    /// The window as it was; empty if its length makes no sense.
    pub original: Vec<u8>,
    /// The window as it is to be.
    pub patched: Vec<u8>,
    /// Where instructions of the window went.
    pub relocated: Vec<(u64, u64)>,
    /// Why it was refused.
    pub reason: String,
}

/// A command failed.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The payload said so.
    #[error("the payload could not {what}: {message}")]
    Failed {
        /// What it was told to do.
        what: &'static str,
        /// Its words.
        message: String,
    },
    /// It has ended.
    #[error("the process ended before the payload could {what}")]
    Ended {
        /// What it was told to do.
        what: &'static str,
    },
    /// It did not answer.
    #[error("the payload did not {what} within {waited_s} s")]
    NoAnswer {
        /// What it was told to do.
        what: &'static str,
        /// How long we waited.
        waited_s: u64,
    },
}

impl ControlMap {
    /// Maps the block that stands at `start` in the target.
    ///
    /// The file is opened with our rights, not the target's, so it must be what the target maps writable itself, an
    /// unlinked file in memory; and it is sealed first, so that it cannot shrink under us.
    pub fn open(target: &mut Target, start: u64) -> Result<Self, InjectError> {
        let pid = target.pid;
        let failed = |source| InjectError::Control { pid, source };
        let foreign = |what: &str| failed(io::Error::other(format!("the control block {what}")));
        let end = start + CONTROL_BYTES as u64;
        let path = format!("/proc/{pid}/map_files/{start:x}-{end:x}");
        let file = open_regular(path.as_ref(), Access::ReadWrite).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        if metadata.nlink() != 0 {
            return Err(foreign("is no file in memory"));
        }
        if target.control_inode(start)? != Some(metadata.ino()) {
            return Err(foreign("changed while it was opened"));
        }
        let mut control = Self::of_file(&file).map_err(failed)?;
        control.in_target = start;
        Ok(control)
    }

    /// Maps a block that a process has handed over; `file` must be what it says it is, and cannot shrink from now on.
    pub fn of_file(file: &File) -> io::Result<Self> {
        let foreign = |what: &str| io::Error::other(format!("the control block {what}"));
        fcntl(
            file,
            FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW),
        )
        .map_err(|_| foreign("cannot be sealed"))?;
        if file.metadata()?.len() != CONTROL_BYTES as u64 {
            return Err(foreign("is cut off"));
        }
        let len = NonZeroUsize::new(CONTROL_BYTES).expect("not zero");
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new shared mapping at an address of the kernel's choice touches no memory of ours.
        let at = unsafe { mmap(None, len, prot, MapFlags::MAP_SHARED, file, 0) }?;
        Ok(Self {
            at: at.cast(),
            in_target: 0,
        })
    }

    /// A copy of a block, for what reads one.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn copy_of(block: &[u8; CONTROL_BYTES]) -> Self {
        let len = NonZeroUsize::new(CONTROL_BYTES).expect("not zero");
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no memory of ours.
        let at: NonNull<u8> = unsafe { mmap_anonymous(None, len, prot, MapFlags::MAP_PRIVATE) }
            .expect("some memory")
            .cast();
        // SAFETY: both are `CONTROL_BYTES` long, and the mapping is new: they do not overlap.
        unsafe { at.copy_from_nonoverlapping(NonNull::from(block).cast(), CONTROL_BYTES) };
        Self {
            at: at.cast(),
            in_target: 0,
        }
    }

    /// Where the block stands in the target.
    pub fn address(&self) -> u64 {
        self.in_target
    }

    fn pointer(&self) -> *mut Control {
        self.at.as_ptr()
    }

    /// Writes what the bootstrap needs to load the payload.
    pub fn set_boot_text(&self, path: &str, symbol: &str) {
        let put = |to: *mut u8, room: usize, text: &str| {
            for (index, byte) in text.bytes().take(room - 1).enumerate() {
                // SAFETY: `to` is a byte array of `room` bytes inside the mapping; `index` stays below `room - 1`, and
                // the zero behind it is there since the memfd was made.
                unsafe { to.add(index).write_volatile(byte) };
            }
        };
        // SAFETY: the fields lie within the mapping; only their addresses are taken.
        let (path_at, symbol_at) = unsafe {
            (
                &raw mut (*self.pointer()).boot.path,
                &raw mut (*self.pointer()).boot.symbol,
            )
        };
        put(path_at.cast(), 64, path);
        put(symbol_at.cast(), 32, symbol);
    }

    /// Fills in how the bootstrap receives two descriptors.
    pub fn expect_descriptors(&self) {
        let header = &self.boot.message_header;
        let in_target =
            |field: *const u8| self.in_target + (field.addr() - self.at.addr().get()) as u64;
        let put = |words: &[AtomicU64], values: &[u64]| {
            for (word, &value) in words.iter().zip(values) {
                word.store(value, Ordering::Relaxed);
            }
        };
        put(&header.name, &[0, 0]);
        put(
            &header.parts,
            &[in_target((&raw const header.buffer).cast()), 1],
        );
        let room = size_of_val(&header.rights) as u64;
        put(
            &header.control,
            &[in_target((&raw const header.rights).cast()), room, 0],
        );
        put(
            &header.buffer,
            &[in_target((&raw const header.tail).cast()), 1],
        );
        for word in &header.rights {
            word.store(u32::MAX, Ordering::Relaxed);
        }
    }

    /// What the loader said when the bootstrap failed.
    pub fn boot_message(&self) -> String {
        // SAFETY: a copy of bytes inside the mapping; any bytes are valid.
        text(&unsafe { (&raw const (*self.pointer()).boot.message).read_volatile() })
    }

    /// Why the last command failed.
    pub fn message(&self) -> String {
        // SAFETY: as in `boot_message`.
        text(&unsafe { (&raw const (*self.pointer()).message).read_volatile() })
    }

    /// Name of the payload's hook engine.
    pub fn engine(&self) -> String {
        // SAFETY: as in `boot_message`.
        text(&unsafe { (&raw const (*self.pointer()).engine).read_volatile() })
    }

    /// The plan that was last written.
    pub fn plan(&self) -> Plan {
        // SAFETY: `Plan` is plain integers; any bytes are valid.
        unsafe { (&raw const (*self.pointer()).plan).read_volatile() }
    }

    /// Writes the plan that the next ENABLE or SET_PLAN reads, and the CPUs that its choice of cores means here.
    pub fn set_plan(&self, plan: &Plan) {
        // SAFETY: the field lies within the mapping; the payload reads it only after the command that follows.
        unsafe { (&raw mut (*self.pointer()).plan).write_volatile(*plan) };
        let cpus = cores::mask_of(plan.cores);
        for (word, cpus) in self.helper_cpus.iter().zip(cpus) {
            word.store(cpus, Ordering::Release);
        }
    }

    /// Copies hook slot `index` out and checks it.
    pub fn hook(&self, index: usize) -> HookState {
        assert!(index < HOOKED);
        let slot: *const HookSlot = &raw const self.hooks[index];
        // SAFETY: `slot` lies within the mapping; these fields are plain bytes and integers, valid whatever they hold.
        let (original, patched, relocated, reason): (
            [u8; WINDOW_MAX],
            [u8; WINDOW_MAX],
            [Relocated; RELOCATED_MAX],
            [u8; 96],
        ) = unsafe {
            (
                (&raw const (*slot).original).read_volatile(),
                (&raw const (*slot).patched).read_volatile(),
                (&raw const (*slot).relocated).read_volatile(),
                (&raw const (*slot).reason).read_volatile(),
            )
        };
        let slot = &self.hooks[index];
        let len = slot.window_len.load(Ordering::Acquire) as usize;
        let len = if len <= WINDOW_MAX { len } else { 0 };
        let count = (slot.relocated_len.load(Ordering::Acquire) as usize).min(RELOCATED_MAX);
        let mut status = slot.status.load(Ordering::Acquire);
        let window = slot.window.load(Ordering::Acquire);
        let start = slot.address.load(Ordering::Acquire);
        let mut reason = text(&reason);
        let last = window.wrapping_add(len as u64).wrapping_sub(1);
        if status == hook::PREPARED && window / PAGE != last / PAGE {
            // A write to two pages could be cut in half by our death.
            status = hook::REFUSED;
            reason = "the patch would cross a page".to_owned();
        }
        // A window elsewhere than near the start of its function is none that we asked for.
        if status == hook::PREPARED
            && (len == 0 || !(start..start.saturating_add(32)).contains(&window))
        {
            status = hook::REFUSED;
        }
        HookState {
            status,
            window,
            original: original[..len].to_vec(),
            patched: patched[..len].to_vec(),
            relocated: relocated[..count]
                .iter()
                .map(|moved| (moved.from, moved.to))
                .collect(),
            reason,
        }
    }

    /// Whether a command was given that is not carried out yet.
    pub fn is_at_work(&self) -> bool {
        self.done_seq.load(Ordering::Acquire) != self.command_seq.load(Ordering::Acquire)
    }

    /// Gives a command and waits until it is carried out.
    pub fn command(
        &self,
        target: &Target,
        number: u32,
        limit: Duration,
    ) -> Result<(), CommandError> {
        let what = match number {
            command::PREPARE => "prepare its hooks",
            command::ENABLE => "start copying",
            command::DISABLE => "drain the copies in flight",
            command::STOP => "stop",
            _ => "take the plan",
        };
        self.command.store(number, Ordering::Release);
        let seq = self
            .command_seq
            .fetch_add(1, Ordering::AcqRel)
            .wrapping_add(1);
        wake(&self.command_seq);
        let deadline = Instant::now() + limit;
        let mut asked = 0u32;
        while self.done_seq.load(Ordering::Acquire) != seq {
            if Instant::now() >= deadline {
                return Err(CommandError::NoAnswer {
                    what,
                    waited_s: limit.as_secs(),
                });
            }
            std::thread::sleep(Duration::from_micros(50));
            asked += 1;
            if asked.is_multiple_of(200) && target.has_ended() {
                return Err(CommandError::Ended { what });
            }
        }
        match self.result.load(Ordering::Acquire) {
            0 => Ok(()),
            _ => Err(CommandError::Failed {
                what,
                message: self.message(),
            }),
        }
    }
}

impl Deref for ControlMap {
    type Target = Control;

    fn deref(&self) -> &Control {
        // SAFETY: the mapping is as long as a `Control` and lives as long as `self`. Shared references are used for the
        // atomics alone; the plain fields are only reached through raw pointers in this file.
        unsafe { self.at.as_ref() }
    }
}

impl Drop for ControlMap {
    fn drop(&mut self) {
        // SAFETY: `at` is the start of the mapping made in `open`, and nothing borrowed from it outlives `self`.
        let _ = unsafe { munmap(self.at.cast(), CONTROL_BYTES) };
    }
}

/// Wakes whoever waits on `word` in another process.
pub fn wake(word: &AtomicU32) {
    // SAFETY: FUTEX_WAKE only uses the address, which is valid.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

/// NUL-terminated bytes of a foreign process as printable text.
fn text(bytes: &[u8]) -> String {
    let end = bytes
        .iter()
        .position(|&byte| byte == 0)
        .unwrap_or(bytes.len());
    printable(&String::from_utf8_lossy(&bytes[..end]))
}
