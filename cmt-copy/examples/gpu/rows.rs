//! Rectangles (`cuMemcpy2DUnaligned`): stock, staged and pinned, with gaps between the rows on both sides.

use std::time::Instant;

use cmt_copy::plan::estimate;
use cmt_copy::{Memcpy2D, Outcome, Side2D};

use crate::{Gpu, crowd::median, symbol};

/// Position of `cuMemcpy2DUnaligned_v2` in `COPY_FNS`.
const UNALIGNED_2D: usize = 14;

/// Prints GB/s by width and total size; `host` must be twice as long as the largest.
pub fn print(gpu: &Gpu, cpus: u32, host: *mut u8) {
    let engine = gpu.engine(estimate(cpus));
    let original = symbol(gpu.library, "cuMemcpy2DUnaligned_v2");
    // SAFETY: cuda.h's signature.
    let original = unsafe {
        core::mem::transmute::<u64, unsafe extern "C" fn(*const Memcpy2D) -> i32>(original)
    };
    for to_host in [false, true] {
        for total in [
            64u64 << 10,
            256 << 10,
            512 << 10,
            1 << 20,
            4 << 20,
            16 << 20,
            64 << 20,
        ] {
            for width in [64u64, 256, 1024, 4096, 65_536, 1 << 20] {
                if width > total {
                    continue;
                }
                let copy = |host: *mut u8| {
                    let host = Side2D::at(1, host as u64, width * 3 / 2);
                    let device = Side2D::at(2, gpu.device, width * 5 / 4);
                    let (src, dst) = if to_host {
                        (device, host)
                    } else {
                        (host, device)
                    };
                    Memcpy2D {
                        src,
                        dst,
                        width_bytes: width,
                        height: total / width,
                    }
                };
                let rate = |make: &dyn Fn()| {
                    let times = ((1u64 << 28) / total).clamp(5, 31);
                    let mut seconds: Vec<f64> = (0..times)
                        .map(|_| {
                            let start = Instant::now();
                            make();
                            gpu.wait();
                            start.elapsed().as_secs_f64()
                        })
                        .collect();
                    total as f64 / median(&mut seconds) / 1e9
                };
                let (ours, pinned) = (copy(host), copy(gpu.pinned));
                // SAFETY: all three buffers are longer than the rectangle.
                let [stock, pinned] =
                    [&ours, &pinned].map(|copy| rate(&|| assert_eq!(unsafe { original(copy) }, 0)));
                let staged = rate(&|| {
                    // SAFETY: as above.
                    let code = match unsafe { engine.copy_2d(UNALIGNED_2D, &ours, 0) } {
                        Outcome::Staged(code) => code,
                        // SAFETY: as above.
                        Outcome::Pass(_) => unsafe { original(&ours) },
                    };
                    assert_eq!(code, 0);
                });
                println!(
                    "rows {} {:>5} KiB of {width:>7} bytes: stock {stock:>5.2}, staged {staged:>5.2}, pinned {pinned:>5.2} GB/s: {:>5.1} times stock, {:.2} of pinned",
                    if to_host { "DtoH" } else { "HtoD" },
                    total >> 10,
                    staged / stock,
                    staged / pinned
                );
            }
        }
    }
    engine.shutdown();
}
