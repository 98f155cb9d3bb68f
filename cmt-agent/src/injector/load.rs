//! Bringing the payload into a target, and starting one that is there again.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use cmt_common::control::{MAGIC, PAYLOAD_ENTRY, VERSION, boot};

use super::hijack::{self, Cave, Job};
use super::{ControlMap, InjectError, STEP_LIMIT, commit, control, descriptors, has_thread, stub};
use crate::target::{Cuda, Libc, Target, TargetError};

/// The payload, built from `cmt-inject`.
pub static PAYLOAD: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/payload.so"));

/// Brings the payload in and waits until its control thread serves commands.
pub fn load(
    target: &mut Target,
    libc: &Libc,
    cuda: &Cuda,
) -> Result<((ControlMap, Cave), Duration), InjectError> {
    target.check_address_space()?;
    let known = target.control_addresses();
    let without_proc = !target.sees_proc();
    let (cave, _, held) = hijack::launch(target, libc, Job::Load { without_proc })?;
    let deadline = Instant::now() + STEP_LIMIT;
    let control = loop {
        target.refresh_maps()?;
        let fresh = target
            .control_addresses()
            .into_iter()
            .find(|address| !known.contains(address));
        if let Some(address) = fresh {
            let control = ControlMap::open(target, address)?;
            if control.boot.state.load(Ordering::Acquire) == boot::READY {
                break control;
            }
        }
        if Instant::now() >= deadline {
            let _ = commit::commit(target, &[], Some(cave));
            return Err(InjectError::NoBootstrap {
                waited_s: STEP_LIMIT.as_secs(),
            });
        }
        std::thread::sleep(Duration::from_micros(200));
    };
    let result = fill_and_start(target, libc, cuda, &control, without_proc);
    if let Err(error) = result {
        control.boot.state.store(boot::ABORT, Ordering::Release);
        control::wake(&control.boot.state);
        std::thread::sleep(Duration::from_millis(20));
        let _ = commit::commit(target, &[], Some(cave));
        return Err(error);
    }
    Ok(((control, cave), held))
}

fn fill_and_start(
    target: &mut Target,
    libc: &Libc,
    cuda: &Cuda,
    control: &ControlMap,
    without_proc: bool,
) -> Result<(), InjectError> {
    let fd = control.boot.payload_fd.load(Ordering::Acquire);
    if fd > i32::MAX as u32 {
        let message = "it may open no more descriptors (RLIMIT_NOFILE)".to_owned();
        return Err(InjectError::NotLoaded { message });
    }
    put_payload(target, fd)?;
    // Spelt as nobody else does: the loader remembers it, and gives whoever asks for the same the payload.
    let folder = if without_proc {
        hand_over(target, control)?;
        "./././././."
    } else {
        "/proc/self/fd/."
    };
    control.set_boot_text(&format!("{folder}/{fd}"), PAYLOAD_ENTRY);
    control.boot.dlopen.store(libc.dlopen, Ordering::Relaxed);
    control.boot.dlsym.store(libc.dlsym, Ordering::Relaxed);
    control.boot.dlerror.store(libc.dlerror, Ordering::Relaxed);
    for (slot, symbol) in control.driver.iter().zip(cuda.driver) {
        slot.store(symbol.map_or(0, |symbol| symbol.address), Ordering::Relaxed);
    }
    for (slot, symbol) in control.hooks.iter().zip(cuda.hooked) {
        slot.address
            .store(symbol.map_or(0, |symbol| symbol.address), Ordering::Relaxed);
        slot.size
            .store(symbol.map_or(0, |symbol| symbol.size), Ordering::Relaxed);
    }
    control.version.store(VERSION, Ordering::Relaxed);
    control.magic.store(MAGIC, Ordering::Relaxed);
    control.boot.state.store(boot::LOAD, Ordering::Release);
    control::wake(&control.boot.state);
    wait_running(target, control)?;
    Ok(target.refresh_maps()?)
}

