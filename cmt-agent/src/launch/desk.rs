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
use std::time::Duration;

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
        if self.blocks.len() >= MOST_BLOCKS {
            let (ended, alive) = std::mem::take(&mut self.blocks)
                .into_iter()
                .partition(|&(pid, _)| !Path::new(&format!("/proc/{pid}")).exists());
            self.blocks = alive;
            for (_, block) in Vec::from_iter::<Vec<_>>(ended) {
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
    /// Opens it for processes of this user, which are given `plan`.
    pub fn open(plan: &Plan) -> io::Result<Self> {
        let folder = tempfile::Builder::new().prefix("cmt-tune-").tempdir()?;
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path)?;
        let seen = Arc::new(Mutex::new(Seen::default()));
        let (plan, ours) = (*plan, Arc::clone(&seen));
        thread::Builder::new()
            .name("cmt-desk".to_owned())
            .spawn(move || {
                for stream in listener.incoming().flatten() {
                    // Who says nonsense, or has gone, gets nothing.
                    if let Ok((pid, block)) = serve(stream, &plan) {
                        let mut seen = ours.lock().unwrap_or_else(PoisonError::into_inner);
                        seen.add(pid, block);
                    }
                }
            })?;
        Ok(Self { folder, path, seen })
    }

    /// The socket's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What all processes have copied so far. Nobody is served any more.
    pub fn close(self) -> Copied {
        drop(self.folder);
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.sum()
    }
}

fn serve(mut stream: UnixStream, plan: &Plan) -> io::Result<(u32, ControlMap)> {
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
    stream.write_all(&[GO])?;
    Ok((pid, block))
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
    let received = message.cmsgs()?.find_map(|message| match message {
        ControlMessageOwned::ScmRights(files) => files.first().copied(),
        _ => None,
    });
    let fd = received.ok_or_else(|| io::Error::other("no control block came along"))?;
    // SAFETY: the kernel has just made this descriptor for us; there is room for one only.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
