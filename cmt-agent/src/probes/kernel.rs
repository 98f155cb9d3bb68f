//! What the kernel is that tracing depends on: its version, its lockdown, and which links it has.

use std::fs;

use super::in_first_pid_namespace;
use super::programs::Reach;

/// Makes any kernel behave like another one, for tests: `old` as before 5.15, `single` as before 6.6, `filter` as before
/// 6.10, `lockdown` as one in confidentiality mode, `blind` as one whose page tables cannot be read.
const PRETEND: &str = "CMT_PRETEND_KERNEL";

/// Before it probes carry no cookies, which say what a probe is on. (Distributions have brought them to older ones.)
pub const OLDEST: (u32, u32) = (5, 15);

/// The links that work here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One link a function: the only ones before Linux 6.6.
    SingleSite,
    /// Links with many sites whose process filter lets one thread through only, as from 6.6 to 6.9. So they fire for all
    /// processes, and the programs pick.
    ManySitesPicking,
    /// Links with many sites.
    ManySites,
}

impl Kind {
    /// Asks the kernel for its version.
    pub fn of_links(reach: Reach) -> Self {
        let version = version();
        match reach {
            _ if version < (6, 6) => Self::SingleSite,
            Reach::All => Self::ManySites,
            Reach::Chosen if version >= (6, 10) => Self::ManySites,
            _ if in_first_pid_namespace() => Self::ManySitesPicking,
            // The programs would not know the chosen ones by the ids that they have here.
            _ => Self::SingleSite,
        }
    }
}

/// Major and minor number.
pub fn version() -> (u32, u32) {
    numbers(&release())
}

/// Its version as it writes it.
pub fn release() -> String {
    match pretended().as_deref() {
        Some("old") => "5.10".to_owned(),
        Some("single") => "5.15".to_owned(),
        Some("filter") => "6.8".to_owned(),
        _ => nix::sys::utsname::uname()
            .map(|name| name.release().to_string_lossy().into_owned())
            .unwrap_or_default(),
    }
}

/// Whether probes can carry cookies.
pub fn has_cookies() -> bool {
    version() >= OLDEST || (pretended().is_none() && aya::features().bpf_cookie())
}

/// The mode of kernel lockdown: none, integrity or confidentiality.
pub fn lockdown() -> String {
    if pretended().as_deref() == Some("lockdown") {
        return "confidentiality".to_owned();
    }
    // One word stands in brackets.
    let text = fs::read_to_string("/sys/kernel/security/lockdown").unwrap_or_default();
    let mode = text
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'));
    mode.map_or("none", |(mode, _)| mode).to_owned()
}

/// Whether programs may read its memory: LOCKDOWN_BPF_READ_KERNEL of `security/lockdown`.
pub fn lets_read() -> bool {
    lockdown() != "confidentiality" && pretended().as_deref() != Some("blind")
}

fn pretended() -> Option<String> {
    std::env::var(PRETEND).ok()
}

fn numbers(release: &str) -> (u32, u32) {
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|part| part.parse::<u32>().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_numbers_of_a_release_are_its_version() {
        for (release, version) in [
            ("6.8.12-generic", (6, 8)),
            ("5.14.0-427.el9.x86_64", (5, 14)),
            ("7.0-rc1", (7, 0)),
            ("", (0, 0)),
        ] {
            assert_eq!(numbers(release), version, "{release:?}");
        }
    }
}
