//! Whom a process belongs to, by its cgroup: a container, a Kubernetes pod, a systemd unit.

use std::fmt;

use procfs::process::Process;
use serde::Serialize;

use crate::target::text;

/// Digits of a container's id that are shown, as docker does.
const SHOWN: usize = 12;

/// What a cgroup's path names. What it does not name is none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Workload {
    /// Container id, its first digits.
    pub container: Option<String>,
    /// Uid of a Kubernetes pod.
    pub pod: Option<String>,
    /// systemd service or scope.
    pub unit: Option<String>,
}

impl Workload {
    /// That of process `pid`; empty where it has none or may not be looked at.
    pub fn of(pid: u32) -> Self {
        let groups = Process::new(pid as i32)
            .and_then(|process| text::relative(&process, "cgroup"))
            .unwrap_or_default();
        Self::in_cgroups(&groups)
    }

    /// By the text of a `/proc/PID/cgroup`.
    fn in_cgroups(groups: &str) -> Self {
        // Version 2 has one line; in version 1 all controllers' paths name the same things, and systemd's is one of them.
        let path = groups
            .lines()
            .filter_map(|line| line.splitn(3, ':').nth(2))
            .max_by_key(|path| path.len())
            .unwrap_or_default();
        Self::parse(&text::printable(path))
    }

    /// Whether nothing is named.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn parse(path: &str) -> Self {
        let mut found = Self::default();
        for part in path.split('/') {
            if let Some(id) = container(part) {
                found.container = Some(id[..SHOWN].to_owned());
            } else if let Some(uid) = pod(part) {
                found.pod = Some(uid);
            } else if part.ends_with(".service") || part.ends_with(".scope") {
                found.unit = Some(part.to_owned());
            }
        }
        found
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            ("pod", &self.pod),
            ("container", &self.container),
            ("unit", &self.unit),
        ];
        let named: Vec<String> = parts
            .iter()
            .filter_map(|(what, name)| Some(format!("{what} {}", name.as_ref()?)))
            .collect();
        f.write_str(&named.join(", "))
    }
}

/// The 64 hexadecimal digits of a part such as `docker-ID.scope`, `cri-containerd-ID.scope`, `libpod-ID` or `ID` itself.
fn container(part: &str) -> Option<&str> {
    const DIGITS: usize = 64;
    let part = part.strip_suffix(".scope").unwrap_or(part);
    let id = part.rsplit('-').next()?;
    (id.len() == DIGITS && id.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(id)
}

/// The uid in `kubepods-burstable-podUID.slice` (with `_` for `-`) or `podUID`.
fn pod(part: &str) -> Option<String> {
    const CHARACTERS: usize = 36;
    let part = part.strip_suffix(".slice").unwrap_or(part);
    let (_, uid) = part.rsplit_once("pod")?;
    let uid = uid.replace('_', "-");
    (uid.len() == CHARACTERS
        && uid
            .bytes()
            .all(|byte| byte == b'-' || byte.is_ascii_hexdigit()))
    .then_some(uid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_are_known_by_their_cgroups() {
        let id = "3f2a".repeat(16);
        for (cgroups, container_of) in [
            (
                "0::/user.slice/user-0.slice/session-1.scope\n".to_owned(),
                None,
            ),
            (
                format!("0::/system.slice/docker-{id}.scope\n"),
                Some("3f2a3f2a3f2a"),
            ),
            (
                format!("11:cpu:/kubepods/burstable/pod1-2-3/{id}\n1:x:/\n"),
                Some("3f2a3f2a3f2a"),
            ),
            ("0::/\n".to_owned(), None),
        ] {
            let found = Workload::in_cgroups(&cgroups).container;
            assert_eq!(found.as_deref(), container_of, "{cgroups}");
        }
    }

    #[test]
    fn containers_pods_and_units_are_found_in_paths() {
        let id = "3f2a9c1b2d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8";
        let uid = "0fd4b2a1-5c55-4a0e-9f6e-0c1d2e3f4a5b";
        let under = uid.replace('-', "_");
        for (path, shown) in [
            (
                format!("/system.slice/docker-{id}.scope"),
                "container 3f2a9c1b2d4e".to_owned(),
            ),
            (format!("/docker/{id}"), "container 3f2a9c1b2d4e".to_owned()),
            (
                format!(
                    "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{under}.slice/cri-containerd-{id}.scope"
                ),
                format!("pod {uid}, container 3f2a9c1b2d4e"),
            ),
            (
                format!("/kubepods/pod{uid}/{id}"),
                format!("pod {uid}, container 3f2a9c1b2d4e"),
            ),
            (
                "/system.slice/trainer.service".to_owned(),
                "unit trainer.service".to_owned(),
            ),
            ("/".to_owned(), String::new()),
            ("/user.slice/podium/pod-of-whales".to_owned(), String::new()),
        ] {
            assert_eq!(Workload::parse(&path).to_string(), shown, "{path}");
        }
    }
}
