//! Copies of rectangles (`cuMemcpy2D*`): rows of equal length, on each side one pitch apart.
//!
//! In the ring the rows lie at a pitch of their own, a power of two, so that slices hold whole rows. Everything that counts
//! slices counts in these padded rows.

use cmt_common::api::Direction;
use cmt_common::control::PassReason;

use crate::plan::SLICE_MAX_BYTES;

/// Shorter rows go to the original function: moving them costs more calls than bytes.
const ROW_MIN_BYTES: u64 = 16;
/// CU_DEVICE_ATTRIBUTE_MAX_PITCH of every device so far; the original function refuses more.
const PITCH_MAX_BYTES: u64 = i32::MAX as u64;

/// `CUmemorytype` of `cuda.h`.
mod memory_type {
    pub const HOST: u32 = 1;
    pub const DEVICE: u32 = 2;
    pub const UNIFIED: u32 = 4;
}

/// `CUDA_MEMCPY2D_v2` of `cuda.h`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Memcpy2D {
    /// Where it reads.
    pub src: Side2D,
    /// Where it writes.
    pub dst: Side2D,
    /// Length of a row in bytes.
    pub width_bytes: u64,
    /// Rows.
    pub height: u64,
}

/// One side of a [`Memcpy2D`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Side2D {
    /// Offset of the rectangle in bytes, and in rows.
    pub x_bytes: u64,
    /// Offset in rows.
    pub y: u64,
    /// `CUmemorytype`.
    pub memory_type: u32,
    /// Base address where the type is host.
    pub host: u64,
    /// Base address where the type is device or unified.
    pub device: u64,
    /// Array where the type is array.
    pub array: u64,
    /// Bytes from row to row.
    pub pitch: u64,
}

const _: () = assert!(size_of::<Memcpy2D>() == 128);

/// Addresses and pitches of a rectangle that may be staged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rectangle {
    /// What the memory types say; [`Direction::Unknown`] if the addresses decide.
    pub direction: Direction,
    pub dst: u64,
    pub src: u64,
    pub dst_pitch: u64,
    pub src_pitch: u64,
    pub width: u64,
    pub height: u64,
}

impl Rectangle {
    /// Whether its rows follow each other without a gap, so that it is a copy like any other.
    pub(crate) fn is_in_one_piece(&self) -> bool {
        self.height == 1 || (self.width == self.dst_pitch && self.width == self.src_pitch)
    }

    /// How its rows lie, given which way they go.
    pub(crate) fn rows(&self, to_host: bool) -> Rows {
        let (host_pitch, device_pitch) = match to_host {
            true => (self.dst_pitch, self.src_pitch),
            false => (self.src_pitch, self.dst_pitch),
        };
        Rows {
            width: self.width,
            host_pitch,
            device_pitch,
            ring_pitch: self.width.next_power_of_two(),
        }
    }
}

impl Memcpy2D {
    /// Bytes that it copies.
    #[inline]
    pub fn bytes(&self) -> usize {
        usize::try_from(self.width_bytes.saturating_mul(self.height)).unwrap_or(usize::MAX)
    }

    /// The rectangle, if its numbers are beyond doubt.
    pub(crate) fn rectangle(&self) -> Result<Rectangle, PassReason> {
        let (width, height) = (self.width_bytes, self.height);
        if height == 0 {
            return Err(PassReason::Unsupported);
        }
        let direction = match (self.src.memory_type, self.dst.memory_type) {
            (memory_type::HOST, memory_type::DEVICE) => Direction::HtoD,
            (memory_type::DEVICE, memory_type::HOST) => Direction::DtoH,
            (memory_type::HOST, memory_type::UNIFIED)
            | (memory_type::UNIFIED, memory_type::DEVICE) => Direction::HtoD,
            (memory_type::DEVICE, memory_type::UNIFIED)
            | (memory_type::UNIFIED, memory_type::HOST) => Direction::DtoH,
            (memory_type::UNIFIED, memory_type::UNIFIED) => Direction::Unknown,
            _ => return Err(PassReason::NotHostToDevice),
        };
        let rectangle = Rectangle {
            direction,
            dst: self.dst.first(width).ok_or(PassReason::Unsupported)?,
            src: self.src.first(width).ok_or(PassReason::Unsupported)?,
            dst_pitch: self.dst.pitch,
            src_pitch: self.src.pitch,
            width,
            height,
        };
        let fits = (ROW_MIN_BYTES..=SLICE_MAX_BYTES).contains(&width);
        match fits || rectangle.is_in_one_piece() {
            true => Ok(rectangle),
            false => Err(PassReason::Unsupported),
        }
    }
}

impl Side2D {
    /// A rectangle that begins at `address`, which is of this `CUmemorytype`: host, device or unified.
    pub fn at(memory_type: u32, address: u64, pitch: u64) -> Self {
        Self {
            x_bytes: 0,
            y: 0,
            memory_type,
            host: address,
            device: address,
            array: 0,
            pitch,
        }
    }

