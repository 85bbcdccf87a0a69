//! Job of two processes that use each other's device memory (CUDA IPC), each on a separate GPU if there are two. Its
//! final output is independent of interruptions.
//!
//! ```text
//! pair [--steps 30] [--wait-at STEP:FILE] [--begin-at FILE] [--free-until FILE]
//! first   allocate, export ──── handle ───▶ open ┐
//!         open ◀─────────────── handle ─── allocate, export      second, which the first starts
//! Each creates a context first, and with --begin-at waits for the file then. In each step the first changes its own memory by the second's, then the second its own by the first's, and sums up.
//! With --free-until, both free all memory after the last step and wait for the file
//! ```
//! So a process with a copy of the other's memory, instead of that memory itself, would print a different result.
#![allow(unsafe_code, reason = "calls the driver through C")]

mod driver;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use driver::{Driver, Handle, must};

/// Number of words of each process's memory.
const WORDS: usize = (4 << 20) / 8;
const BYTES: usize = WORDS * 8;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
const LAZY_PEERS: u32 = 1;
/// Message to the second process: free all memory.
const FREE: &str = "free";

/// Process, with the other's memory beside its own.
struct Side {
    driver: Driver,
    own: u64,
    others: u64,
}

impl Side {
    /// Starts on the GPU of that number, modulo the number of GPUs. Exchanges handles: writes one and reads one.
    fn begin(
        number: i32,
        begin_at: Option<&str>,
        output: &mut impl Write,
        input: &mut impl BufRead,
    ) -> Self {
        let driver = Driver::load();
        let (mut gpus, mut context, mut own, mut others) = (0, 0, 0, 0);
        let mut handle = Handle([0; 64]);
        // SAFETY: there is room for the results.
        unsafe {
            must("cuInit", (driver.init)(0));
            must("cuDeviceGetCount", (driver.count)(&raw mut gpus));
            let retained = (driver.retain)(&raw mut context, number % gpus);
            must("cuDevicePrimaryCtxRetain", retained);
            must("cuCtxSetCurrent", (driver.set_current)(context));
        }
        if let Some(path) = begin_at {
            wait_for(path);
        }
        // SAFETY: there is room for the results.
        unsafe {
            must("cuMemAlloc", (driver.alloc)(&raw mut own, BYTES));
            must("cuMemsetD8", (driver.fill)(own, 3, BYTES));
            must(
                "cuIpcGetMemHandle",
                (driver.get_handle)(&raw mut handle, own),
            );
        }
        let words: Vec<String> = handle.0.iter().map(u8::to_string).collect();
        writeln!(output, "{}", words.join(" ")).unwrap();
        output.flush().unwrap();
        let line = hear(input).expect("the other's handle");
        let mut bytes = line.split(' ').map(|word| word.parse().expect("a byte"));
        let handle = Handle(std::array::from_fn(|_| bytes.next().expect("64 bytes")));
        // SAFETY: there is room for an address.
        let opened = unsafe { (driver.open_handle)(&raw mut others, handle, LAZY_PEERS) };
        must("cuIpcOpenMemHandle", opened);
        Self {
            driver,
            own,
            others,
        }
    }

    /// Changes its own memory by the other's; returns a sum of it.
    fn step(&self, step: u64) -> u64 {
        let (mut own, others) = (self.read(self.own), self.read(self.others));
        let mut sum = step;
        for (word, other) in own.iter_mut().zip(others) {
            *word = word
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(other ^ step);
            sum = sum.rotate_left(5) ^ *word;
        }
        // SAFETY: the allocation has this length.
        let written = unsafe { (self.driver.upload)(self.own, own.as_ptr(), BYTES) };
        must("cuMemcpyHtoD", written);
        // SAFETY: has no arguments.
        must("cuCtxSynchronize", unsafe { (self.driver.synchronize)() });
        sum
    }

    /// Frees its own memory, and closes the other's.
    fn free(&self) {
        // SAFETY: opened in `begin`, and not used after this.
        let closed = unsafe { (self.driver.close_handle)(self.others) };
        must("cuIpcCloseMemHandle", closed);
        // SAFETY: allocated in `begin`, and not used after this.
        must("cuMemFree", unsafe { (self.driver.free)(self.own) });
    }

    fn read(&self, from: u64) -> Vec<u64> {
        let mut words = vec![0; WORDS];
        // SAFETY: the allocation has this length.
        must("cuMemcpyDtoH", unsafe {
            (self.driver.download)(words.as_mut_ptr(), from, BYTES)
        });
        words
    }
}

fn wait_for(path: &str) {
    while !Path::new(path).exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Reads a line, without its end.
fn hear(input: &mut impl BufRead) -> Option<String> {
    let mut line = String::new();
    let len = input.read_line(&mut line).expect("a line");
    (len > 0).then(|| line.trim_end().to_owned())
}

fn second(begin_at: Option<&str>) {
    let (mut input, mut output) = (std::io::stdin().lock(), std::io::stdout().lock());
    let side = Side::begin(1, begin_at, &mut output, &mut input);
    while let Some(line) = hear(&mut input) {
        if line == FREE {
            side.free();
            writeln!(output).unwrap();
        } else {
            let sum = side.step(line.parse().expect("a step"));
            writeln!(output, "{sum:016x}").unwrap();
        }
        output.flush().unwrap();
    }
}

fn first(
    steps: u64,
    wait_at: Option<&(u64, String)>,
    begin_at: Option<&str>,
    free_until: Option<&str>,
) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .arg("second")
        .args(begin_at)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a second process");
    let mut output = child.stdin.take().unwrap();
    let mut input = BufReader::new(child.stdout.take().unwrap());
    let side = Side::begin(0, begin_at, &mut output, &mut input);
    for step in 0..steps {
        let sum = side.step(step);
        writeln!(output, "{step}").unwrap();
        let other = hear(&mut input).expect("the other's sum");
        println!("{step} {sum:016x} {other}");
        if let Some((_, path)) = wait_at.filter(|(at, _)| *at == step) {
            wait_for(path);
        }
    }
    if let Some(path) = free_until {
        writeln!(output, "{FREE}").unwrap();
        hear(&mut input).expect("the other's reply");
        side.free();
        eprintln!("freed");
        wait_for(path);
    }
    drop(output);
    assert!(child.wait().expect("the second process").success());
    println!("done");
}

fn main() {
    let (mut steps, mut wait_at, mut begin_at, mut free_until) = (30, None, None, None);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().expect("a value");
        match word.as_str() {
            "second" => return second(words.next().as_deref()),
            "--begin-at" => begin_at = Some(value()),
            "--free-until" => free_until = Some(value()),
            "--steps" => steps = value().parse().unwrap(),
            "--wait-at" => {
                let value = value();
                let (step, path) = value.split_once(':').expect("STEP:FILE");
                wait_at = Some((step.parse().unwrap(), path.to_owned()));
            }
            other => panic!("no option {other}"),
        }
    }
    first(
        steps,
        wait_at.as_ref(),
        begin_at.as_deref(),
        free_until.as_deref(),
    );
}
