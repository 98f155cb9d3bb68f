//! What is known of the target's memory: pinned, managed and device ranges.

use cmt_common::api::MemoryKind;
use cmt_common::event::Lost;
use cmt_common::kernel::page;
use cmt_common::range::{RESERVED, RangeKey, RangeValue, next_part};

use crate::call::user;
use crate::maps::{PREFIXES, RANGES, is_earlier, lost, prefix};

/// Most prefixes that one range is cut into: addresses have 47 bits, and each end adds one a bit at most.
const MAX_PARTS: u32 = 96;

/// What is known of an address: a kind of memory, or [`RESERVED`]. `None` where no call and no mapping said anything.
#[inline(always)]
fn known(pid: u32, address: u64) -> Option<u32> {
    PREFIXES.get(prefix(pid, address, 64)).copied()
}

/// The kind of memory at an address of which the call says that it is the host's, and whose page said `page` (see
/// [`page`](mod@page)).
#[inline(always)]
pub fn host_kind(pid: u32, address: u64, page: u8) -> MemoryKind {
    match known(pid, address).map(|kind| MemoryKind::from_raw(kind as u8)) {
        Some(kind @ (MemoryKind::Pinned | MemoryKind::Managed)) => kind,
        // Anything else that was known is out of date.
        _ => unregistered(pid, page),
    }
}

/// The kind of host memory that no probe saw being registered.
#[inline(always)]
fn unregistered(pid: u32, page: u8) -> MemoryKind {
    if page & page::LOOKED == 0 {
        // Not to be told: what was registered before the trace looks like what never was.
        return if is_earlier(pid) {
            MemoryKind::Unknown
        } else {
            MemoryKind::Pageable
        };
    }
    if page & page::PINNED != 0 {
        MemoryKind::Pinned
    } else if page & (page::DRIVERS | page::UNCLEAR) != 0 {
        MemoryKind::Unknown
    } else {
        MemoryKind::Pageable
    }
}

/// The kind of memory at an address that has to speak for itself, at the end of a copy.
///
/// What the processor can read is no device memory. What it cannot read and was out of its reach before, too, is: a copy
/// has just succeeded there. Anything else may be a page that is not there: `None`.
#[inline(always)]
pub fn kind_of(pid: u32, address: u64, page: u8, failed: bool) -> Option<MemoryKind> {
    let reserved = match known(pid, address) {
        Some(RESERVED) => true,
        Some(kind) => return Some(MemoryKind::from_raw(kind as u8)),
        None => false,
    };
    if failed {
        None
    } else if readable(address) {
        Some(unregistered(pid, page))
    } else if reserved {
        Some(MemoryKind::Device)
    } else {
        None
    }
}

#[inline(always)]
fn readable(address: u64) -> bool {
    user::<u8>(address).is_some()
}

/// Remembers a range.
#[inline(always)]
pub fn remember(pid: u32, start: u64, value: RangeValue) {
    let _ = RANGES.insert(RangeKey::new(pid, start), value, 0);
    let mut at = start;
    let end = start.saturating_add(value.bytes);
    for _ in 0..MAX_PARTS {
        let Some((bits, next)) = next_part(at, end) else {
            return;
        };
        if PREFIXES
            .insert(prefix(pid, at, bits), value.kind, 0)
            .is_err()
        {
            lost(Lost::RangesFull);
            return;
        }
        at = next;
    }
}

/// Forgets the range that starts at `start`, and says what it was.
#[inline(always)]
pub fn forget(pid: u32, start: u64) -> Option<RangeValue> {
    let key = RangeKey::new(pid, start);
    // SAFETY: the value is copied at once; a concurrent removal could only make it stale.
    let value = unsafe { *RANGES.get(key)? };
    let _ = RANGES.remove(key);
    let mut at = start;
    let end = start.saturating_add(value.bytes);
    for _ in 0..MAX_PARTS {
        let Some((bits, next)) = next_part(at, end) else {
            break;
        };
        let _ = PREFIXES.remove(prefix(pid, at, bits));
        at = next;
    }
    Some(value)
}
