//! Where processes of the program come for the plan, and leave their control blocks.
#![expect(unsafe_code, reason = "a descriptor that was received")]

use std::fs::File;
use std::io::{self, IoSliceMut, Write as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cmt_common::control::Plan;
use cmt_common::launch::GO;
use nix::cmsg_space;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, getsockopt, recvmsg};
use nix::unistd::Uid;
use tempfile::TempDir;

use super::gain::Copied;
use crate::cpus::Cpus;
use crate::injector::ControlMap;

/// No process is waited for longer: it has sent what it has to say before we look.
const PATIENCE: Duration = Duration::from_secs(1);
/// So many blocks are kept mapped before those of ended processes are added up.
const MOST_BLOCKS: usize = 256;

/// A socket, and whoever has come to it.
pub struct Desk {
    folder: TempDir,
    path: PathBuf,
    seen: Arc<Mutex<Seen>>,
}

#[derive(Default)]
struct Seen {
    blocks: Vec<(u32, ControlMap)>,
    ended: Copied,
}

impl Seen {
    fn add(&mut self, pid: u32, block: ControlMap) {
        // It has become another program since, or another process has its id.
        let earlier = self.blocks.iter().position(|(other, _)| *other == pid);
        // All of another pid namespace have none here.
        if let Some(index) = earlier.filter(|_| pid != 0) {
            let (_, earlier) = self.blocks.swap_remove(index);
            self.ended.add(&earlier.counters);
        }
        if self.blocks.len() >= MOST_BLOCKS {
            let has_ended = |pid: u32| !Path::new(&format!("/proc/{pid}")).exists();
            for (_, block) in self.blocks.extract_if(.., |&mut (pid, _)| has_ended(pid)) {
                self.ended.add(&block.counters);
            }
        }
        self.blocks.push((pid, block));
    }

    fn sum(&self) -> Copied {
        let mut copied = self.ended.clone();
        for (_, block) in &self.blocks {
            copied.add(&block.counters);
        }
        copied
    }
}

impl Desk {
    /// Opens it for processes of this user, which are given `plan` and `flags` ([`cmt_common::control::flag`]).
    pub fn open(plan: &Plan, flags: u32) -> io::Result<Self> {
        let (folder, path, listener) = bind()?;
        let seen = Arc::new(Mutex::new(Seen::default()));
        let (plan, ours) = (*plan, Arc::clone(&seen));
        thread::Builder::new()
            .name("cmt-desk".to_owned())
            .spawn(move || {
                for stream in listener.incoming() {
                    let Ok(stream) = stream else {
                        // No descriptor left, say: there may be one later.
                        thread::sleep(PATIENCE / 10);
                        continue;
                    };
                    let ours = Arc::clone(&ours);
                    // One that says nothing must not keep others waiting.
                    let _ = thread::Builder::new().spawn(move || {
                        // Who says nonsense, or has gone, gets nothing.
                        let _ = serve(stream, &plan, flags, |pid, block| {
                            let mut seen = ours.lock().unwrap_or_else(PoisonError::into_inner);
                            seen.add(pid, block);
                        });
                    });
                }
            })?;
        Ok(Self { folder, path, seen })
    }

    /// The socket's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The block of a process that has made a copy, once it is there; `None` if that process has not come by then.
    pub fn take(&self, pid: u32) -> Option<ControlMap> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(index) = seen.blocks.iter().position(|(other, _)| *other == pid) {
                return Some(seen.blocks.swap_remove(index).1);
            }
            drop(seen);
            if Instant::now() >= deadline {
                return None;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// What all processes have copied so far. Nobody is served any more.
    pub fn close(self) -> Copied {
        drop(self.folder);
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.sum()
    }
}

/// A socket in a folder of its own, where there is room for that: its path may be no longer than some hundred bytes.
fn bind() -> io::Result<(TempDir, PathBuf, UnixListener)> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let folders = [std::env::temp_dir()]
        .into_iter()
        .chain(runtime)
        .chain(["/tmp", "/var/tmp"].map(PathBuf::from));
    let mut failed = io::Error::from(io::ErrorKind::NotFound);
    for folder in folders {
        let bound = tempfile::Builder::new()
            .prefix("cmt-tune-")
            .tempdir_in(&folder)
            .and_then(|folder| {
                let path = folder.path().join("socket");
                let listener = UnixListener::bind(&path)?;
                Ok((folder, path, listener))
            });
        match bound {
            Ok(bound) => return Ok(bound),
            Err(why) => failed = io::Error::other(format!("{}: {why}", folder.display())),
        }
    }
    Err(failed)
}

/// Puts the plan into the block that comes over `stream`, and has it `noted` before the process goes on.
fn serve(
    mut stream: UnixStream,
    plan: &Plan,
    flags: u32,
    noted: impl FnOnce(u32, ControlMap),
) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let peer = getsockopt(&stream, PeerCredentials)?;
    if peer.uid() != Uid::effective().as_raw() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let pid = u32::try_from(peer.pid()).map_err(io::Error::other)?;
    let block = ControlMap::of_file(&File::from(receive(&stream)?))?;
    block.set_plan(plan);
    // In another pid namespace it has no number here, and finds its own limits.
    let threads = Cpus::of(pid).map_or(0, |cpus| cpus.threads());
    block.max_threads.store(threads, Ordering::Release);
    block.flags.store(flags, Ordering::Release);
    noted(pid, block);
    stream.write_all(&[GO])
}

/// The descriptor that came along with a byte.
fn receive(stream: &UnixStream) -> io::Result<OwnedFd> {
    let mut byte = [0];
    let mut parts = [IoSliceMut::new(&mut byte)];
    let mut room = cmsg_space!([std::os::fd::RawFd; 1]);
    let message = recvmsg::<()>(
        stream.as_raw_fd(),
        &mut parts,
        Some(&mut room),
        MsgFlags::MSG_CMSG_CLOEXEC,
    )?;
    let mut received = Vec::new();
    for part in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(files) = part {
            // SAFETY: the kernel has just made these descriptors for us.
            received.extend(
                files
                    .into_iter()
                    .map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }),
            );
        }
    }
    match received.len() {
        1 => Ok(received.remove(0)),
        many => Err(io::Error::other(format!("{many} descriptors came along"))),
    }
}
