//! Streams: each a thread that does its work in order, slowly and unevenly.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use super::fresh;

/// A piece of work.
pub enum Work {
    /// Bytes from one address to another, as a DMA engine would: when its turn comes, not before.
    Copy {
        to: u64,
        from: u64,
        bytes: usize,
    },
    /// The same for rows of a rectangle.
    Rows {
        to: u64,
        to_pitch: u64,
        from: u64,
        from_pitch: u64,
        width: u64,
        height: u64,
    },
    /// Bytes that were staged when the call was made.
    Staged {
        to: u64,
        bytes: Vec<u8>,
    },
    Write {
        to: u64,
        value: u32,
    },
    Record(Arc<AtomicBool>),
    /// A kernel that runs until the gate opens.
    Wait(Gate),
    /// A kernel that fails: nothing after it runs.
    Fault(i32),
}

/// A kernel that fails with `code`.
pub fn fault(code: i32) -> Work {
    Work::Fault(code)
}

/// Lets a test decide how long a kernel runs.
#[derive(Clone, Default)]
pub struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    pub fn open(&self) {
        *self.0.0.lock().expect("no panic inside") = true;
        self.0.1.notify_all();
    }

    fn wait(&self) {
        let open = self.0.0.lock().expect("no panic inside");
        drop(
            self.0
                .1
                .wait_while(open, |open| !*open)
                .expect("no panic inside"),
        );
    }
}

pub struct Stream {
    pub handle: usize,
    pub id: u64,
    pub capturing: AtomicBool,
    /// What a synchronise returns.
    pub error: AtomicI32,
    /// Most microseconds that the DMA engine dawdles within one copy.
    pub dawdle_us: AtomicU32,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    busy: bool,
}

impl Stream {
    pub fn new() -> Arc<Self> {
        let stream = Arc::new(Self {
            handle: fresh() as usize,
            id: fresh(),
            capturing: AtomicBool::new(false),
            error: AtomicI32::new(0),
            dawdle_us: AtomicU32::new(20),
            queue: Mutex::default(),
            changed: Condvar::new(),
        });
        let weak = Arc::downgrade(&stream);
        std::thread::spawn(move || {
            let mut random = 0x2545_F491_4F6C_DD1D_u64;
            while let Some(stream) = weak.upgrade() {
                stream.run_one(&mut random);
            }
        });
        stream
    }

    pub fn push(&self, work: Work) {
        self.queue
            .lock()
            .expect("no panic inside")
            .work
            .push_back(work);
        self.changed.notify_all();
    }

    pub fn is_idle(&self) -> bool {
        let queue = self.queue.lock().expect("no panic inside");
        queue.work.is_empty() && !queue.busy
    }

    /// Waits for everything that was pushed.
    pub fn finish(&self) -> i32 {
        let queue = self.queue.lock().expect("no panic inside");
        drop(
            self.changed
                .wait_while(queue, |queue| queue.busy || !queue.work.is_empty())
                .expect("no panic inside"),
        );
        self.error.load(Ordering::SeqCst)
    }

    /// Puts a kernel on the stream that runs until the gate opens.
    pub fn block(&self) -> Gate {
        let gate = Gate::default();
        self.push(Work::Wait(gate.clone()));
        gate
    }

    fn run_one(&self, random: &mut u64) {
        let mut queue = self.queue.lock().expect("no panic inside");
        let Some(work) = queue.work.pop_front() else {
            drop(
                self.changed
                    .wait_timeout(queue, Duration::from_millis(20))
                    .expect("no panic inside"),
            );
            return;
        };
        queue.busy = true;
        drop(queue);
        if self.error.load(Ordering::SeqCst) == 0 {
            self.run(work, random);
        }
        self.queue.lock().expect("no panic inside").busy = false;
        self.changed.notify_all();
    }

    fn run(&self, work: Work, random: &mut u64) {
        match work {
            Work::Copy { to, from, bytes } => {
                let piece = 64 << 10;
                for at in (0..bytes).step_by(piece) {
                    *random ^= *random << 13;
                    *random ^= *random >> 7;
                    *random ^= *random << 17;
                    let most = u64::from(self.dawdle_us.load(Ordering::Relaxed));
                    if most > 0 && (*random).is_multiple_of(4) {
                        std::thread::sleep(Duration::from_micros((*random >> 20) % most));
                    }
                    let bytes = piece.min(bytes - at);
                    // SAFETY: the entry points checked both ranges, and the engine keeps its own alive until this is done.
                    unsafe {
                        ((to as usize + at) as *mut u8)
                            .copy_from_nonoverlapping((from as usize + at) as *const u8, bytes);
                    }
                }
            }
            Work::Rows {
                to,
                to_pitch,
                from,
                from_pitch,
                width,
                height,
            } => {
                for row in 0..height {
                    let to = (to + row * to_pitch) as *mut u8;
                    let from = (from + row * from_pitch) as *const u8;
                    // SAFETY: as above.
                    unsafe { to.copy_from_nonoverlapping(from, width as usize) };
                }
            }
            Work::Staged { to, bytes } => {
                // SAFETY: the entry points checked the range.
                unsafe { (to as *mut u8).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            }
            Work::Write { to, value } => {
                // SAFETY: the entry points checked that the word is pinned.
                let word = unsafe { AtomicU32::from_ptr(to as *mut u32) };
                word.store(value, Ordering::Release);
            }
            Work::Record(event) => event.store(true, Ordering::Release),
            Work::Wait(gate) => gate.wait(),
            Work::Fault(code) => self.error.store(code, Ordering::SeqCst),
        }
    }
}
