//! Where the bytes of a copy lie: slices (the unit of CPU work) in a ring, and the slots (the unit of DMA) over them.
//!
//! A copy is a row of equal slices. Slice `i` lies in the ring at `start + i · slice`, modulo the ring; a slot is a run of
//! slices without a gap in the ring. Ring positions only ever grow; the physical place is the remainder.

/// The first slots double from this size, so that the link starts early.
const RAMP_FIRST_BYTES: u64 = 256 << 10;
/// The last slots halve down to this size, so that little is left to wait for when the last byte is in.
const RAMP_LAST_BYTES: u64 = 128 << 10;

/// Cuts a copy into slots, one after the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slots {
    /// Slices of the whole copy, and slices in a full-size slot.
    total: u64,
    full: u64,
    /// Slices of the next slot while ramping up.
    ramp: u64,
    last: u64,
}

impl Slots {
    /// For a copy of `bytes` bytes in slices of `slice` and slots of at most `slot` bytes.
    pub(crate) fn new(bytes: u64, slice: u64, slot: u64) -> Self {
        let full = (slot / slice).max(1);
        Self {
            total: bytes.div_ceil(slice),
            full,
            ramp: (RAMP_FIRST_BYTES / slice).clamp(1, full),
            last: (RAMP_LAST_BYTES / slice).clamp(1, full),
        }
    }

    /// The slice after the end of the slot that starts with slice `at`, given that at most `room` slices lie in the
    /// ring without a gap.
    pub(crate) fn end_of_slot_at(&mut self, at: u64, room: u64) -> u64 {
        let left = self.total.saturating_sub(at);
        let mut length = self.ramp;
        self.ramp = (self.ramp * 2).min(self.full);
        if left < 2 * length {
            length = length.min((left / 2).max(self.last));
        }
        at + length.min(left).min(room)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn slots(bytes: u64, slice: u64, slot: u64) -> Vec<u64> {
        let mut slots = Slots::new(bytes, slice, slot);
        let (mut at, mut lengths) = (0, Vec::new());
        while at < bytes.div_ceil(slice) {
            let end = slots.end_of_slot_at(at, u64::MAX);
            lengths.push(end - at);
            at = end;
        }
        lengths
    }

    #[test]
    fn slots_ramp_up_and_down() {
        let kib = 1 << 10;
        assert_eq!(
            slots(4096 * kib, 64 * kib, 1024 * kib),
            [4, 8, 16, 16, 10, 5, 2, 2, 1]
        );
        assert_eq!(slots(64 * kib, 32 * kib, 1024 * kib), [2]);
        assert_eq!(slots(1, 32 * kib, 1024 * kib), [1]);
    }

    proptest! {
        #[test]
        fn slots_cover_every_slice_once(bytes in 1u64..1 << 32, slice in 14u32..20, slot in 0u64..9 << 20, room in 1u64..700) {
            let slice = 1 << slice;
            let mut slots = Slots::new(bytes, slice, slot);
            let mut at = 0;
            while at < bytes.div_ceil(slice) {
                let end = slots.end_of_slot_at(at, room);
                prop_assert!(end > at && end - at <= room && (end - at) * slice <= slot.max(slice));
                at = end;
            }
            prop_assert_eq!(at, bytes.div_ceil(slice));
        }
    }
}
