//! Acts by a policy, one process at a time, on a thread of its own: nobody who asks for metrics waits for it.
//!
//! Knows processes by what the node counted of them and by what stands in them. One that was detached, by whomever, is left
//! alone for good: its control block says so even to a `cmt serve` that was started later.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use cmt_common::control::Plan;

use super::case::{Case, Observation, State, Trial, Worth};
use super::deeds::{attach, detach, staged_bytes, staged_errors, standing};
use super::file::{Mode, Policy, Rule};
use super::verdict;
use crate::injector::Standing;
use crate::link::Link;
use crate::serve::Shared;
use crate::serve::node::lock;
use crate::serve::totals::Totals;
use crate::serve::with;
use crate::trace::Snapshot;
use crate::trace::gain::{Gain, Means};

/// How often it looks at what was counted.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How often it looks into attached processes, and tries again what did not work.
const INSPECT_EVERY: Duration = Duration::from_secs(10);

/// Acts by `policy` as long as `node` is there.
pub fn start(policy: Policy, node: Shared, totals: Arc<Mutex<Totals>>) {
    lock(&totals).actions.get_or_insert_default();
    let mut steward = Steward {
        course: policy.rules.iter().map(|_| Course::Open).collect(),
        policy,
        node,
        totals,
        cases: BTreeMap::new(),
    };
    // At the end of serve nobody waits for it: what a keeper has begun it finishes by itself.
    thread::spawn(move || {
        while steward.look().is_some() {
            thread::sleep(LOOK_EVERY);
        }
    });
}

struct Steward {
    policy: Policy,
    /// How it went so far, by rule.
    course: Vec<Course>,
    node: Shared,
    totals: Arc<Mutex<Totals>>,
    cases: BTreeMap<u32, Case>,
}

/// How far a rule has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Course {
    /// Its first processes are yet to be judged, where it has a canary share.
    Open,
    /// They were, and stay: all others follow.
    Proven,
    /// One of them was rolled back: no other follows.
    Stopped,
}

/// A live process as the node sees it.
struct Seen {
    started: u64,
    workload: String,
    rule: usize,
    threads: u32,
    counted: Snapshot,
}

impl Steward {
    /// One look at all processes. `None` once serve ends.
    fn look(&mut self) -> Option<()> {
        let seen = self.seen()?;
        self.cases.retain(|pid, case| {
            let now = seen.get(pid);
            now.is_some_and(|now| now.started == case.started && now.rule == case.rule)
        });
        for (pid, now) in &seen {
            if !self.cases.contains_key(pid) {
                self.open(*pid, now);
            }
            self.go_on(*pid, now);
        }
        if let Some(pid) = self.next() {
            self.attach(pid)?;
        }
        Some(())
    }

    fn seen(&self) -> Option<BTreeMap<u32, Seen>> {
        with(&self.node, |node| {
            let found = node.processes().filter_map(|(pid, process, workload)| {
                let seen = Seen {
                    started: process.started,
                    rule: self.policy.rule_for(&workload)?,
                    workload,
                    threads: process.threads,
                    counted: node.counted(pid),
                };
                Some((pid, seen))
            });
            found.collect()
        })
    }

    fn open(&mut self, pid: u32, now: &Seen) {
        let mut case = Case {
            started: now.started,
            workload: now.workload.clone(),
            rule: now.rule,
            state: State::Observed(Box::new(Observation {
                since: now.counted.clone(),
                worth: None,
                waits: false,
            })),
        };
        if self.policy.mode == Mode::Attach {
            // What cannot be looked at is told when it is attached to.
            match standing(pid) {
                Ok(Standing::Attached) => {
                    self.tell(pid, &case, "adopt", "it is attached already");
                    case.state =
                        State::Attached(Trial::new(pid, None, Plan::NONE, now.counted.clone()));
                }
                Ok(Standing::Left) => {
                    self.tell(pid, &case, "leave", "it was detached once");
                    case.state = State::Left;
                }
                Ok(Standing::Untouched) | Err(_) => {}
            }
        }
        self.cases.insert(pid, case);
    }

