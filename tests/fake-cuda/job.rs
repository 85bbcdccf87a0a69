//! Job for the fake GPU whose final output is independent of interruptions: each word of its device memory depends on
//! all earlier steps.
//!
//! ```text
//! job [--steps 40] [--pause-ms 20] [--segments 300,64K,2M,4M] [--threads 1] [--renew 5] [--log FILE]
//!     [--wait-at STEP:FILE] [--kernel-at STEP:FILE] [--hold-at STEP:FILE] [--import] [--allocators 3]
//!     [--user 65534] [--late STEP:6M]
//! ```
//! Every thread has all segments, on GPU (thread modulo GPUs), and replaces one by a new allocation every `--renew`
//! steps. Each step appends a line to standard output and to the log. At a step, the first thread can wait
//! (`--wait-at`), work on the GPU (`--kernel-at`: a lock waits for it) or hold the driver's lock (`--hold-at`) until
//! the file exists; meanwhile all other threads wait outside of the driver. `--import`: the job holds memory imported
//! from its own descriptor, which the driver cannot restore. `--allocators` is the number of threads that call malloc
//! and free nearly all the time. `--user`: the job becomes that user before its first step. `--late`: every thread has
//! an additional segment from that step on.
#![allow(unsafe_code, reason = "calls the driver through C")]

mod driver;

use std::ffi::{CString, c_int, c_void};
use std::fs::File;
use std::io::Write;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Barrier, Mutex};
use std::time::Duration;

use driver::{Driver, UntilFile, must};

/// Allocation, with a host buffer.
struct Segment {
    address: u64,
    words: Vec<u64>,
}

impl Segment {
    fn new(driver: &Driver, bytes: usize) -> Self {
        let mut segment = Self {
            address: 0,
            words: vec![0; bytes.div_ceil(8)],
        };
        segment.allocate(driver);
        // SAFETY: the allocation has this length.
        must("cuMemsetD8", unsafe {
            (driver.fill)(segment.address, 3, segment.bytes())
        });
        segment
    }

    fn bytes(&self) -> usize {
        self.words.len() * 8
    }

    fn allocate(&mut self, driver: &Driver) {
        // SAFETY: there is room for an address.
        must("cuMemAlloc", unsafe {
            (driver.alloc)(&raw mut self.address, self.bytes())
        });
    }

    /// Changes each word; the first half is copied from the second on the GPU.
    fn step(&mut self, driver: &Driver, step: u64) -> u64 {
        let (at, bytes) = (self.address, self.bytes());
        // SAFETY: both sides have this length.
        must("cuMemcpyDtoH", unsafe {
            (driver.download)(self.words.as_mut_ptr(), at, bytes)
        });
        let mut sum = step;
        for (index, word) in (0_u64..).zip(&mut self.words) {
            *word = word
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(index ^ step);
            sum = sum.rotate_left(5) ^ *word;
        }
        // SAFETY: as above.
        must("cuMemcpyHtoD", unsafe {
            (driver.upload)(at, self.words.as_ptr(), bytes)
        });
        let half = self.words.len() / 2 * 8;
        // SAFETY: two halves of an allocation.
        must("cuMemcpyDtoD", unsafe {
            (driver.copy)(at, at + (bytes - half) as u64, half)
        });
        sum
    }

    /// Moves the contents to a new allocation.
    fn renew(&mut self, driver: &Driver) {
        let (old, bytes) = (self.address, self.bytes());
        self.allocate(driver);
        // SAFETY: two allocations of this length, the old one not used again.
        unsafe {
            must("cuMemcpyDtoD", (driver.copy)(self.address, old, bytes));
            must("cuMemFree", (driver.free)(old));
        }
    }
}

