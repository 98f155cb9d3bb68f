//! Which copies may be staged: between plain pageable host memory and plain memory of the current device, in range.
//!
//! Whatever is unclear goes to the original function, so that its errors stay its own.

use cmt_common::api::Direction;
use cmt_common::control::PassReason;

use crate::driver::{Driver, PointerFacts};

/// CU_MEMORYTYPE_DEVICE; 0 stands for memory that the driver does not know.
const MEMORY_DEVICE: u32 = 2;

/// The two sides of a copy that may be staged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sides {
    pub host: u64,
    pub device: u64,
    /// True for DtoH.
    pub to_host: bool,
    /// A synchronous HtoD is complete when it returns: the application has asked for that, or may have.
    pub syncs_memops: bool,
}

/// Where one side of a copy begins, and how far it reaches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub start: u64,
    pub bytes: u64,
}

/// The sides of a copy, whose direction is that of its function or decided by its addresses.
pub(crate) fn sides(
    driver: &Driver,
    direction: Direction,
    dst: Span,
    src: Span,
    is_async: bool,
) -> Result<Sides, PassReason> {
    let to_host = match direction {
        Direction::HtoD => false,
        Direction::DtoH => true,
        _ => memory_type(driver, src.start)? == MEMORY_DEVICE,
    };
    let (host, device) = if to_host { (dst, src) } else { (src, dst) };
    check_pageable(driver, host)?;
    let is_synchronous = !is_async && !to_host;
    let syncs_memops = check_device(driver, device, is_synchronous)?;
    Ok(Sides {
        host: host.start,
        device: device.start,
        to_host,
        syncs_memops,
    })
}

fn memory_type(driver: &Driver, address: u64) -> Result<u32, PassReason> {
    driver
        .memory_type(address)
        .map_err(|_| PassReason::Unsupported)
}

/// The driver must know neither end of the host range: a registration that begins or ends inside is for stock to judge.
fn check_pageable(driver: &Driver, host: Span) -> Result<(), PassReason> {
    let Span { start: host, bytes } = host;
    let last = host.checked_add(bytes - 1).ok_or(PassReason::OutOfRange)?;
    if host == 0 {
        return Err(PassReason::OutOfRange);
    }
    if memory_type(driver, host)? != 0 || memory_type(driver, last)? != 0 {
        return Err(PassReason::NotPageable);
    }
    Ok(())
}

/// The device range must lie within one allocation of the current device that is not managed. Returns whether a synchronous
/// copy to it has to be complete when it returns.
///
/// CU_POINTER_ATTRIBUTE_SYNC_MEMOPS says so of one allocation (GPUDirect RDMA needs it), CU_CTX_SYNC_MEMOPS of the memory of
/// a context, whichever context is current (driver 580).
fn check_device(driver: &Driver, device: Span, is_synchronous: bool) -> Result<bool, PassReason> {
    let Span {
        start: device,
        bytes,
    } = device;
    let PointerFacts {
        memory_type,
        managed,
        device: ordinal,
        range_start,
        range_bytes,
        sync_memops,
        context,
    } = driver
        .pointer_facts(device, is_synchronous)
        .map_err(|_| PassReason::NotHostToDevice)?;
    if memory_type != MEMORY_DEVICE || managed || driver.current_device() != Some(ordinal) {
        return Err(PassReason::NotHostToDevice);
    }
    let end = device.checked_add(bytes);
    let range_end = range_start.checked_add(range_bytes);
    match (end, range_end) {
        (Some(end), Some(range_end)) if device >= range_start && end <= range_end => {}
        _ => return Err(PassReason::OutOfRange),
    }
    let of_another_context = || {
        let current = driver.current_context().map(|current| current.handle);
        context != 0 && current != Some(context)
    };
    Ok(is_synchronous && (sync_memops || of_another_context() || driver.context_syncs_memops()))
}