    fn go_on(&mut self, pid: u32, now: &Seen) {
        let Some(mut case) = self.cases.remove(&pid) else {
            return;
        };
        let state = std::mem::replace(&mut case.state, State::Left);
        case.state = match state {
            State::Observed(observed) => self.observe(pid, &case, now, observed),
            State::Attached(trial) => self.judge(pid, &case, now, trial),
            State::Left => State::Left,
        };
        self.cases.insert(pid, case);
    }

    fn observe(&self, pid: u32, case: &Case, now: &Seen, mut observed: Box<Observation>) -> State {
        let rule = self.rule(case);
        let window = now.counted.since(&observed.since);
        if window.duration < rule.observe {
            return State::Observed(observed);
        }
        let means = Means {
            link: Link::best(),
            threads: now.threads,
        };
        let seconds = window.duration.as_secs_f64();
        let gain = Gain::of(window.rows.iter(), seconds, &means);
        log::debug!("policy: process {pid} ({}): {}", case.workload, gain.advice);
        let enough = gain
            .saved_s_per_minute
            .filter(|gain| *gain >= rule.min_gain);
        if let Some(gain) = enough
            && self.policy.mode == Mode::Observe
        {
            // What is attached to, or was, would be left as it is.
            if matches!(standing(pid), Ok(Standing::Untouched) | Err(_)) {
                self.tell(pid, case, "would_attach", &estimate(gain));
            }
            return State::Left;
        }
        observed.since = now.counted.clone();
        observed.worth = enough.map(|gain| Worth {
            before: window,
            gain,
        });
        State::Observed(observed)
    }

    /// The process to attach to now: of those that may be, the one that has run longest.
    fn next(&mut self) -> Option<u32> {
        let mut worthy: Vec<(u64, u32)> = self
            .cases
            .iter()
            .filter(|(_, case)| case.is_worth_it())
            .map(|(pid, case)| (case.started, *pid))
            .collect();
        worthy.sort_unstable();
        let mut chosen = None;
        for (_, pid) in worthy {
            let rule = self.cases[&pid].rule;
            if self.course[rule] == Course::Stopped {
                continue;
            }
            if self.may_follow(rule) {
                chosen = chosen.or(Some(pid));
            } else {
                self.let_wait(pid);
            }
        }
        chosen
    }

    /// Whether a rule's canary share leaves room for another process.
    fn may_follow(&self, rule: usize) -> bool {
        let Some(share) = self.policy.rules[rule].canary else {
            return true;
        };
        let of_rule = || self.cases.values().filter(|case| case.rule == rule);
        let on_trial = of_rule().filter(|case| case.is_on_trial()).count();
        self.course[rule] == Course::Proven || on_trial < canaries(share, of_rule().count())
    }

    fn let_wait(&mut self, pid: u32) {
        let Some(case) = self.cases.get_mut(&pid) else {
            return;
        };
        if let State::Observed(observed) = &mut case.state
            && !std::mem::replace(&mut observed.waits, true)
        {
            let case = &self.cases[&pid];
            self.tell(pid, case, "canary_wait", "others are tried first");
        }
    }

    fn attach(&mut self, pid: u32) -> Option<()> {
        let mut case = self.cases.remove(&pid)?;
        let State::Observed(observed) = std::mem::replace(&mut case.state, State::Left) else {
            return Some(());
        };
        let Some(worth) = observed.worth else {
            return Some(());
        };
        let attached = match standing(pid) {
            Ok(Standing::Attached) => {
                self.tell(pid, &case, "adopt", "somebody has attached to it");
                Ok(Plan::NONE)
            }
            Ok(Standing::Left) => {
                self.tell(pid, &case, "leave", "somebody has detached from it");
                self.cases.insert(pid, case);
                return Some(());
            }
            Ok(Standing::Untouched) | Err(_) => {
                let attached = attach(pid, case.started);
                if attached.is_ok() {
                    self.tell(pid, &case, "attach", &estimate(worth.gain));
                }
                attached
            }
        };
        match attached {
            Ok(plan) => {
                let since = with(&self.node, |node| {
                    // What was counted up to now was copied as before.
                    if let Err(error) = node.turn() {
                        log::warn!("policy: {error}");
                    }
                    node.counted(pid)
                })?;
                case.state = State::Attached(Trial::new(pid, Some(worth.before), plan, since));
            }
            Err(error) => self.tell(pid, &case, "attach_failed", &format!("{error:#}")),
        }
        self.cases.insert(pid, case);
        Some(())
    }

