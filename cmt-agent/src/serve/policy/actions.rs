//! How often something was done, by workload: of those to which something was done last, all others as one.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::serve::workloads::FORMER;

/// Workloads and actions that are told apart.
pub const MOST_ACTIONS: usize = 48;
/// Actions that there are, for all other workloads.
pub const ACTIONS: usize = 10;

/// Everything that was done.
#[derive(Debug, Default)]
pub struct Actions {
    named: BTreeMap<String, Done>,
    former: BTreeMap<&'static str, u64>,
}

#[derive(Debug)]
struct Done {
    last: Instant,
    times: BTreeMap<&'static str, u64>,
}

impl Actions {
    /// Counts what was done to a process of `workload`.
    pub fn add(&mut self, workload: &str, action: &'static str) {
        let done = self
            .named
            .entry(workload.to_owned())
            .or_insert_with(|| Done {
                last: Instant::now(),
                times: BTreeMap::new(),
            });
        done.last = Instant::now();
        *done.times.entry(action).or_default() += 1;
        while self
            .named
            .values()
            .map(|done| done.times.len())
            .sum::<usize>()
            > MOST_ACTIONS
        {
            self.fold_the_oldest();
        }
    }

    /// Workload, action, and how often.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &'static str, u64)> {
        let named = self.named.iter().flat_map(|(workload, done)| {
            let times = done.times.iter();
            times.map(move |(action, times)| (&**workload, *action, *times))
        });
        let former = self.former.iter();
        named.chain(former.map(|(action, times)| (FORMER, *action, *times)))
    }

    fn fold_the_oldest(&mut self) {
        let oldest = self.named.iter().min_by_key(|(_, done)| done.last);
        let Some(workload) = oldest.map(|(workload, _)| workload.clone()) else {
            return;
        };
        for (action, times) in self
            .named
            .remove(&workload)
            .into_iter()
            .flat_map(|done| done.times)
        {
            *self.former.entry(action).or_default() += times;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_workloads_have_a_name_and_nothing_is_lost() {
        let mut actions = Actions::default();
        for pod in 0..1000 {
            let workload = format!("pod/{pod}");
            for action in ["attach", "keep", "keep"] {
                actions.add(&workload, action);
            }
            assert!(actions.iter().count() <= MOST_ACTIONS + ACTIONS);
            let own: Vec<_> = actions
                .iter()
                .filter(|(name, ..)| *name == workload)
                .collect();
            assert_eq!(own, [(&*workload, "attach", 1), (&*workload, "keep", 2)]);
        }
        assert_eq!(actions.iter().map(|(.., times)| times).sum::<u64>(), 3000);
        let former = actions.iter().filter(|(name, ..)| *name == FORMER);
        assert_eq!(former.count(), 2);
    }
}
