//! What is known of the target's memory: pinned, managed and device ranges.

use cmt_common::api::MemoryKind;
use cmt_common::event::Lost;
use cmt_common::range::{RangeKey, RangeValue, next_part};

use crate::call::user;
use crate::maps::{PREFIXES, RANGES, lost, prefix};

/// Most prefixes that one range is cut into: addresses have 47 bits, and each end adds one a bit at most.
const MAX_PARTS: u32 = 96;

/// The known kind of an address; `None` for memory that no call and no mapping said anything about.
#[inline(always)]
pub fn kind_of(pid: u32, address: u64) -> Option<MemoryKind> {
    let kind = *PREFIXES.get(prefix(pid, address, 64))?;
    Some(MemoryKind::from_raw(kind as u8))
}

/// True where the processor can read `address` now, so that it is no memory of a device.
#[inline(always)]
pub fn readable(address: u64) -> bool {
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
