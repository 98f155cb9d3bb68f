//! Ways for a CPU to move bytes: ordinary stores, non-temporal stores, `rep movsb`.
//!
//! Which is fastest depends on size and direction (the plan says); which exist depends on the CPU (found at run time).
#![expect(
    unsafe_code,
    reason = "copies between raw addresses with vector instructions"
)]

use cmt_common::control::store;

/// One way to move bytes, already checked against this CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// `memcpy`.
    Ordinary,
    /// Non-temporal, 64 bytes a store.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// Non-temporal, 32 bytes a store.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Non-temporal, 16 bytes a store; every x86-64 CPU has it.
    #[cfg(target_arch = "x86_64")]
    Sse2,
    /// `rep movsb`.
    #[cfg(target_arch = "x86_64")]
    RepMovsb,
}

/// Shorter pieces are not worth the alignment, unless they are whole cache lines as they are.
#[cfg(target_arch = "x86_64")]
const NON_TEMPORAL_MIN_BYTES: usize = 1024;
#[cfg(any(target_arch = "x86_64", test))]
const CACHE_LINE: usize = 64;

impl Store {
    /// What `wanted` (one of [`store`]) means on this CPU. Unknown numbers and CPUs without a fitting instruction get
    /// [`Store::Ordinary`].
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn from_plan(wanted: u32) -> Self {
        match wanted {
            store::NON_TEMPORAL if std::is_x86_feature_detected!("avx512f") => Self::Avx512,
            store::NON_TEMPORAL if std::is_x86_feature_detected!("avx2") => Self::Avx2,
            store::NON_TEMPORAL => Self::Sse2,
            store::REP_MOVSB => Self::RepMovsb,
            _ => Self::Ordinary,
        }
    }

    /// What `wanted` (one of [`store`]) means on this CPU: always [`Store::Ordinary`].
    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn from_plan(wanted: u32) -> Self {
        let _ = wanted == store::NON_TEMPORAL;
        Self::Ordinary
    }

    /// All that this CPU has, for measuring them.
    pub fn all() -> Vec<Self> {
        #[cfg_attr(not(target_arch = "x86_64"), expect(unused_mut))]
        let mut all = vec![Self::Ordinary];
        #[cfg(target_arch = "x86_64")]
        {
            all.extend([Self::RepMovsb, Self::Sse2]);
            if std::is_x86_feature_detected!("avx2") {
                all.push(Self::Avx2);
            }
            if std::is_x86_feature_detected!("avx512f") {
                all.push(Self::Avx512);
            }
        }
        all
    }

