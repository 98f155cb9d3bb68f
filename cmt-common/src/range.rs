//! Ranges of a target's memory, cut into prefixes, so that a longest-prefix map answers "what is this address".

/// Start of a known range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(C)]
pub struct RangeKey {
    /// Process id, as in [`crate::event::CopyKey`].
    pub pid: u32,
    /// Zero.
    pub _pad: u32,
    /// First address.
    pub start: u64,
}

impl RangeKey {
    /// The range of process `pid` that starts at `start`.
    #[inline(always)]
    pub const fn new(pid: u32, start: u64) -> Self {
        Self {
            pid,
            _pad: 0,
            start,
        }
    }
}

/// A [`RangeValue::kind`] beside the memory kinds: addresses that the processor could not reach when the host looked. The
/// driver keeps device memory at such addresses; others may since have become ordinary memory, which a read tells.
pub const RESERVED: u32 = 5;

/// What a known range is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct RangeValue {
    /// Its length.
    pub bytes: u64,
    /// A [`crate::api::MemoryKind`] as a number, or [`RESERVED`].
    pub kind: u32,
    /// Zero.
    pub _pad: u32,
}

/// Data of a longest-prefix key: process and address, most significant byte first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct RangePrefix {
    /// Process id.
    pub pid: [u8; 4],
    /// Address.
    pub address: [u8; 8],
}

/// Bits of a prefix that the process id takes.
pub const PID_BITS: u32 = 32;

impl RangePrefix {
    /// The key data of `address` in process `pid`.
    #[inline(always)]
    pub const fn new(pid: u32, address: u64) -> Self {
        Self {
            pid: pid.to_be_bytes(),
            address: address.to_be_bytes(),
        }
    }
}

/// The largest aligned power-of-two block that starts at `at` and does not pass `end`: the number of leading address bits
/// that its addresses share, and the first address behind it. `None` when nothing is left.
///
/// Called again and again it cuts `[at, end)` into the fewest prefixes.
#[inline(always)]
pub const fn next_part(at: u64, end: u64) -> Option<(u32, u64)> {
    if at >= end {
        return None;
    }
    let fits = 63 - (end - at).leading_zeros();
    let aligned = if at == 0 { 63 } else { at.trailing_zeros() };
    let log2 = if aligned < fits { aligned } else { fits };
    Some((64 - log2, at + (1 << log2)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_a_range_exactly_and_are_few() {
        for (start, end) in [
            (0, 0),
            (0, 1),
            (0x1000, 0x2000),
            (0x7f12_3456_7001, 0x7f13_0000_0fff),
            (0x7f00_0000_0000, 0x7f00_4000_0000),
            (1, u64::MAX >> 17),
        ] {
            let (mut at, mut parts) = (start, 0);
            while let Some((bits, next)) = next_part(at, end) {
                let bytes = 1u64 << (64 - bits);
                assert_eq!(at % bytes, 0, "{at:#x} is not aligned to its part");
                assert_eq!(next - at, bytes);
                at = next;
                parts += 1;
            }
            assert_eq!(at.max(start), end);
            assert!(parts <= 96, "{parts} parts");
        }
    }
}
