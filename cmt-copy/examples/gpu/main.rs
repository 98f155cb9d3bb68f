//! The engine on a real GPU, without hooks: checks every byte and what the engine assumes of the driver, then compares
//! stock, staged and pinned copies.
//!
//! `cargo run --release -p cmt-copy --example gpu [calls|search|crowd|link|pair|rows|files|guard|flavours|pace] [LARGEST_MIB]`
//!
//! `calls` prints what single calls of the driver cost, `search` looks for the best row by size and direction, `crowd`
//! measures fresh destinations, CPU time and many threads, `link` what CPUs leave of the link's speed, `pair` two GPUs,
//! `rows` rectangles, `files` mapped files, `guard` what the guard costs, `flavours` (a)synchronous copies on idle and busy streams,
//! `pace` short copies that come in a row and one at a time.
//! Further arguments `SLOT SLICE RING THREADS STORE` (KiB, KiB, KiB) replace the default plan by one row.
#![expect(unsafe_code, reason = "calls the CUDA driver directly")]

use std::ffi::{CString, c_void};
use std::time::Instant;

use cmt_common::api::{COPY_FNS, DRIVER_FNS, HOOKED};
use cmt_copy::plan::estimate;
use cmt_copy::{Driver, Engine, Outcome, Plan, PlanRow, Request};

const HTOD: usize = 0;
const DTOH: usize = 2;
const HTOD_ASYNC: usize = 4;
const DTOH_ASYNC: usize = 6;

/// A function of libcuda by name, 0 if it has none.
fn symbol(library: *mut c_void, name: &str) -> u64 {
    let name = CString::new(name).expect("no NUL inside");
    // SAFETY: an open library and a NUL-terminated name.
    unsafe { libc::dlsym(library, name.as_ptr()) as u64 }
}

/// Calls a libcuda function with integer and pointer arguments.
macro_rules! cuda {
    ($library:expr, $name:literal $(, $argument:expr => $type:ty)*) => {{
        let address = symbol($library, $name);
        assert!(address != 0, concat!($name, " is missing"));
        // SAFETY: the types are those that cuda.h gives this function.
        let code = unsafe {
            core::mem::transmute::<u64, unsafe extern "C" fn($($type),*) -> i32>(address)($($argument),*)
        };
        code
    }};
}

mod calls;
mod crowd;
mod files;
mod flavours;
mod guard;
mod link;
mod pace;
mod pair;
mod rows;
mod search;

// SAFETY: addresses and handles, which the driver takes from any thread.
unsafe impl Sync for Gpu {}

struct Gpu {
    library: *mut c_void,
    originals: [u64; HOOKED],
    context: usize,
    device: u64,
    pinned: *mut u8,
    stream: usize,
}

impl Gpu {
    fn open(bytes: usize) -> Self {
        Self::open_if_there(0, bytes).expect("a GPU")
    }

    /// Device `number`, with buffers of `bytes` bytes; `None` if there is none.
    fn open_if_there(number: i32, bytes: usize) -> Option<Self> {
        // SAFETY: a NUL-terminated name.
        let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
        assert!(!library.is_null(), "no libcuda.so.1");
        let originals = core::array::from_fn(|index| symbol(library, COPY_FNS[index].name));
        let (mut context, mut device, mut pinned, mut stream) = (0usize, 0u64, 0usize, 0usize);
        assert_eq!(cuda!(library, "cuInit", 0 => u32), 0);
        let mut devices = 0i32;
        let out = &raw mut devices;
        assert_eq!(cuda!(library, "cuDeviceGetCount", out => *mut i32), 0);
        if number >= devices {
            return None;
        }
        let out = &raw mut context;
        assert_eq!(
            cuda!(library, "cuDevicePrimaryCtxRetain", out => *mut usize, number => i32),
            0
        );
        assert_eq!(cuda!(library, "cuCtxSetCurrent", context => usize), 0);
        let out = &raw mut device;
        assert_eq!(
            cuda!(library, "cuMemAlloc_v2", out => *mut u64, bytes => usize),
            0
        );
        let out = &raw mut pinned;
        assert_eq!(
            cuda!(library, "cuMemHostAlloc", out => *mut usize, bytes => usize, 0 => u32),
            0
        );
        let out = &raw mut stream;
        assert_eq!(
            cuda!(library, "cuStreamCreate", out => *mut usize, 1 => u32),
            0
        );
        Some(Self {
            library,
            originals,
            context,
            device,
            pinned: pinned as *mut u8,
            stream,
        })
    }

