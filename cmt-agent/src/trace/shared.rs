//! Probes that fire for all processes, one set a library file. In a trace of weeks, files come and go with containers: what
//! nobody maps any more loses its probes, which take descriptors and keep the file's mount busy.

use std::collections::{HashMap, HashSet};

use cmt_common::event::MAX_TARGETS;

use crate::probes::Links;
use crate::target::maps::FileId;

/// Scans after which an unused library's probes go: 10 minutes. A program that is started again and again is seen from its
/// first call on while they are there.
const PATIENCE: u32 = 2400;
/// Unused libraries whose probes stay so long.
const MOST_UNUSED: usize = 32;

/// The probes by file.
#[derive(Default)]
pub(super) struct Shared {
    files: HashMap<FileId, Used>,
    numbered: u16,
}

struct Used {
    links: Links,
    /// The last scan in which a process mapped it.
    last: u32,
}

impl Shared {
    /// A number for the next file's probes, below [`MAX_TARGETS`] and not 0. Two mounts of one file show it under two ids, and its
    /// calls pass the probes of both: the programs tell them apart by this.
    pub fn next_number(&mut self) -> u16 {
        self.numbered = self.numbered % (MAX_TARGETS as u16 - 1) + 1;
        self.numbered
    }

    /// Whether a file has probes.
    pub fn has(&self, id: FileId) -> bool {
        self.files.contains_key(&id)
    }

    /// Keeps the probes of a file, which some process maps at scan `now`.
    pub fn insert(&mut self, id: FileId, links: Links, now: u32) {
        self.files.insert(id, Used { links, last: now });
    }

    /// All probes.
    pub fn take(&mut self) -> impl Iterator<Item = Links> + use<> {
        std::mem::take(&mut self.files)
            .into_values()
            .map(|used| used.links)
    }

    /// The probes of files that have been unused for long, given those in use at scan `now`; with their files.
    pub fn take_unused(&mut self, in_use: &HashSet<FileId>, now: u32) -> Vec<(FileId, Links)> {
        let mut unused = Vec::new();
        for (id, used) in &mut self.files {
            if in_use.contains(id) {
                used.last = now;
            } else {
                unused.push((now.wrapping_sub(used.last), *id));
            }
        }
        // The youngest first.
        unused.sort_by_key(|(age, _)| *age);
        let old = unused.iter().enumerate();
        let old = old.filter(|(index, (age, _))| *index >= MOST_UNUSED || *age > PATIENCE);
        let old: Vec<FileId> = old.map(|(_, (_, id))| *id).collect();
        old.into_iter()
            .filter_map(|id| Some((id, self.files.remove(&id)?.links)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::maps;

    fn file(inode: u64) -> FileId {
        let line = format!("1000-2000 r-xp 00000000 00:01 {inode} /libcuda.so.1");
        maps::read(line.as_bytes()).expect("a mapping")[0].file
    }

    #[test]
    fn unused_libraries_lose_their_probes_when_they_are_old_or_many() {
        let mut shared = Shared::default();
        for inode in 0..40 {
            shared.insert(file(inode), Links::default(), inode as u32);
        }
        let in_use: HashSet<FileId> = [file(0), file(1)].into();
        let mut gone: Vec<FileId> = shared
            .take_unused(&in_use, 50)
            .into_iter()
            .map(|(id, _)| id)
            .collect();
        gone.sort();
        assert_eq!(gone, (2..8).map(file).collect::<Vec<_>>());
        assert!(shared.take_unused(&in_use, 60).is_empty());
        let gone = shared.take_unused(&in_use, 39 + PATIENCE + 1);
        assert_eq!(gone.len(), MOST_UNUSED);
        assert!(shared.has(file(0)) && shared.has(file(1)) && !shared.has(file(39)));
        assert_eq!(shared.take().count(), 2);
    }
}