/// Writes the payload to the target's memfd, with the target's own descriptor: what it may not write, we do not either.
fn put_payload(target: &Target, fd: u32) -> Result<(), InjectError> {
    let pid = target.pid;
    let failed = |source| InjectError::Write { pid, source };
    let file = descriptors::take(pid, fd).map_err(failed)?;
    // Asked for afterwards: what was taken is of that program.
    target.check_same_program()?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() || metadata.nlink() != 0 || metadata.len() != 0 {
        return Err(failed(io::Error::other(
            "the payload's descriptor is no empty file in memory",
        )));
    }
    file.write_all_at(PAYLOAD, 0).map_err(failed)
}

/// Sends a target that sees no `/proc` what it needs of it: the folder of its own descriptors, and its own memory map.
fn hand_over(target: &Target, control: &ControlMap) -> Result<(), InjectError> {
    let pid = target.pid;
    let failed = |error| InjectError::NotLoaded {
        message: format!("it sees no /proc, and could not be handed its own descriptors: {error}"),
    };
    control.expect_descriptors();
    let folder = descriptors::own_folder(pid).map_err(failed)?;
    let maps = std::fs::File::open(format!("/proc/{pid}/maps")).map_err(failed)?;
    let socket = control.boot.sockets[1].load(Ordering::Acquire);
    // A program with more rights than the target had must not have its memory map given away.
    target.check_same_program()?;
    descriptors::send(pid, socket, [folder.as_raw_fd(), maps.as_raw_fd()]).map_err(failed)
}

fn wait_running(target: &Target, control: &ControlMap) -> Result<(), InjectError> {
    let deadline = Instant::now() + STEP_LIMIT;
    loop {
        match control.boot.state.load(Ordering::Acquire) {
            boot::RUNNING => break,
            boot::FAILED => {
                let message = [control.boot_message(), control.message()]
                    .into_iter()
                    .find(|text| !text.is_empty())
                    .unwrap_or_else(|| {
                        let boot = &control.boot;
                        let handed = boot.message_header.parts[1].load(Ordering::Relaxed) != 0;
                        if handed && boot.maps_fd.load(Ordering::Relaxed) == 0 {
                            "it could not receive its own descriptors (limit?)".to_owned()
                        } else {
                            "it could not start its thread (thread limit?)".to_owned()
                        }
                    });
                return Err(InjectError::NotLoaded { message });
            }
            _ if target.has_ended() => {
                return Err(TargetError::NoSuchProcess { pid: target.pid }.into());
            }
            _ if Instant::now() >= deadline => {
                let message =
                    "the loader did not come back; does another thread sit in dlopen?".to_owned();
                return Err(InjectError::NotLoaded { message });
            }
            _ => std::thread::sleep(Duration::from_micros(100)),
        }
    }
    // Its last instructions stand in the cave, which the commit is to clear.
    while Instant::now() < deadline && has_thread(target, |name| name == stub::THREAD_NAME) {
        std::thread::sleep(Duration::from_micros(50));
    }
    Ok(())
}

/// Starts the control thread of a payload that is loaded already.
pub fn restart(
    target: &Target,
    libc: &Libc,
    control: &ControlMap,
) -> Result<(Cave, Duration), InjectError> {
    let entry = control.entry.load(Ordering::Acquire);
    if !target.is_payload_code(entry) {
        let message = "its control block names no code of the payload".to_owned();
        return Err(InjectError::NotLoaded { message });
    }
    control.boot.state.store(boot::LOAD, Ordering::Release);
    let (cave, _, held) = hijack::launch(
        target,
        libc,
        Job::Restart {
            entry,
            control: control.address(),
        },
    )?;
    if let Err(error) = wait_running(target, control) {
        let _ = commit::commit(target, &[], Some(cave));
        return Err(error);
    }
    Ok((cave, held))
}
