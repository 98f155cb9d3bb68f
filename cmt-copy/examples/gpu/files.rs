//! Mapped files as sources: with their pages in the page cache, and on the disk.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::time::Instant;

use cmt_copy::plan::estimate;

use crate::{Gpu, crowd::median};

const BYTES: usize = 256 << 20;

/// Prints GB/s of HtoD copies out of a file in the folder `CMT_FILES`, or the temporary one, mapped anew for each copy.
pub fn print(gpu: &Gpu, cpus: u32, host: *const u8) {
    let folder = std::env::var_os("CMT_FILES").map_or_else(std::env::temp_dir, Into::into);
    let path = folder.join("cmt-example-files");
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&path)
        .expect("a file");
    std::fs::remove_file(&path).expect("our file");
    // SAFETY: the caller's buffer is longer.
    file.write_all(unsafe { std::slice::from_raw_parts(host, BYTES) })
        .and_then(|()| file.sync_all())
        .expect("written");
    let engine = gpu.engine(estimate(cpus));
    for cold in [false, true] {
        for shared in [false, true] {
            let rate = |staged: bool| {
                let mut seconds: Vec<f64> = (0..7)
                    .map(|_| {
                        if cold {
                            // SAFETY: takes numbers only.
                            let advised = unsafe {
                                libc::posix_fadvise(
                                    file.as_raw_fd(),
                                    0,
                                    0,
                                    libc::POSIX_FADV_DONTNEED,
                                )
                            };
                            assert_eq!(advised, 0);
                        }
                        let flags = if shared {
                            libc::MAP_SHARED
                        } else {
                            libc::MAP_PRIVATE
                        };
                        // SAFETY: a new mapping of the whole file.
                        let source = unsafe {
                            libc::mmap(
                                std::ptr::null_mut(),
                                BYTES,
                                libc::PROT_READ,
                                flags,
                                file.as_raw_fd(),
                                0,
                            )
                        };
                        assert_ne!(source, libc::MAP_FAILED);
                        let start = Instant::now();
                        match staged {
                            true => gpu.staged(&engine, false, false, source.cast(), BYTES),
                            false => gpu.stock(false, source.cast(), BYTES),
                        }
                        gpu.wait();
                        let took = start.elapsed().as_secs_f64();
                        // SAFETY: our own mapping.
                        unsafe { libc::munmap(source, BYTES) };
                        took
                    })
                    .collect();
                BYTES as f64 / median(&mut seconds) / 1e9
            };
            let (stock, staged) = (rate(false), rate(true));
            println!(
                "file {} {}: stock {stock:.2}, staged {staged:.2} GB/s: {:.1} times",
                if cold {
                    "on the disk,"
                } else {
                    "in the page cache,"
                },
                if shared { "shared" } else { "private" },
                staged / stock
            );
        }
    }
    engine.shutdown();
}
