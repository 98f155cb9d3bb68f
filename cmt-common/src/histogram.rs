//! Log-linear latency buckets: 8 to the octave, so a bucket is at most 12.5 % wide, from 1 ns to beyond 18 minutes.
//!
//! The kernel counts into them, the host reads them; both call [`bucket_of`].

/// log2 of the number of buckets in one octave.
const SUB_BITS: u32 = 3;
/// Values from 2^40 ns (18 minutes) on share the last bucket.
const MAX_BITS: u32 = 40;
/// Number of buckets of one histogram.
pub const BUCKETS: usize = ((MAX_BITS - SUB_BITS + 1) << SUB_BITS) as usize;

/// The bucket that a latency in nanoseconds falls into: always below [`BUCKETS`].
#[inline(always)]
pub const fn bucket_of(ns: u64) -> usize {
    if ns < 1 << SUB_BITS {
        return ns as usize;
    }
    if ns >= 1 << MAX_BITS {
        return BUCKETS - 1;
    }
    let shift = 63 - ns.leading_zeros() - SUB_BITS;
    let sub = (ns >> shift) & ((1 << SUB_BITS) - 1);
    (((shift + 1) << SUB_BITS) as u64 + sub) as usize
}

/// The half-open range `[lo, hi)` in nanoseconds that bucket `index` counts; the last one ends at `u64::MAX`.
pub const fn bucket_bounds(index: usize) -> (u64, u64) {
    if index >= BUCKETS - 1 {
        return (lower_bound(BUCKETS - 1), u64::MAX);
    }
    (lower_bound(index), lower_bound(index + 1))
}

const fn lower_bound(index: usize) -> u64 {
    let octave = (index >> SUB_BITS) as u32;
    let sub = (index & ((1 << SUB_BITS) - 1)) as u64;
    if octave == 0 {
        return sub;
    }
    ((1 << SUB_BITS) + sub) << (octave - 1)
}

/// The size class of a copy: 0 for zero bytes, else 1 + floor(log2(bytes)); at most 64.
#[inline(always)]
pub const fn size_class_of(bytes: u64) -> u8 {
    (64 - bytes.leading_zeros()) as u8
}

/// The smallest size in bytes that belongs to a size class: 0, 1, 2, 4, …
pub const fn size_class_bytes(class: u8) -> u64 {
    if class == 0 { 0 } else { 1 << (class - 1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_lies_within_the_bounds_of_its_bucket() {
        let mut value = 1u64;
        while value < 1 << 41 {
            for near in [value - 1, value, value + 1, value + value / 3] {
                let (lo, hi) = bucket_bounds(bucket_of(near));
                assert!(lo <= near && near < hi, "{near} not in [{lo}, {hi})");
            }
            value = value * 9 / 8 + 1;
        }
    }

    #[test]
    fn bounds_join_without_a_gap_and_are_at_most_an_eighth_wide() {
        for index in 0..BUCKETS - 1 {
            let (lo, hi) = bucket_bounds(index);
            assert_eq!(hi, bucket_bounds(index + 1).0);
            assert!(hi - lo <= (lo / 8).max(1), "bucket {index}: [{lo}, {hi})");
        }
    }

    #[test]
    fn one_histogram_holds_100_ns_and_100_s() {
        assert_ne!(bucket_of(100), bucket_of(120));
        assert_ne!(bucket_of(100_000_000_000), bucket_of(120_000_000_000));
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn size_classes_are_powers_of_two() {
        for (bytes, class_bytes) in [
            (0, 0),
            (1, 1),
            (3, 2),
            (4096, 4096),
            (4097, 4096),
            (u64::MAX, 1 << 63),
        ] {
            assert_eq!(size_class_bytes(size_class_of(bytes)), class_bytes);
        }
    }
}
