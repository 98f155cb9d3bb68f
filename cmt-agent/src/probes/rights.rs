//! What tracing needs from the kernel's access control, and which part of it is missing.

use std::fs;

/// Capabilities that tracing needs, with their numbers. CAP_SYS_ADMIN stands for the first two.
const NEEDED: [(&str, u32); 3] = [("CAP_BPF", 39), ("CAP_PERFMON", 38), ("CAP_SYS_PTRACE", 19)];
const CAP_SYS_ADMIN: u32 = 21;

/// Names of the capabilities that this process lacks for tracing.
pub fn missing() -> Vec<&'static str> {
    let effective = effective();
    let has = |number: u32| effective >> number & 1 == 1;
    NEEDED
        .iter()
        .filter(|(name, number)| {
            !has(*number) && (*name == "CAP_SYS_PTRACE" || !has(CAP_SYS_ADMIN))
        })
        .map(|(name, _)| *name)
        .collect()
}

/// True where kernel lockdown forbids reading other processes' memory from BPF.
pub fn locked_down() -> bool {
    fs::read_to_string("/sys/kernel/security/lockdown")
        .is_ok_and(|state| state.contains("[confidentiality]"))
}

/// One sentence: why the kernel may have refused, and the remedy.
pub fn reason() -> String {
    let missing = missing();
    if !missing.is_empty() {
        return format!(
            "{} missing; run it as root (sudo cmt …), or give the container these capabilities",
            missing.join(", ")
        );
    }
    if locked_down() {
        return "kernel lockdown is in confidentiality mode; boot with lockdown=integrity or without".into();
    }
    "no capability is missing, so a security module or a seccomp filter forbids it; run it outside the container".into()
}

fn effective() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .unwrap_or(0)
}
