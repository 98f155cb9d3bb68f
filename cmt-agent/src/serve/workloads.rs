//! Names of workloads: few, and each keeps its meaning. One whose processes have been gone for long makes room for another.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::trace::Process;
use crate::workload::Workload;

/// What goes by no name of its own.
pub const OTHER: &str = "other";
/// What went by names that were given up.
pub const FORMER: &str = "former";

/// The workloads that have a name.
#[derive(Debug)]
pub struct Workloads {
    /// When each was last seen alive or copying.
    named: BTreeMap<Arc<str>, Instant>,
    most: usize,
    /// A name stays at least so long after that.
    kept: Duration,
    other: Arc<str>,
}

impl Workloads {
    /// At most so many will be named at once.
    pub fn new(most: usize, kept: Duration) -> Self {
        Self {
            named: BTreeMap::new(),
            most,
            kept,
            other: OTHER.into(),
        }
    }

    /// The name to count `workload` under at this time: its own if it has one or finds room. Makes room, if it has to, by giving
    /// up the name that was not seen for longest, which comes second.
    pub fn named(&mut self, workload: &str, now: Instant) -> (Arc<str>, Option<Arc<str>>) {
        if let Some((name, _)) = self.named.get_key_value(workload) {
            let name = Arc::clone(name);
            self.named.insert(Arc::clone(&name), now);
            return (name, None);
        }
        let given_up = match self.named.len() < self.most {
            true => None,
            false => match self.oldest(now) {
                None => return (self.other(), None),
                given_up => given_up,
            },
        };
        if let Some(name) = &given_up {
            self.named.remove(name);
        }
        let name: Arc<str> = workload.into();
        self.named.insert(Arc::clone(&name), now);
        (name, given_up)
    }

    /// The same without making room, for what does not say that a process lives.
    pub fn named_if_room(&mut self, workload: &str, now: Instant) -> Arc<str> {
        if let Some((name, _)) = self.named.get_key_value(workload) {
            return Arc::clone(name);
        }
        match self.named.len() < self.most {
            true => self.named(workload, now).0,
            false => self.other(),
        }
    }

    /// A process of `workload` lives at this time.
    pub fn see(&mut self, workload: &str, now: Instant) {
        if let Some(seen) = self.named.get_mut(workload) {
            *seen = now;
        }
    }

    /// The name of all others.
    pub fn other(&self) -> Arc<str> {
        Arc::clone(&self.other)
    }

    fn oldest(&self, now: Instant) -> Option<Arc<str>> {
        let mut names = self.named.iter();
        let gone = names
            .by_ref()
            .filter(|(_, seen)| now.duration_since(**seen) >= self.kept);
        gone.min_by_key(|(_, seen)| **seen)
            .map(|(name, _)| Arc::clone(name))
    }
}

/// What a process belongs to: `pod/UID`, `container/ID` or `unit/NAME`, else `comm/` and its own name.
pub fn of(pid: u32, process: &Process) -> String {
    // It may have copied before the scanner looked at it.
    let unseen = process.libraries.is_empty();
    let workload = match unseen {
        true => &Workload::of(pid),
        false => &process.workload,
    };
    match workload {
        Workload { pod: Some(uid), .. } => format!("pod/{uid}"),
        Workload {
            container: Some(id),
            ..
        } => format!("container/{id}"),
        Workload {
            unit: Some(name), ..
        } => format!("unit/{name}"),
        _ => format!("comm/{}", process.comm),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_workloads_keep_their_names_and_the_rest_has_one() {
        let mut workloads = Workloads::new(2, Duration::from_secs(60));
        let begun = Instant::now();
        for round in 0..3 {
            let mut named = |workload: &str| {
                let (name, given_up) = workloads.named(workload, begun);
                assert_eq!(given_up, None);
                name
            };
            assert_eq!(&*named("comm/a"), "comm/a");
            assert_eq!(&*named("unit/b.service"), "unit/b.service");
            assert_eq!(&*named(&format!("comm/c{round}")), OTHER);
        }
    }

    #[test]
    fn what_was_gone_for_longest_makes_room() {
        let mut workloads = Workloads::new(2, Duration::from_secs(60));
        let begun = Instant::now();
        let at = |s| begun + Duration::from_secs(s);
        let mut named = |workload: &str, s| {
            let (name, given_up) = workloads.named(workload, at(s));
            (name.to_string(), given_up.map(|name| name.to_string()))
        };
        named("comm/a", 0);
        named("comm/b", 0);
        named("comm/b", 10);
        assert_eq!(named("comm/c", 59), (OTHER.into(), None), "both are young");
        assert_eq!(
            named("comm/c", 60),
            ("comm/c".into(), Some("comm/a".into()))
        );
        workloads.see("comm/b", at(100));
        // One that came back has lost its name, and one that lives keeps it.
        let (name, given_up) = workloads.named("comm/a", at(125));
        assert_eq!((&*name, given_up.as_deref()), ("comm/a", Some("comm/c")));
    }

    #[test]
    fn a_workload_is_the_largest_that_is_known() {
        let process = |workload: &Workload| Process {
            comm: "python3".into(),
            libraries: vec!["libcuda.so.1".into()],
            workload: workload.clone(),
            ..Process::default()
        };
        let mut workload = Workload {
            container: Some("3f2a9c1b2d4e".into()),
            pod: Some("0fd4b2a1".into()),
            unit: Some("a.service".into()),
        };
        assert_eq!(of(0, &process(&workload)), "pod/0fd4b2a1");
        workload.pod = None;
        assert_eq!(of(0, &process(&workload)), "container/3f2a9c1b2d4e");
        workload.container = None;
        assert_eq!(of(0, &process(&workload)), "unit/a.service");
        workload.unit = None;
        assert_eq!(of(0, &process(&workload)), "comm/python3");
    }
}
