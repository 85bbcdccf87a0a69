//! CPU job for tests of `ckpt-run`: counts, and detects damage.
//!
//! `count STEPS MS_PER_STEP LOGFILE [MIB]`
//!
//! Each step changes every word of its memory (16 MiB by default) and writes one
//! line to stdout and to the log file: the step and a checksum of all memory. At
//! the end it computes the expected memory again and reads the log back. A lost or
//! repeated step, a wrong or stale byte or a damaged log ends with exit code 1 and
//! the reason. Otherwise the last line is `verified: …`. The job keeps no
//! checkpoints and has no code for `ckpt-run`.

use std::fs::{self, File};
use std::io::{self, Write};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

const USAGE: &str = "usage: count STEPS MS_PER_STEP LOGFILE [MIB]";
const MIB_DEFAULT: usize = 16;
/// Limit that keeps a small machine from swapping.
const MIB_MAX: usize = 1 << 16;
/// Limit on the word steps that the end computes again.
const REPLAYED_WORD_STEPS_MAX: u64 = 1 << 28;
const FNV_OFFSET: u64 = 0xCBF2_9CE4_8422_2325;

struct Arguments {
    steps: u64,
    pace: Duration,
    log: String,
    words: usize,
}

impl Arguments {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Option<Self> {
        let steps = arguments.next()?.parse().ok().filter(|&steps| steps > 0)?;
        let pace = Duration::from_millis(arguments.next()?.parse().ok()?);
        let log = arguments.next()?;
        let mib = match arguments.next() {
            Some(mib) => mib.parse().ok().filter(|mib| (1..=MIB_MAX).contains(mib))?,
            None => MIB_DEFAULT,
        };
        arguments.next().is_none().then_some(Self {
            steps,
            pace,
            log,
            words: mib << 17,
        })
    }
}

fn main() -> ExitCode {
    let Some(arguments) = Arguments::parse(std::env::args().skip(1)) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("count: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> io::Result<()> {
    let mut memory: Vec<u64> = (0_u64..).take(arguments.words).map(first).collect();
    let mut log = File::create(&arguments.log)?;
    let (mut checksum, mut written) = (0, FNV_OFFSET);
    for step in 0..arguments.steps {
        checksum = advance(&mut memory, step);
        let line = format!("{step} {checksum:016x}\n");
        log.write_all(line.as_bytes())?;
        written = fnv(written, line.as_bytes());
        io::stdout().write_all(line.as_bytes())?;
        thread::sleep(arguments.pace);
    }
    verify(arguments, &memory, written)?;
    let (steps, mib) = (arguments.steps, arguments.words >> 17);
    writeln!(
        io::stdout(),
        "verified: {steps} steps, {mib} MiB of memory and the log are right: {checksum:016x}"
    )
}

/// Initial value of word `index`.
fn first(index: u64) -> u64 {
    (index ^ (index >> 31)).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// Value of a word after a step. Steps do not commute, and none can be skipped.
fn next(word: u64, index: u64, step: u64) -> u64 {
    (word ^ (word >> 29))
        .wrapping_mul(0xD134_2543_DE82_EF95)
        .wrapping_add(index ^ (step << 40))
}

/// Continues FNV-1a over bytes of the log.
fn fnv(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
    })
}

/// Performs one step over all memory and returns its checksum. The checksum depends on
/// the position of each word; its factors are odd, so that no change of one word cancels.
fn advance(memory: &mut [u64], step: u64) -> u64 {
    (0_u64..).zip(memory).fold(0, |sum: u64, (index, word)| {
        *word = next(*word, index, step);
        sum.wrapping_add(word.wrapping_mul(2 * index + 1))
    })
}

fn verify(arguments: &Arguments, memory: &[u64], written: u64) -> io::Result<()> {
    let steps = arguments.steps;
    let replayed = (REPLAYED_WORD_STEPS_MAX / steps).max(1);
    let stride = (memory.len() as u64).div_ceil(replayed);
    for (index, &word) in (0_u64..).zip(memory) {
        if index % stride != 0 {
            continue;
        }
        let right = (0..steps).fold(first(index), |word, step| next(word, index, step));
        if word != right {
            return Err(io::Error::other(format!(
                "WRONG: word {index} is {word:016x}, must be {right:016x}"
            )));
        }
    }
    if fnv(FNV_OFFSET, &fs::read(&arguments.log)?) != written {
        return Err(io::Error::other("WRONG: the log is not what was written"));
    }
    Ok(())
}