    fn engine(&self, plan: Plan) -> Engine {
        let driver = core::array::from_fn::<u64, { DRIVER_FNS.len() }, _>(|index| {
            symbol(self.library, DRIVER_FNS[index])
        });
        // SAFETY: addresses of the functions by these names.
        let driver = unsafe { Driver::new(&self.originals, &driver) }.expect("a driver from 12.0");
        Engine::new(driver, plan, 0)
    }

    /// The stock copy, synchronous.
    fn stock(&self, to_host: bool, host: *mut u8, bytes: usize) {
        let code = if to_host {
            cuda!(self.library, "cuMemcpyDtoH_v2", host => *mut u8, self.device => u64, bytes => usize)
        } else {
            cuda!(self.library, "cuMemcpyHtoD_v2", self.device => u64, host => *mut u8, bytes => usize)
        };
        assert_eq!(code, 0);
    }

    /// The stock copy, asynchronous.
    fn stock_async(&self, request: &Request) {
        let name = match request.function {
            DTOH_ASYNC => "cuMemcpyDtoHAsync_v2",
            _ => "cuMemcpyHtoDAsync_v2",
        };
        let address = symbol(self.library, name);
        // SAFETY: cuda.h's signature; both ranges are as long as the copy.
        let code = unsafe {
            let copy: unsafe extern "C" fn(u64, u64, usize, usize) -> i32 =
                core::mem::transmute(address);
            copy(request.dst, request.src, request.bytes, request.stream)
        };
        assert_eq!(code, 0);
    }

    /// A copy between `host` and the device memory from `offset` on; with `is_async` on a stream of its own.
    fn request(
        &self,
        to_host: bool,
        is_async: bool,
        host: *mut u8,
        bytes: usize,
        offset: usize,
    ) -> Request {
        let function = match (to_host, is_async) {
            (false, false) => HTOD,
            (true, false) => DTOH,
            (false, true) => HTOD_ASYNC,
            (true, true) => DTOH_ASYNC,
        };
        let (host, device) = (host as u64, self.device + offset as u64);
        let (dst, src) = if to_host {
            (host, device)
        } else {
            (device, host)
        };
        Request {
            function,
            dst,
            src,
            bytes,
            stream: if is_async { self.stream } else { 0 },
        }
    }

    /// The staged copy; where it is asynchronous, then synchronised.
    fn staged(&self, engine: &Engine, to_host: bool, is_async: bool, host: *mut u8, bytes: usize) {
        let request = self.request(to_host, is_async, host, bytes, 0);
        // SAFETY: both ranges are as long as the largest copy.
        let outcome = unsafe { engine.copy(&request) };
        assert_eq!(outcome, Outcome::Staged(0), "{request:?}");
        if is_async {
            assert_eq!(self.synchronize(), 0);
        }
    }

    /// Makes the context current on this thread.
    fn bind(&self) {
        assert_eq!(
            cuda!(self.library, "cuCtxSetCurrent", self.context => usize),
            0
        );
    }

    /// The stock copy `offset` bytes into the device memory.
    fn stock_at(&self, to_host: bool, host: *mut u8, bytes: usize, offset: usize) {
        let device = self.device + offset as u64;
        let code = if to_host {
            cuda!(self.library, "cuMemcpyDtoH_v2", host => *mut u8, device => u64, bytes => usize)
        } else {
            cuda!(self.library, "cuMemcpyHtoD_v2", device => u64, host => *mut u8, bytes => usize)
        };
        assert_eq!(code, 0);
    }

    /// The same as a hook does it: stock where the engine passes, which it returns.
    fn maybe_staged(
        &self,
        engine: &Engine,
        to_host: bool,
        host: *mut u8,
        bytes: usize,
        offset: usize,
    ) -> bool {
        let request = self.request(to_host, false, host, bytes, offset);
        // SAFETY: both ranges lie within the buffers.
        match unsafe { engine.copy(&request) } {
            Outcome::Staged(code) => {
                assert_eq!(code, 0);
                false
            }
            Outcome::Pass(reason) => {
                let start = Instant::now();
                self.stock_at(to_host, host, bytes, offset);
                guard::note_passed(engine, reason, &request, start);
                true
            }
        }
    }

    /// Waits for the whole device.
    fn wait(&self) {
        assert_eq!(cuda!(self.library, "cuCtxSynchronize"), 0);
    }

    fn synchronize(&self) -> i32 {
        cuda!(self.library, "cuStreamSynchronize", self.stream => usize)
    }
}

