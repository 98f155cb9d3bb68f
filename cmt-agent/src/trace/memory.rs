//! What a process's maps say of its memory to one who knows the NVIDIA driver (580.159.04, CUDA 13.0).
//!
//! - `cudaHostAlloc` memory is a shared mapping of `/dev/zero (deleted)`. Registered memory is not marked.
//! - Managed memory is a mapping of `/dev/nvidia-uvm` whose offset is its own address.
//! - Device memory lies within mappings without any permission.

use std::collections::HashMap;

use cmt_common::api::MemoryKind;

use crate::target::maps::Mapping;

/// Smaller mappings without permission are guards of stacks and heaps; the driver deals in units of 2 MiB.
const SMALLEST_RESERVE: u64 = 2 << 20;

/// A range that the maps say something of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    /// Its length.
    pub bytes: u64,
    /// What it is; `None` where the processor cannot reach it, which is where device memory is.
    pub kind: Option<MemoryKind>,
}

/// All ranges that the maps say something of, by start.
pub(crate) fn ranges(maps: &[Mapping]) -> HashMap<u64, Range> {
    maps.iter()
        .filter_map(|map| {
            let kind = kind(map)?;
            let bytes = map.end - map.start;
            Some((map.start, Range { bytes, kind }))
        })
        .collect()
}

/// `None` for ordinary memory.
fn kind(map: &Mapping) -> Option<Option<MemoryKind>> {
    if map.is_called("") && !map.readable && !map.writable && !map.executable {
        (map.end - map.start >= SMALLEST_RESERVE).then_some(None)
    } else if map.shared && map.is_called("/dev/zero (deleted)") {
        Some(Some(MemoryKind::Pinned))
    } else if map.shared && map.is_called("/dev/nvidia-uvm") && map.offset == map.start {
        Some(Some(MemoryKind::Managed))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::maps;

    /// From a process that allocated 64 MiB managed, 2 MiB pinned and some device memory.
    const MAPS: [&str; 7] = [
        "204600000-204800000 rw-s 00000000 00:06 142                              /dev/nvidiactl",
        "302000000-48ea000000 ---p 00000000 00:00 0 ",
        "55dc0147b000-55dc02718000 rw-p 00000000 00:00 0                          [heap]",
        "7f6c46000000-7f6c4a000000 rw-s 7f6c46000000 00:06 144                    /dev/nvidia-uvm",
        "7f6cae800000-7f6caea00000 rw-s 00000000 00:01 2052                       /dev/zero (deleted)",
        "7f6ec2154000-7f6ec2155000 ---p 00000000 00:00 0 ",
        "7f6ec2155000-7f6ec2955000 rw-p 00000000 00:00 0 ",
    ];

    #[test]
    fn pinned_managed_and_reserved_ranges_are_told_apart() {
        let maps = maps::read(MAPS.join("\n").as_bytes()).expect("maps");
        let mut found: Vec<_> = ranges(&maps).into_iter().collect();
        found.sort_by_key(|(start, _)| *start);
        let range = |bytes, kind| Range { bytes, kind };
        assert_eq!(
            found,
            [
                (0x3_0200_0000, range(0x48ea000000 - 0x302000000, None)),
                (0x7f6c_4600_0000, range(64 << 20, Some(MemoryKind::Managed))),
                (0x7f6c_ae80_0000, range(2 << 20, Some(MemoryKind::Pinned))),
            ]
        );
    }
}