/// Creates memory whose only handle is an imported one.
fn import(driver: &Driver) {
    // Pinned, by descriptor, on a device: the first one.
    let properties = [1, 1, 1, 0, 0, 0, 0, 0];
    let (mut own, mut imported, mut descriptor) = (0, 0, -1);
    // SAFETY: there is room for two handles and a descriptor, and 32 bytes of properties.
    unsafe {
        must(
            "cuMemCreate",
            (driver.create)(&raw mut own, 2 << 20, &raw const properties, 0),
        );
        must(
            "cuMemExport",
            (driver.export)(&raw mut descriptor, own, 1, 0),
        );
        must("cuMemRelease", (driver.release)(own));
        let pointer = descriptor as isize as *mut c_void;
        must(
            "cuMemImport",
            (driver.import)(&raw mut imported, pointer, 1),
        );
    }
    // SAFETY: it has no other owner.
    drop(unsafe { OwnedFd::from_raw_fd(descriptor) });
}

struct Options {
    steps: u64,
    pause: Duration,
    segments: Vec<usize>,
    threads: usize,
    renew: u64,
    log: Option<String>,
    wait_at: Vec<(u64, String)>,
    kernel_at: Option<(u64, String)>,
    hold_at: Option<(u64, String)>,
    import: bool,
    allocators: usize,
    user: Option<u32>,
    late: Option<(u64, String)>,
}

unsafe extern "C" {
    fn setuid(user: u32) -> c_int;
}

impl Options {
    fn parse() -> Self {
        let mut options = Self {
            steps: 40,
            pause: Duration::from_millis(20),
            segments: sizes("300,64K,2M,4M"),
            threads: 1,
            renew: 5,
            log: None,
            wait_at: Vec::new(),
            kernel_at: None,
            hold_at: None,
            import: false,
            allocators: 0,
            user: None,
            late: None,
        };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().expect("a value");
            match word.as_str() {
                "--steps" => options.steps = value().parse().unwrap(),
                "--pause-ms" => options.pause = Duration::from_millis(value().parse().unwrap()),
                "--segments" => options.segments = sizes(&value()),
                "--threads" => options.threads = value().parse().unwrap(),
                "--renew" => options.renew = value().parse().unwrap(),
                "--log" => options.log = Some(value()),
                "--wait-at" => options.wait_at.push(at(&value())),
                "--kernel-at" => options.kernel_at = Some(at(&value())),
                "--hold-at" => options.hold_at = Some(at(&value())),
                "--import" => options.import = true,
                "--allocators" => options.allocators = value().parse().unwrap(),
                "--late" => options.late = Some(at(&value())),
                "--user" => options.user = Some(value().parse().unwrap()),
                other => panic!("no option {other}"),
            }
        }
        options
    }
}

fn sizes(list: &str) -> Vec<usize> {
    let size = |word: &str| {
        let (number, unit) = match word.strip_suffix('K') {
            Some(number) => (number, 1 << 10),
            None => word
                .strip_suffix('M')
                .map_or((word, 1), |number| (number, 1 << 20)),
        };
        number.parse::<usize>().unwrap() * unit
    };
    list.split(',').map(size).collect()
}

fn at(text: &str) -> (u64, String) {
    let (step, path) = text.split_once(':').expect("STEP:FILE");
    (step.parse().unwrap(), path.to_owned())
}

/// State shared by the threads.
struct Job {
    options: Options,
    driver: Driver,
    gpus: c_int,
    log: Option<File>,
    sums: Vec<Mutex<u64>>,
    barrier: Barrier,
}

