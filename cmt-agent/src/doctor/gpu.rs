//! The machine: processor, driver, processors for the copies.
#![expect(unsafe_code, reason = "calls into libcuda")]

use std::fs;

use super::Need::{Attach, Trace};
use super::{Check, State};
use crate::cpus::Cpus;

pub(super) fn architecture() -> Check {
    const NAME: &str = "processor";
    if cfg!(target_arch = "x86_64") {
        return Check::ok(NAME, Attach, "x86-64");
    }
    Check::new(NAME, Attach, State::Failed, std::env::consts::ARCH).but(
        "the payload's hooks are x86-64 code",
        "trace only, or use an x86-64 machine",
    )
}

pub(super) fn driver() -> Check {
    const NAME: &str = "GPU driver";
    let module = fs::read_to_string("/sys/module/nvidia/version").unwrap_or_default();
    let module = module.trim();
    match (cuda_version(), module) {
        (Some(cuda), "") => Check::info(NAME, Trace, format!("libcuda for CUDA {cuda}")),
        (Some(cuda), module) => Check::ok(NAME, Trace, format!("{module}, libcuda for CUDA {cuda}")),
        (None, "") => Check::new(NAME, Trace, State::Warning, "none found").but(
            "programs on this machine cannot use a GPU; those in containers bring their own libcuda",
            "install NVIDIA's driver where the copies are to run",
        ),
        (None, module) => Check::info(NAME, Trace, format!("{module}, no libcuda here")),
    }
}

/// The CUDA version that the installed libcuda supports.
fn cuda_version() -> Option<String> {
    // SAFETY: loads libcuda and looks one function up; its constructors are those that any CUDA program runs.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return None;
    }
    let mut version = 0;
    // SAFETY: libcuda is there; the function needs no initialisation and writes one integer.
    let result = unsafe { cudarc::driver::sys::cuDriverGetVersion(&mut version) };
    (result == cudarc::driver::sys::CUresult::CUDA_SUCCESS)
        .then(|| format!("{}.{}", version / 1000, version % 1000 / 10))
}

pub(super) fn cpus() -> Check {
    const NAME: &str = "processors";
    match Cpus::of(std::process::id()) {
        Ok(cpus) => {
            let quota = match cpus.quota {
                Some(quota) => format!(", cgroup quota {quota:.1}"),
                None => String::new(),
            };
            let found = format!("{}{quota}", cpus.allowed);
            if cpus.threads() > 1 {
                return Check::ok(NAME, Attach, found);
            }
            Check::new(NAME, Attach, State::Warning, found).but(
                "one processor copies no faster than the driver does",
                "give the target more processors (affinity, cpu.max)",
            )
        }
        Err(error) => Check::new(NAME, Attach, State::Warning, error.to_string()),
    }
}
