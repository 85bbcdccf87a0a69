//! Comparison of ways to write a large file durably, for the choice of the store's packs. Independent of the store's
//! code.
//!
//! `cargo bench --bench disk -- FOLDER [BYTES [ROUNDS]]` writes files of one GiB each, in every way once per round, and
//! prints medians: speed until the data are durable, the process's own CPU seconds (without writeback by kernel
//! threads), and the part of the files in the page cache before and after the sync (from util-linux's `fincore`).
#![allow(
    unsafe_code,
    missing_docs,
    reason = "sync_file_range has no safe form, and a benchmark no documentation"
)]

use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::fcntl::{FallocateFlags, PosixFadviseAdvice, fallocate, posix_fadvise};
use nix::libc;
use nix::sys::resource::{UsageWho, getrusage};

const FILE_BYTES: u64 = 1 << 30;
/// Size of the caller's writes: chunks, as in the store.
const CHUNK_BYTES: usize = 256 << 10;
const ALIGNMENT: usize = 4096;

/// Advice to the kernel besides the writes.
#[derive(Clone, Copy, PartialEq)]
enum Care {
    /// None: the page cache takes everything, and `fsync` waits for it.
    None,
    /// `posix_fadvise(DONTNEED)` after the writes, which starts the writeback of dirty pages.
    Advise,
    /// `sync_file_range(WRITE)` after the writes, and `DONTNEED` once the pages are clean.
    Range,
    /// `O_DIRECT`.
    Direct,
}

#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    care: Care,
    /// Size of a write in bytes.
    buffer: usize,
    threads: usize,
    /// Step of preallocation; 0 for none.
    step: u64,
}

const WAYS: [Way; 10] = [
    way("buffered, fsync", Care::None, 256 << 10, 2, 0),
    way(
        "buffered, DONTNEED a step",
        Care::Advise,
        256 << 10,
        2,
        64 << 20,
    ),
    way(
        "buffered, sync_file_range",
        Care::Range,
        4 << 20,
        1,
        64 << 20,
    ),
    way(
        "buffered, sync_file_range",
        Care::Range,
        4 << 20,
        2,
        64 << 20,
    ),
    way("O_DIRECT, no space ahead", Care::Direct, 4 << 20, 2, 0),
    way("O_DIRECT", Care::Direct, 1 << 20, 2, 64 << 20),
    way("O_DIRECT", Care::Direct, 4 << 20, 1, 64 << 20),
    way("O_DIRECT", Care::Direct, 4 << 20, 2, 64 << 20),
    way("O_DIRECT", Care::Direct, 4 << 20, 2, 256 << 20),
    way("O_DIRECT", Care::Direct, 4 << 20, 4, 256 << 20),
];

const fn way(name: &'static str, care: Care, buffer: usize, threads: usize, step: u64) -> Way {
    Way {
        name,
        care,
        buffer,
        threads,
        step,
    }
}

/// Measurements of one round of one way.
#[derive(Clone, Copy)]
struct Sample {
    seconds: f64,
    user: f64,
    system: f64,
    cached_before: u64,
    cached_after: u64,
}

fn main() -> Result<(), Box<dyn Error>> {
    // cargo passes `--bench`, too.
    let mut arguments = std::env::args().skip(1).filter(|word| word != "--bench");
    let folder = PathBuf::from(arguments.next().ok_or("which folder to write to?")?);
    let bytes: u64 = arguments.next().map_or(Ok(4 << 30), |word| word.parse())?;
    let rounds: usize = arguments.next().map_or(Ok(5), |word| word.parse())?;
    let noise = noise();
    let mut samples = vec![Vec::new(); WAYS.len()];
    for _ in 0..rounds {
        for (way, samples) in WAYS.iter().zip(&mut samples) {
            samples.push(measure(way, &folder, bytes, &noise)?);
        }
    }
    println!("{bytes} bytes, medians of {rounds} (lowest to highest)");
    println!(
        "{:<28}{:>7} {:>7} {:>8}{:>6}  {:<13}{:>7}{:>7}{:>15}{:>14}",
        "way",
        "write",
        "threads",
        "ahead",
        "GB/s",
        "",
        "user s",
        "sys s",
        "cached before",
        "after fsync"
    );
    for (way, samples) in WAYS.iter().zip(&samples) {
        print(way, samples, bytes);
    }
    Ok(())
}

#[allow(clippy::cast_precision_loss, reason = "a report")]
fn print(way: &Way, samples: &[Sample], bytes: u64) {
    let sorted = |of: fn(&Sample) -> f64| {
        let mut values: Vec<f64> = samples.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values
    };
    let median = |of| sorted(of)[samples.len() / 2];
    let seconds = sorted(|sample| sample.seconds);
    let speed = |seconds: f64| bytes as f64 / seconds / 1e9;
    let mib = |bytes: f64| format!("{:.0} MiB", bytes / f64::from(1 << 20));
    println!(
        "{:<28}{:>3} KiB {:>7} {:>4} MiB{:>6.2}  {:<13}{:>7.2}{:>7.2}{:>15}{:>14}",
        way.name,
        way.buffer >> 10,
        way.threads,
        way.step >> 20,
        speed(seconds[seconds.len() / 2]),
        format!(
            "({:.2} to {:.2})",
            speed(seconds[seconds.len() - 1]),
            speed(seconds[0])
        ),
        median(|sample| sample.user),
        median(|sample| sample.system),
        mib(median(|sample| sample.cached_before as f64)),
        mib(median(|sample| sample.cached_after as f64)),
    );
}

