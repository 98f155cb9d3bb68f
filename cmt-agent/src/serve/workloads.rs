//! Names of workloads: few, and each keeps its meaning for good.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::trace::Process;
use crate::workload::Workload;

/// What goes by no name of its own.
pub const OTHER: &str = "other";

/// The workloads that have a name.
#[derive(Debug)]
pub struct Workloads {
    named: BTreeSet<Arc<str>>,
    most: usize,
    other: Arc<str>,
}

impl Workloads {
    /// At most so many will be named.
    pub fn new(most: usize) -> Self {
        Self {
            named: BTreeSet::new(),
            most,
            other: OTHER.into(),
        }
    }

    /// The name to count `workload` under: its own as long as there is room, and from then on always.
    pub fn named(&mut self, workload: &str) -> Arc<str> {
        if let Some(name) = self.named.get(workload) {
            return Arc::clone(name);
        }
        if self.named.len() >= self.most {
            return self.other();
        }
        let name: Arc<str> = workload.into();
        self.named.insert(Arc::clone(&name));
        name
    }

    /// The name of all others.
    pub fn other(&self) -> Arc<str> {
        Arc::clone(&self.other)
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
        let mut workloads = Workloads::new(2);
        for round in 0..3 {
            assert_eq!(&*workloads.named("comm/a"), "comm/a");
            assert_eq!(&*workloads.named("unit/b.service"), "unit/b.service");
            assert_eq!(&*workloads.named(&format!("comm/c{round}")), OTHER);
        }
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