    /// Address of the first byte of the rectangle.
    fn first(&self, width: u64) -> Option<u64> {
        let base = match self.memory_type {
            memory_type::HOST => self.host,
            memory_type::DEVICE | memory_type::UNIFIED => self.device,
            _ => return None,
        };
        if base == 0
            || self.pitch > PITCH_MAX_BYTES
            || self.x_bytes.checked_add(width)? > self.pitch
        {
            return None;
        }
        base.checked_add(self.y.checked_mul(self.pitch)?)?
            .checked_add(self.x_bytes)
    }
}

/// How the rows of a copy lie on its two sides and in the ring; all in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    pub width: u64,
    pub host_pitch: u64,
    pub device_pitch: u64,
    /// A power of two.
    pub ring_pitch: u64,
}

impl Rows {
    /// Whether the rows lie in the ring without gaps, and on the device.
    pub(crate) fn is_linear_to_device(&self) -> bool {
        self.width == self.ring_pitch && self.width == self.device_pitch
    }

    /// Whether the rows lie in the ring without gaps, and on the host.
    pub(crate) fn is_linear_on_host(&self) -> bool {
        self.width == self.ring_pitch && self.width == self.host_pitch
    }

    /// A copy of rows `first..first + height` of the rectangle, of which one side begins at `host` and the other at `device`.
    pub(crate) fn copy(
        &self,
        host: u64,
        host_pitch: u64,
        device: u64,
        height: u64,
        to_device: bool,
    ) -> Memcpy2D {
        let host = Side2D::at(memory_type::HOST, host, host_pitch);
        let device = Side2D::at(memory_type::DEVICE, device, self.device_pitch);
        let (src, dst) = if to_device {
            (host, device)
        } else {
            (device, host)
        };
        Memcpy2D {
            src,
            dst,
            width_bytes: self.width,
            height,
        }
    }
}

/// Bytes from the first byte of the first row to the last byte of the last one.
pub(crate) fn extent(width: u64, pitch: u64, height: u64) -> Option<u64> {
    pitch.checked_mul(height - 1)?.checked_add(width)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: Side2D = Side2D {
        x_bytes: 8,
        y: 2,
        memory_type: memory_type::HOST,
        host: 1 << 20,
        device: 0,
        array: 0,
        pitch: 1024,
    };
    const DEVICE: Side2D = Side2D {
        x_bytes: 0,
        y: 0,
        memory_type: memory_type::DEVICE,
        host: 0,
        device: 1 << 40,
        array: 0,
        pitch: 512,
    };
    const COPY: Memcpy2D = Memcpy2D {
        src: HOST,
        dst: DEVICE,
        width_bytes: 500,
        height: 7,
    };

    #[test]
    fn a_rectangle_begins_behind_its_offsets() {
        let rectangle = COPY.rectangle().expect("beyond doubt");
        assert_eq!(rectangle.direction, Direction::HtoD);
        assert_eq!(
            (rectangle.src, rectangle.dst),
            ((1 << 20) + 2 * 1024 + 8, 1 << 40)
        );
        assert_eq!(COPY.bytes(), 3500);
        assert_eq!(extent(500, 1024, 7), Some(6 * 1024 + 500));
    }

    #[test]
    fn whatever_is_odd_goes_to_stock() {
        let with = |change: fn(&mut Memcpy2D)| {
            let mut copy = COPY;
            change(&mut copy);
            copy.rectangle().is_err()
        };
        assert!(with(|copy| copy.src.memory_type = 3), "an array");
        assert!(with(|copy| copy.dst.memory_type = memory_type::HOST));
        assert!(with(|copy| copy.src.memory_type = memory_type::DEVICE));
        assert!(with(|copy| copy.dst.memory_type = 0));
        assert!(with(|copy| copy.dst.pitch = 499), "rows overlap");
        assert!(
            with(|copy| copy.src.x_bytes = 525),
            "a row goes on in the next"
        );
        assert!(with(|copy| copy.src.x_bytes = u64::MAX));
        assert!(with(|copy| copy.src.y = u64::MAX));
        assert!(with(|copy| copy.src.pitch = 1 << 31));
        assert!(with(|copy| copy.src.host = 0));
        assert!(with(|copy| copy.height = 0));
        assert!(with(|copy| copy.width_bytes = 0));
        assert!(!with(|copy| {
            (copy.width_bytes, copy.height) = (15, 1);
        }));
        assert!(with(|copy| copy.width_bytes = 15));
        assert!(with(|copy| {
            (copy.width_bytes, copy.src.pitch, copy.dst.pitch) = ((1 << 20) + 1, 1 << 21, 1 << 21);
        }));
    }
}