impl Job {
    fn work(&self, thread: usize) {
        let (driver, options) = (&self.driver, &self.options);
        let mut context = 0;
        let gpu = c_int::try_from(thread).unwrap() % self.gpus;
        // SAFETY: there is room for a context, and that context.
        unsafe {
            must(
                "cuDevicePrimaryCtxRetain",
                (driver.retain)(&raw mut context, gpu),
            );
            must("cuCtxSetCurrent", (driver.set_current)(context));
        }
        let new = |bytes: &usize| Segment::new(driver, *bytes);
        let mut segments: Vec<Segment> = options.segments.iter().map(new).collect();
        for step in 0..options.steps {
            if let Some((_, size)) = options.late.as_ref().filter(|(at, _)| *at == step) {
                segments.extend(sizes(size).iter().map(new));
            }
            let mut sum = 0_u64;
            for segment in &mut segments {
                sum = sum.rotate_left(7) ^ segment.step(driver, step + thread as u64);
            }
            if step % options.renew == options.renew - 1 {
                let chosen = usize::try_from(step / options.renew).unwrap() % segments.len();
                segments[chosen].renew(driver);
            }
            // SAFETY: has no arguments.
            must("cuCtxSynchronize", unsafe { (driver.synchronize)() });
            *self.sums[thread].lock().unwrap() = sum;
            self.barrier.wait();
            if thread == 0 {
                self.report(step);
                std::thread::sleep(options.pause);
            }
            self.barrier.wait();
        }
    }

    /// Reports a step; called by the first thread, while all others wait.
    fn report(&self, step: u64) {
        let sums = self.sums.iter().map(|sum| *sum.lock().unwrap());
        let line = format!("{step} {:016x}\n", sums.fold(0, |all, sum| all ^ sum));
        if let Some(mut log) = self.log.as_ref() {
            log.write_all(line.as_bytes()).unwrap();
        }
        print!("{line}");
        std::io::stdout().flush().unwrap();
        let file = |option: &Option<(u64, String)>| {
            option
                .clone()
                .filter(|(at, _)| *at == step)
                .map(|(_, path)| path)
        };
        let waits = self.options.wait_at.iter();
        for (_, path) in waits.filter(|(at, _)| *at == step) {
            while !Path::new(path).exists() {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        if let Some(path) = file(&self.options.kernel_at) {
            until(self.driver.kernel, path);
        }
        if let Some(path) = file(&self.options.hold_at) {
            until(self.driver.hold, path);
        }
    }
}

/// Allocates for ever, in a size too large for a thread's own cache and too small for a separate mapping.
fn allocate_for_ever() {
    let mut pieces: [Vec<u8>; 64] = std::array::from_fn(|_| Vec::new());
    for number in 0_usize.. {
        let piece = &mut pieces[number % 64];
        // Freed before another is allocated.
        *piece = Vec::new();
        *piece = Vec::with_capacity(2048 + number * 7919 % 32_768);
        std::hint::black_box(piece);
    }
}

fn until(function: UntilFile, path: String) {
    let path = CString::new(path).unwrap();
    // SAFETY: a text.
    must("until the file is there", unsafe {
        function(path.as_ptr())
    });
}

fn main() {
    let options = Options::parse();
    let driver = Driver::load();
    // SAFETY: the flags must be 0.
    must("cuInit", unsafe { (driver.init)(0) });
    if options.import {
        import(&driver);
    }
    if let Some(user) = options.user {
        // SAFETY: a number.
        assert_eq!(unsafe { setuid(user) }, 0, "cannot become user {user}");
    }
    let mut gpus = 0;
    // SAFETY: there is room for a number.
    must("cuDeviceGetCount", unsafe { (driver.count)(&raw mut gpus) });
    let threads = options.threads;
    for _ in 0..options.allocators {
        std::thread::spawn(allocate_for_ever);
    }
    let append = |path| {
        File::options()
            .create(true)
            .append(true)
            .open(path)
            .unwrap()
    };
    let job = Job {
        log: options.log.as_ref().map(append),
        options,
        driver,
        gpus,
        sums: (0..threads).map(|_| Mutex::new(0)).collect(),
        barrier: Barrier::new(threads),
    };
    std::thread::scope(|scope| {
        for thread in 1..threads {
            let job = &job;
            scope.spawn(move || job.work(thread));
        }
        job.work(0);
    });
    println!("done");
}