    /// A name for reports; `nt-` stands for non-temporal stores.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ordinary => "memcpy",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "nt-avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "nt-avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Sse2 => "nt-sse2",
            #[cfg(target_arch = "x86_64")]
            Self::RepMovsb => "rep movsb",
        }
    }

    /// Copies `bytes` bytes. Afterwards a release store publishes them, non-temporal ones included.
    ///
    /// # Safety
    /// `from` must be readable and `to` writable for `bytes` bytes, and the two ranges must not overlap.
    pub unsafe fn copy(self, to: *mut u8, from: *const u8, bytes: usize) {
        // SAFETY: the caller's ranges.
        unsafe { self.put(to, from, bytes) };
        self.fence();
    }

    /// The same for one piece of several: [`Store::fence`] comes after the last.
    ///
    /// # Safety
    /// As [`Store::copy`].
    pub(crate) unsafe fn put(self, to: *mut u8, from: *const u8, bytes: usize) {
        #[cfg(target_arch = "x86_64")]
        if self != Self::Ordinary
            && (bytes >= NON_TEMPORAL_MIN_BYTES
                || (bytes | to.addr()).is_multiple_of(CACHE_LINE) && self != Self::RepMovsb)
        {
            // SAFETY: the caller's ranges; a vector variant exists only where `from_plan` found its instructions.
            unsafe {
                match self {
                    Self::Avx512 => x86::avx512(to, from, bytes),
                    Self::Avx2 => x86::avx2(to, from, bytes),
                    Self::Sse2 => x86::sse2(to, from, bytes),
                    _ => x86::rep_movsb(to, from, bytes),
                }
            }
            return;
        }
        // SAFETY: the caller's ranges.
        unsafe { to.copy_from_nonoverlapping(from, bytes) };
    }

    /// What was put before is published by the next release store.
    pub(crate) fn fence(self) {
        #[cfg(target_arch = "x86_64")]
        if matches!(self, Self::Avx512 | Self::Avx2 | Self::Sse2) {
            // SAFETY: every x86-64 CPU has it.
            unsafe { core::arch::x86_64::_mm_sfence() };
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use core::arch::x86_64::*;

    /// How far ahead the source is fetched, in bytes.
    const AHEAD: usize = 2048;

    /// Defines a copy whose body stores four aligned vectors non-temporally, with ordinary copies at both ends.
    macro_rules! non_temporal {
        ($name:ident, $features:literal, $vector:ty, $load:ident, $store:ident) => {
            /// Copies with non-temporal stores, which are still to be fenced.
            ///
            /// # Safety
            /// The CPU must have the instructions; `from` readable, `to` writable for `bytes` bytes, no overlap.
            #[target_feature(enable = $features)]
            pub(super) unsafe fn $name(to: *mut u8, from: *const u8, bytes: usize) {
                const WIDTH: usize = size_of::<$vector>();
                let head = to.align_offset(WIDTH).min(bytes);
                // SAFETY: `head` and every `at` below stay within `bytes`; `to + at` is aligned to the vector from `head` on;
                // prefetching past the end is harmless, and its address is computed without claiming to be in bounds.
                unsafe {
                    to.copy_from_nonoverlapping(from, head);
                    let mut at = head;
                    while at + 4 * WIDTH <= bytes {
                        let source = from.add(at);
                        let mut line = 0;
                        while line < 4 * WIDTH {
                            _mm_prefetch::<_MM_HINT_NTA>(source.wrapping_add(AHEAD + line).cast());
                            line += 64;
                        }
                        let source = source.cast::<$vector>();
                        let (a, b, c, d) = (
                            $load(source.cast()),
                            $load(source.add(1).cast()),
                            $load(source.add(2).cast()),
                            $load(source.add(3).cast()),
                        );
                        let target = to.add(at).cast::<$vector>();
                        $store(target.cast(), a);
                        $store(target.add(1).cast(), b);
                        $store(target.add(2).cast(), c);
                        $store(target.add(3).cast(), d);
                        at += 4 * WIDTH;
                    }
                    while at + WIDTH <= bytes {
                        _mm_prefetch::<_MM_HINT_NTA>(from.wrapping_add(at + AHEAD).cast());
                        $store(to.add(at).cast(), $load(from.add(at).cast()));
                        at += WIDTH;
                    }
                    to.add(at)
                        .copy_from_nonoverlapping(from.add(at), bytes - at);
                }
            }
        };
    }

    non_temporal!(
        avx512,
        "avx512f",
        __m512i,
        _mm512_loadu_si512,
        _mm512_stream_si512
    );
    non_temporal!(
        avx2,
        "avx2",
        __m256i,
        _mm256_loadu_si256,
        _mm256_stream_si256
    );
    non_temporal!(sse2, "sse2", __m128i, _mm_loadu_si128, _mm_stream_si128);

    /// Copies with one string instruction.
    ///
    /// # Safety
    /// `from` readable, `to` writable for `bytes` bytes, no overlap.
    pub(super) unsafe fn rep_movsb(to: *mut u8, from: *const u8, bytes: usize) {
        // SAFETY: the caller's ranges; the direction flag is clear by the ABI.
        unsafe {
            core::arch::asm!(
                "rep movsb",
                inout("rdi") to => _,
                inout("rsi") from => _,
                inout("rcx") bytes => _,
                options(nostack, preserves_flags),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_store_moves_every_byte_and_no_other_at_any_alignment() {
        const GUARD: u8 = 0xA5;
        let source: Vec<u8> = (0..9000u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
            .collect();
        for store in Store::all() {
            for bytes in [
                0, 1, 63, 64, 128, 192, 511, 512, 960, 1023, 1024, 1025, 2047, 4096, 4097, 8000,
                8191,
            ] {
                for (to_offset, from_offset) in
                    [(0, 0), (1, 0), (0, 1), (31, 7), (64, 63), (63, 64)]
                {
                    let mut target = vec![GUARD; 9000 + CACHE_LINE];
                    let aligned = target.as_ptr().align_offset(CACHE_LINE);
                    let target = &mut target[aligned..aligned + 9000];
                    // SAFETY: both offsets plus `bytes` are below 9000.
                    unsafe {
                        store.copy(
                            target.as_mut_ptr().add(to_offset),
                            source.as_ptr().add(from_offset),
                            bytes,
                        );
                    }
                    let end = to_offset + bytes;
                    assert!(target[..to_offset].iter().all(|&byte| byte == GUARD));
                    assert!(target[end..].iter().all(|&byte| byte == GUARD));
                    assert_eq!(
                        target[to_offset..end],
                        source[from_offset..from_offset + bytes],
                        "{store:?} {bytes}"
                    );
                }
            }
        }
    }

    #[test]
    fn an_unknown_store_is_ordinary() {
        assert_eq!(Store::from_plan(store::ORDINARY), Store::Ordinary);
        assert_eq!(Store::from_plan(99), Store::Ordinary);
    }
}