    fn judge(&mut self, pid: u32, case: &Case, now: &Seen, mut trial: Box<Trial>) -> State {
        if trial.condemned.is_none() {
            trial.condemned = self.reason_to_detach(pid, case, now, &mut trial);
        } else if trial.inspected.elapsed() < INSPECT_EVERY {
            return State::Attached(trial);
        }
        if let Some(why) = &trial.condemned {
            return match detach(pid, case.started) {
                Ok(()) => {
                    self.tell(pid, case, "rollback", why);
                    self.stop_unless_proven(case);
                    State::Left
                }
                Err(error) => {
                    self.tell(pid, case, "rollback_failed", &format!("{why}; {error:#}"));
                    trial.inspected = Instant::now();
                    State::Attached(trial)
                }
            };
        }
        if trial.inspected.elapsed() >= INSPECT_EVERY {
            trial.inspected = Instant::now();
            if standing(pid).is_ok_and(|standing| standing != Standing::Attached) {
                self.tell(pid, case, "leave", "somebody has detached from it");
                return State::Left;
            }
        }
        State::Attached(trial)
    }

    /// Looks at what an attached process has copied since.
    fn reason_to_detach(
        &mut self,
        pid: u32,
        case: &Case,
        now: &Seen,
        trial: &mut Trial,
    ) -> Option<String> {
        let after = now.counted.since(&trial.since);
        if let Some(before) = &trial.before {
            let failing = verdict::failing(before, &after);
            // Copies that the original function refuses are the application's own affair.
            if !failing.is_empty() && staged_errors(pid) > trial.failed {
                return Some(format!("copies began to fail: {}", failing.join(", ")));
            }
        }
        let rule = self.rule(case);
        if trial.begun.elapsed() < rule.rollback.after {
            return None;
        }
        match &trial.before {
            Some(before) if !trial.judged && trial.plan != Plan::NONE => {
                let staged = staged_bytes(pid);
                let least = rule.rollback.min_gain;
                match verdict::gained(before, &after, &trial.plan, staged.as_ref(), least) {
                    Ok(gained) => {
                        let gained = format!("it gains {gained:.2} s of every minute");
                        self.tell(pid, case, "keep", &gained);
                    }
                    Err(why) => return Some(why),
                }
            }
            _ if !trial.judged => self.tell(pid, case, "keep", "nothing failed"),
            _ => {}
        }
        // From then on failures alone are looked for, in windows of the same length.
        trial.before.get_or_insert(after);
        trial.since = now.counted.clone();
        trial.begun = Instant::now();
        trial.failed = staged_errors(pid);
        trial.judged = true;
        let rule = case.rule;
        let others = self.cases.values().filter(|other| other.rule == rule);
        if self.course[rule] == Course::Open && !others.into_iter().any(Case::is_on_trial) {
            self.course[rule] = Course::Proven;
        }
        None
    }

    fn stop_unless_proven(&mut self, case: &Case) {
        let canary = self.rule(case).canary.is_some();
        let course = &mut self.course[case.rule];
        if canary && *course == Course::Open {
            *course = Course::Stopped;
            eprintln!(
                "cmt: policy: rule {} ({}) attaches to no other process",
                case.rule + 1,
                self.policy.rules[case.rule].workload
            );
            self.count(case, "stop");
        }
    }

    fn rule(&self, case: &Case) -> &Rule {
        &self.policy.rules[case.rule]
    }

    fn count(&self, case: &Case, action: &'static str) {
        let mut totals = lock(&self.totals);
        let actions = totals.actions.get_or_insert_default();
        actions.add(&case.workload, action);
    }

    /// Logs and counts.
    fn tell(&self, pid: u32, case: &Case, action: &'static str, why: &str) {
        eprintln!(
            "cmt: policy: process {pid} ({}): {action}: {why}",
            case.workload
        );
        self.count(case, action);
    }
}

/// How many of so many processes come first: at least one.
fn canaries(share: f64, processes: usize) -> usize {
    ((share * processes as f64).ceil() as usize).max(1)
}

fn estimate(gain: f64) -> String {
    format!("an estimated {gain:.2} s of every minute")
}
