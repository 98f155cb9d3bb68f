//! What a process's maps say of its memory to one who knows the NVIDIA driver (580.159.04, CUDA 13.0).
//!
//! - `cudaHostAlloc` memory is a shared mapping of `/dev/zero (deleted)`. Registered memory is not marked.
//! - Managed memory is a mapping of `/dev/nvidia-uvm` whose offset is its own address.
//! - Device memory lies within mappings without any permission.

use std::collections::HashMap;

use cmt_common::api::MemoryKind;
use procfs::process::{MMPermissions, MMapPath, MemoryMap};

/// Smaller mappings without permission are guards of stacks and heaps; the driver deals in units of 2 MiB.
const SMALLEST_RESERVE: u64 = 2 << 20;

/// A range that the maps say something of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    /// Its length.
    pub bytes: u64,
    /// What it is; `None` where the processor cannot reach it, which is where device memory is.
    pub kind: Option<MemoryKind>,
}

/// All ranges that the maps say something of, by start.
pub(super) fn ranges(maps: &[MemoryMap]) -> HashMap<u64, Range> {
    maps.iter()
        .filter_map(|map| {
            let (start, end) = map.address;
            let kind = kind(map)?;
            let bytes = end - start;
            Some((start, Range { bytes, kind }))
        })
        .collect()
}

/// `None` for ordinary memory.
fn kind(map: &MemoryMap) -> Option<Option<MemoryKind>> {
    let reach = MMPermissions::READ | MMPermissions::WRITE | MMPermissions::EXECUTE;
    let (start, end) = map.address;
    match &map.pathname {
        MMapPath::Anonymous if !map.perms.intersects(reach) => {
            (end - start >= SMALLEST_RESERVE).then_some(None)
        }
        MMapPath::Path(path) if map.perms.contains(MMPermissions::SHARED) => {
            if path.as_os_str() == "/dev/zero (deleted)" {
                Some(Some(MemoryKind::Pinned))
            } else if path.as_os_str() == "/dev/nvidia-uvm" && map.offset == start {
                Some(Some(MemoryKind::Managed))
            } else {
                None
            }
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use procfs::FromBufRead as _;
    use procfs::process::MemoryMaps;

    use super::*;

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
        let maps = MemoryMaps::from_buf_read(Cursor::new(MAPS.join("\n")))
            .expect("maps")
            .into_iter()
            .collect::<Vec<_>>();
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
