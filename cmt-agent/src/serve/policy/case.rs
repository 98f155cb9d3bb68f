//! What is known of each process that a rule is for: whether attaching would help, or what came of it.

use std::time::Instant;

use cmt_common::control::Plan;

use super::deeds;
use crate::trace::Snapshot;

/// A process of a workload that a rule is for.
pub struct Case {
    pub started: u64,
    pub workload: String,
    pub rule: usize,
    pub state: State,
}

pub enum State {
    Observed(Box<Observation>),
    Attached(Box<Trial>),
    /// Nothing more will be done to it.
    Left,
}

/// It is as it was.
pub struct Observation {
    /// What was counted until the beginning of this window.
    pub since: Snapshot,
    /// What the window before said.
    pub worth: Option<Worth>,
    /// It was told that others are tried first.
    pub waits: bool,
}

/// Attaching would give enough back.
pub struct Worth {
    pub before: Snapshot,
    pub gain: f64,
}

/// What came of an attach is yet to be seen, or to be seen again.
pub struct Trial {
    /// `None` where it was attached before anybody looked.
    pub before: Option<Snapshot>,
    pub plan: Plan,
    /// What was counted until the beginning of this window.
    pub since: Snapshot,
    pub begun: Instant,
    /// Staged copies that had failed by then.
    pub failed: u64,
    pub judged: bool,
    pub inspected: Instant,
    /// Why it is to be detached, where that did not work yet.
    pub condemned: Option<String>,
}

impl Case {
    pub fn is_worth_it(&self) -> bool {
        matches!(&self.state, State::Observed(observed) if observed.worth.is_some())
    }

    pub fn is_on_trial(&self) -> bool {
        matches!(&self.state, State::Attached(trial) if !trial.judged)
    }
}

impl Trial {
    pub fn new(pid: u32, before: Option<Snapshot>, plan: Plan, since: Snapshot) -> Box<Self> {
        Box::new(Self {
            before,
            plan,
            since,
            begun: Instant::now(),
            // Attaching again goes on with the counters of before.
            failed: deeds::staged_errors(pid),
            judged: false,
            inspected: Instant::now(),
            condemned: None,
        })
    }
}