/// Median GB/s of a copy.
fn rate(bytes: usize, mut copy: impl FnMut()) -> f64 {
    let repeats = (1 << 30) / bytes;
    let mut seconds: Vec<f64> = (0..repeats.clamp(5, 301))
        .map(|_| {
            let start = Instant::now();
            copy();
            start.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    bytes as f64 / seconds[seconds.len() / 2] / 1e9
}

/// What the engine assumes of the driver and the documents leave open.
fn facts(gpu: &Gpu, host: *mut u8) {
    let (mut kind, mut start, mut size) = (9u32, 0u64, 0usize);
    let mut names = [2, 11, 12];
    let mut data: [*mut c_void; 3] = [
        (&raw mut kind).cast(),
        (&raw mut start).cast(),
        (&raw mut size).cast(),
    ];
    for (what, address) in [
        ("pageable", host as u64),
        ("pinned", gpu.pinned as u64),
        ("device", gpu.device + 4096),
    ] {
        let code = cuda!(gpu.library, "cuPointerGetAttributes", 3 => u32, names.as_mut_ptr() => *mut i32,
            data.as_mut_ptr() => *mut *mut c_void, address => u64);
        println!("{what}: attributes {code}, type {kind}, range {start:#x} + {size}");
    }
    // A context of its own, destroyed: does cuCtxGetId tell?
    let (mut context, mut before, mut id) = (0usize, 0usize, 0u64);
    cuda!(gpu.library, "cuCtxGetCurrent", &raw mut before => *mut usize);
    let created =
        cuda!(gpu.library, "cuCtxCreate_v2", &raw mut context => *mut usize, 0 => u32, 0 => i32);
    let alive = cuda!(gpu.library, "cuCtxGetId", context => usize, &raw mut id => *mut u64);
    // Memory that is registered when its context is destroyed.
    // SAFETY: a new mapping.
    let own = unsafe {
        libc::mmap(
            core::ptr::null_mut(),
            1 << 20,
            3,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    let registered =
        cuda!(gpu.library, "cuMemHostRegister_v2", own => *mut c_void, 1 << 20 => usize, 3 => u32);
    let destroyed = cuda!(gpu.library, "cuCtxDestroy_v2", context => usize);
    cuda!(gpu.library, "cuCtxSetCurrent", before => usize);
    let after = cuda!(gpu.library, "cuCtxGetId", context => usize, &raw mut id => *mut u64);
    let unregistered = cuda!(gpu.library, "cuMemHostUnregister", own => *mut c_void);
    println!(
        "context: create {created}, id {alive}, register {registered}, destroy {destroyed}, id afterwards {after}, \
         unregister afterwards {unregistered}"
    );
}

extern "C" fn nap(_: *mut c_void) {
    std::thread::sleep(std::time::Duration::from_millis(300));
}

/// How long asynchronous copies take while the stream is busy for 300 ms.
fn busy(gpu: &Gpu, engine: &Engine, host: *mut u8, largest: usize) {
    for bytes in [1 << 20, 4 << 20, 8 << 20, 16 << 20, 32 << 20, 64 << 20] {
        if bytes > largest {
            break;
        }
        let mut took = [0.0; 2];
        for (staged, took) in took.iter_mut().enumerate() {
            let nap = nap as *const () as *mut c_void;
            let null = core::ptr::null_mut();
            let code = cuda!(gpu.library, "cuLaunchHostFunc", gpu.stream => usize, nap => *mut c_void, null => *mut c_void);
            assert_eq!(code, 0);
            let start = Instant::now();
            if staged == 1 {
                let request = gpu.request(false, true, host, bytes, 0);
                // SAFETY: both ranges are as long as the largest copy.
                let outcome = unsafe { engine.copy(&request) };
                assert_eq!(outcome, Outcome::Staged(0));
            } else {
                let code = cuda!(gpu.library, "cuMemcpyHtoDAsync_v2", gpu.device => u64, host => *mut u8, bytes => usize,
                    gpu.stream => usize);
                assert_eq!(code, 0);
            }
            *took = start.elapsed().as_secs_f64() * 1e3;
            assert_eq!(gpu.synchronize(), 0);
        }
        println!(
            "busy stream, HtoD async {:>6} KiB: stock returns after {:.3} ms, staged after {:.3} ms",
            bytes >> 10,
            took[0],
            took[1]
        );
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1).peekable();
    let mode = arguments.next_if(|argument| {
        [
            "calls", "search", "crowd", "link", "pair", "rows", "files", "guard", "flavours",
            "pace",
        ]
        .contains(&argument.as_str())
    });
    let numbers: Vec<u64> = arguments
        .map(|argument| argument.parse().expect("a number"))
        .collect();
    let largest = (numbers.first().copied().unwrap_or(1024) as usize) << 20;
    let gpu = Gpu::open(largest);
    let cpus = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
    let mut plan = estimate(cpus);
    if let [_, slot, slice, ring, threads, store] = numbers[..] {
        let row = PlanRow {
            up_to_bytes: u64::MAX,
            slot_bytes: slot << 10,
            slice_bytes: slice << 10,
            ring_bytes: ring << 10,
            threads: threads as u32,
            store: store as u32,
        };
        plan = Plan::NONE;
        (plan.htod[0], plan.dtoh[0]) = (row, row);
    }
    let mut source: Vec<u64> = (0..largest as u64 / 8)
        .map(|i| i.wrapping_mul(0x9E37_79B9_7F4A_7C15))
        .collect();
    let host = source.as_mut_ptr().cast::<u8>();
    let mut target = vec![0u8; largest + 64];
    target.fill(1);
    match mode.as_deref() {
        Some("crowd") => return crowd::print(&gpu, cpus, largest, [host, target.as_mut_ptr()]),
        Some("calls") => return calls::print(&gpu, host),
        Some("guard") => return guard::print(&gpu, cpus, [host, target.as_mut_ptr()]),
        Some("files") => return files::print(&gpu, cpus, host),
        Some("flavours") => {
            return flavours::print(&gpu, cpus, largest, [host, target.as_mut_ptr()]);
        }
        Some("pace") => return pace::print(&gpu, plan, largest, [host, target.as_mut_ptr()]),
        Some("rows") => return rows::print(&gpu, cpus, host),
        Some("link") => return link::print(&gpu, host),
        Some("pair") => return pair::print(&gpu, cpus, largest),
        Some(_) => return search::print(&gpu, cpus, largest, [host, target.as_mut_ptr()]),
        None => {}
    }
    let engine = gpu.engine(plan);
    facts(&gpu, host);

    // SAFETY: as many bytes as were written.
    let bytes_of =
        |pointer: *const u8, bytes| unsafe { core::slice::from_raw_parts(pointer, bytes) };
    for bytes in [
        1 << 20,
        (1 << 20) + 1,
        1_300_003,
        5 << 20,
        70_000_001,
        largest,
    ] {
        let bytes = bytes.min(largest - 1);
        for is_async in [false, true] {
            // The source one byte off its alignment, the target three.
            // SAFETY: within the source, one byte is left at its end.
            gpu.staged(&engine, false, is_async, unsafe { host.add(1) }, bytes);
            // SAFETY: pinned memory of `largest` bytes.
            unsafe { gpu.pinned.write_bytes(0, bytes) };
            gpu.stock(true, gpu.pinned, bytes);
            assert!(
                bytes_of(gpu.pinned, bytes) == bytes_of(host.wrapping_add(1), bytes),
                "HtoD {bytes}"
            );
            target.fill(0xA5);
            gpu.staged(&engine, true, is_async, target[3..].as_mut_ptr(), bytes);
            assert!(
                target[3..3 + bytes] == *bytes_of(gpu.pinned, bytes),
                "DtoH {bytes}"
            );
            assert!(
                target[..3]
                    .iter()
                    .chain(&target[3 + bytes..])
                    .all(|&byte| byte == 0xA5)
            );
        }
    }
    println!("every byte right, both ways, synchronous and asynchronous");
    busy(&gpu, &engine, host, largest);

    println!("direction        KiB   stock  staged   async  pinned  of pinned   (GB/s)");
    for to_host in [false, true] {
        let name = if to_host { "DtoH" } else { "HtoD" };
        let buffer = if to_host { target.as_mut_ptr() } else { host };
        for shift in [16, 18, 20, 22, 24, 26, 28, 30] {
            let bytes = 1usize << shift;
            if bytes > largest {
                break;
            }
            if !engine.is_staged(if to_host { DTOH } else { HTOD }, bytes as u64) {
                continue;
            }
            // Until the device is idle: stock and staged HtoD return with the last bytes on their way.
            let timed = |copy: &dyn Fn()| {
                rate(bytes, || {
                    copy();
                    gpu.wait();
                })
            };
            let stock = timed(&|| gpu.stock(to_host, buffer, bytes));
            let staged = timed(&|| gpu.staged(&engine, to_host, false, buffer, bytes));
            let in_stream = timed(&|| gpu.staged(&engine, to_host, true, buffer, bytes));
            let pinned = timed(&|| gpu.stock(to_host, gpu.pinned, bytes));
            println!(
                "{name}       {:>10}  {stock:>6.2}  {staged:>6.2}  {in_stream:>6.2}  {pinned:>6.2}  {:>9.2}",
                bytes >> 10,
                staged / pinned
            );
        }
    }
    println!(
        "{} helpers, {} MiB pinned, {} threads",
        engine.helpers(),
        engine.pinned_bytes() >> 20,
        cpus
    );
    engine.shutdown();
    println!(
        "after shutdown: {} helpers, {} bytes pinned",
        engine.helpers(),
        engine.pinned_bytes()
    );
}
