//! Numbers that tell the process's threads apart, past ones included.
//!
//! No thread-local variable: a library that was loaded late gets those from the program's `malloc`, under the loader's lock.
//! Of a key's values glibc has the first 32 in the thread itself; for later keys it asks `malloc`, without that lock.
#![expect(unsafe_code, reason = "asks libc for a key and its values")]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Where the numbers are kept; `None` where the process has no more keys.
static KEY: OnceLock<Option<libc::pthread_key_t>> = OnceLock::new();

/// Before the first [`number`].
pub(crate) fn prepare() {
    KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: writes the key, which has no destructor.
        let result = unsafe { libc::pthread_key_create(&mut key, None) };
        (result == 0).then_some(key)
    });
}

/// A number that no other thread of the process has or had; `None` where there is no place for it.
pub(crate) fn number() -> Option<u64> {
    static LAST: AtomicU64 = AtomicU64::new(0);
    let key = (*KEY.get()?)?;
    // SAFETY: the key is never deleted.
    let own = unsafe { libc::pthread_getspecific(key) } as u64;
    if own != 0 {
        return Some(own);
    }
    let number = LAST.fetch_add(1, Ordering::Relaxed) + 1;
    // SAFETY: as above; the value is no pointer to anything.
    let result = unsafe { libc::pthread_setspecific(key, number as *const libc::c_void) };
    (result == 0).then_some(number)
}
