//! Where the bytes of a copy lie: slices (the unit of CPU work) in a ring, and the slots (the unit of DMA) over them.
//!
//! A copy is a row of equal slices. Slice `i` lies in the ring at `start + i · slice`, modulo the ring; a slot is a run of
//! slices without a gap in the ring. Ring positions only ever grow; the physical place is the remainder.

/// A slot that leaves the link idle while it is filled is at least so long.
const FIRST_BYTES: u64 = 256 << 10;
/// DtoH: the first slots double from this size, so that copying out starts early.
const RAMP_FIRST_BYTES: u64 = 512 << 10;
/// DtoH: the last slots halve down to this size, so that little is left to copy out when the last byte is in.
const RAMP_LAST_BYTES: u64 = 256 << 10;

/// Cuts an HtoD copy into slots while its slices come in.
///
/// Every DMA costs the GPU about 2 µs besides its bytes (H200), so as few as possible are made: one as soon as the link
/// is about to run dry, and whatever has come in since is one slot then.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sending {
    /// Slices of the whole copy, in a full-size slot, and in the least that the link is kept waiting for.
    total: u64,
    full: u64,
    first: u64,
    /// Slices at the end that make a slot of their own; 0 if there is no need.
    tail: u64,
}

impl Sending {
    /// For a copy of `bytes` bytes in slices of `slice` and slots of at most `slot` bytes, the last `tail` of them apart.
    pub(crate) fn new(bytes: u64, slice: u64, slot: u64, tail: u64) -> Self {
        Self {
            total: bytes.div_ceil(slice),
            full: (slot / slice).max(1),
            first: (FIRST_BYTES / slice).max(1),
            tail: tail / slice,
        }
    }

    /// The slice after the end of the slot to send now, if one is to be sent: all slices before `done` are in the ring,
    /// those before `sent` are on their way, and `room` slices from there lie in the ring without a gap.
    pub(crate) fn end_of_slot(
        &self,
        sent: u64,
        done: u64,
        room: u64,
        link_is_idle: impl FnOnce() -> bool,
    ) -> Option<u64> {
        let (ready, left) = (done - sent, self.total - sent);
        let enough = self.full.min(room);
        let more_comes = ready < left && ready < enough;
        if more_comes && (ready < self.first || left < 2 * self.first || !link_is_idle()) {
            return None;
        }
        let mut length = ready.min(enough);
        if length == left && left > self.tail && self.tail > 0 {
            length = left - self.tail;
        }
        (length > 0).then_some(sent + length)
    }
}

/// Cuts a DtoH copy into slots, one after the other.
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
            [8, 16, 16, 12, 6, 4, 2]
        );
        assert_eq!(slots(64 * kib, 32 * kib, 1024 * kib), [2]);
        assert_eq!(slots(1, 32 * kib, 1024 * kib), [1]);
    }

    #[test]
    fn what_is_in_goes_out_when_the_link_is_about_to_run_dry() {
        let kib = 1 << 10;
        let sending = Sending::new(4096 * kib, 64 * kib, 1024 * kib, 0);
        let (idle, busy) = (|| true, || false);
        assert_eq!(sending.end_of_slot(0, 3, 64, idle), None, "too little");
        assert_eq!(sending.end_of_slot(0, 5, 64, idle), Some(5));
        assert_eq!(
            sending.end_of_slot(5, 15, 64, busy),
            None,
            "the link has enough"
        );
        assert_eq!(
            sending.end_of_slot(5, 30, 64, busy),
            Some(21),
            "a full slot"
        );
        assert_eq!(
            sending.end_of_slot(5, 30, 3, busy),
            Some(8),
            "the ring ends"
        );
        assert_eq!(
            sending.end_of_slot(58, 62, 64, idle),
            None,
            "the rest comes in one"
        );
        assert_eq!(sending.end_of_slot(58, 64, 64, busy), Some(64));
        assert_eq!(sending.end_of_slot(64, 64, 64, idle), None);
        let with_tail = Sending::new(4096 * kib, 64 * kib, 4096 * kib, 1024 * kib);
        assert_eq!(with_tail.end_of_slot(30, 64, 64, busy), Some(48));
        assert_eq!(with_tail.end_of_slot(48, 64, 64, busy), Some(64));
    }

    proptest! {
        #[test]
        fn every_slice_is_sent_once(
            bytes in 1u64..1 << 26, slice in 14u32..20, slot in 0u64..9 << 20, tail in 0u64..2 << 20, steps: Vec<(u8, u8, bool)>,
        ) {
            let slice = 1 << slice;
            let (total, sending) = (bytes.div_ceil(slice), Sending::new(bytes, slice, slot, tail));
            let (mut sent, mut done) = (0u64, 0u64);
            let last = (255, 255, false);
            for (more, room, idle) in steps.into_iter().chain(std::iter::repeat(last)) {
                if sent == total {
                    break;
                }
                done = (done + u64::from(more)).min(total);
                let room = u64::from(room).max(1);
                if let Some(end) = sending.end_of_slot(sent, done, room, || idle) {
                    prop_assert!(end > sent && end <= done && end - sent <= room);
                    prop_assert!((end - sent) * slice <= slot.max(slice));
                    sent = end;
                }
            }
            prop_assert_eq!(sent, total);
        }

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
