//! The functions that wait for what was asked before: where an asynchronous copy's cost is felt.

/// What a function waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncScope {
    /// The stream that is argument 0.
    Stream,
    /// Everything, or an event that may stand behind anything.
    Any,
}

/// One function that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyncFn {
    /// Exported symbol name.
    pub name: &'static str,
    /// What it waits for.
    pub scope: SyncScope,
}

const fn stream(name: &'static str) -> SyncFn {
    SyncFn {
        name,
        scope: SyncScope::Stream,
    }
}

const fn any(name: &'static str) -> SyncFn {
    SyncFn {
        name,
        scope: SyncScope::Any,
    }
}

/// Every function that waits in the calling thread. One that polls (`cuStreamQuery`) takes no time that could be counted.
pub const SYNC_FNS: &[SyncFn] = &[
    stream("cuStreamSynchronize"),
    stream("cuStreamSynchronize_ptsz"),
    any("cuCtxSynchronize"),
    any("cuCtxSynchronize_v2"),
    any("cuEventSynchronize"),
    stream("cudaStreamSynchronize"),
    stream("cudaStreamSynchronize_ptsz"),
    any("cudaDeviceSynchronize"),
    any("cudaEventSynchronize"),
    any("cudaThreadSynchronize"),
];