fn measure(way: &Way, folder: &Path, bytes: u64, noise: &[u8]) -> Result<Sample, Box<dyn Error>> {
    let folder = tempfile::tempdir_in(folder)?;
    // Dirty pages of other programs must not count.
    nix::unistd::sync();
    let mut sample = Sample {
        seconds: 0.0,
        user: 0.0,
        system: 0.0,
        cached_before: 0,
        cached_after: 0,
    };
    for number in 0..bytes.div_ceil(FILE_BYTES) {
        let path = folder.path().join(format!("{number:02}.pack"));
        let len = (bytes - number * FILE_BYTES).min(FILE_BYTES);
        let (user, system) = cpu()?;
        let begun = Instant::now();
        let file = write(way, &path, len, noise)?;
        sample.seconds += begun.elapsed().as_secs_f64();
        sample.cached_before += cached(&path)?;
        let begun = Instant::now();
        file.sync_all()?;
        sample.seconds += begun.elapsed().as_secs_f64();
        let now = cpu()?;
        sample.user += now.0.saturating_sub(user).as_secs_f64();
        sample.system += now.1.saturating_sub(system).as_secs_f64();
        sample.cached_after += cached(&path)?;
    }
    fs::remove_dir_all(folder.path())?;
    Ok(sample)
}

struct Writing<'a> {
    way: &'a Way,
    file: File,
    len: u64,
    noise: &'a [u8],
    next: AtomicU64,
    allocated: Mutex<u64>,
}

fn write(way: &Way, path: &Path, len: u64, noise: &[u8]) -> io::Result<File> {
    let flags = match way.care {
        Care::Direct => libc::O_DIRECT,
        Care::None | Care::Advise | Care::Range => 0,
    };
    let writing = Writing {
        way,
        file: OpenOptions::new()
            .write(true)
            .create_new(true)
            .custom_flags(flags)
            .open(path)?,
        len,
        noise,
        next: AtomicU64::new(0),
        allocated: Mutex::new(0),
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..way.threads)
            .map(|_| scope.spawn(|| writing.work()))
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap_or(Err(io::ErrorKind::Other.into())))
    })?;
    writing.file.set_len(len)?;
    Ok(writing.file)
}

impl Writing<'_> {
    fn work(&self) -> io::Result<()> {
        let mut memory = vec![0; self.way.buffer + ALIGNMENT];
        let skipped = memory.as_ptr().align_offset(ALIGNMENT);
        let buffer = &mut memory[skipped..skipped + self.way.buffer];
        loop {
            let offset = self.next.fetch_add(buffer.len() as u64, Ordering::Relaxed);
            if offset >= self.len {
                return Ok(());
            }
            for (number, part) in buffer.chunks_mut(CHUNK_BYTES).enumerate() {
                let from = usize::try_from(offset).unwrap_or(0) + number * CHUNK_BYTES;
                let from = from % (self.noise.len() - CHUNK_BYTES);
                part.copy_from_slice(&self.noise[from..from + part.len()]);
            }
            self.keep_ahead(offset + buffer.len() as u64)?;
            self.file.write_all_at(buffer, offset)?;
            self.keep_behind(offset, buffer.len() as u64)?;
        }
    }

    fn keep_ahead(&self, end: u64) -> io::Result<()> {
        let mut allocated = self.allocated.lock().map_err(|_| io::ErrorKind::Other)?;
        while self.way.step > 0 && *allocated < end {
            let none = FallocateFlags::empty();
            fallocate(&self.file, none, signed(*allocated), signed(self.way.step))?;
            *allocated += self.way.step;
        }
        Ok(())
    }

    /// Called after the last write of each step; handles that step and the one before.
    fn keep_behind(&self, offset: u64, len: u64) -> io::Result<()> {
        if self.way.step == 0 || !(offset + len).is_multiple_of(self.way.step) {
            return Ok(());
        }
        let begin = offset + len - self.way.step;
        let (at, step) = (signed(begin), signed(self.way.step));
        let dont_need = PosixFadviseAdvice::POSIX_FADV_DONTNEED;
        match self.way.care {
            Care::None | Care::Direct => {}
            Care::Advise => posix_fadvise(&self.file, at, step, dont_need)?,
            Care::Range => {
                self.sync_range(at, step, libc::SYNC_FILE_RANGE_WRITE)?;
                if begin > 0 {
                    let all = libc::SYNC_FILE_RANGE_WAIT_BEFORE
                        | libc::SYNC_FILE_RANGE_WRITE
                        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
                    self.sync_range(at - step, step, all)?;
                    posix_fadvise(&self.file, at - step, step, dont_need)?;
                }
            }
        }
        Ok(())
    }

    fn sync_range(&self, offset: i64, len: i64, flags: u32) -> io::Result<()> {
        // SAFETY: the descriptor is open, and no memory is passed.
        let result = unsafe { libc::sync_file_range(self.file.as_raw_fd(), offset, len, flags) };
        match result {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

fn cpu() -> Result<(Duration, Duration), Box<dyn Error>> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    let duration = |time: nix::sys::time::TimeVal| {
        Ok::<_, std::num::TryFromIntError>(
            Duration::from_secs(time.tv_sec().try_into()?)
                + Duration::from_micros(time.tv_usec().try_into()?),
        )
    };
    Ok((duration(usage.user_time())?, duration(usage.system_time())?))
}

/// Returns the bytes of the file in the page cache.
fn cached(path: &Path) -> Result<u64, Box<dyn Error>> {
    let output = Command::new("fincore")
        .args(["--bytes", "--noheadings", "--output", "RES"])
        .arg(path)
        .output()?;
    Ok(String::from_utf8(output.stdout)?.trim().parse()?)
}

/// Returns bytes that neither compress nor repeat within a file system's block.
fn noise() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let word = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..(8 << 20)).flat_map(word).collect()
}
