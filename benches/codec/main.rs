//! Comparison of the store's codecs with alternatives: bytes saved, and the speed of encoding and decoding on one core,
//! for generated tensors, text, code, noise, and the named files.
//!
//! ```text
//! cargo bench --bench codec -- [FILE]...
//! ```
//! All data are cut into chunks of 64 KiB, a typical length in the store, and zeros in files are left out, as in the
//! store. All candidates run alternately in every round; CPU time is measured, and the median round is reported.

mod candidates;
mod data;

use data::CHUNK_BYTES;
use std::io;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

use candidates::{Candidate, candidates};

/// Number of rounds; odd, so that the median is one of them.
const ROUNDS: usize = 7;

fn main() -> io::Result<()> {
    // Cargo adds `--bench`.
    let files: Vec<_> = std::env::args()
        .skip(1)
        .filter(|a| a != "--bench")
        .collect();
    println!("{}", machine());
    println!(
        "median of {ROUNDS} rounds, CPU time of one thread, chunks of 64 KiB, GB = 10^9 bytes\n"
    );
    for (name, bytes) in data::generated()? {
        compare(&name, &bytes)?;
    }
    for file in files {
        let name = file.rsplit('/').next().unwrap_or(&file).to_owned();
        compare(&name, &data::of_file(&file)?)?;
    }
    Ok(())
}

fn compare(name: &str, bytes: &[u8]) -> io::Result<()> {
    println!("{name}, {} KiB", bytes.len() >> 10);
    println!(
        "  {:28} {:>7} {:>7} {:>7} {:>7}",
        "", "saved", "ratio", "GB/s in", "out"
    );
    let mut candidates = candidates()?;
    let mut results: Vec<Result> = candidates.iter().map(|_| Result::default()).collect();
    for _ in 0..ROUNDS {
        for (candidate, result) in candidates.iter_mut().zip(&mut results) {
            round(candidate.as_mut(), bytes, result)?;
        }
    }
    for (candidate, result) in candidates.iter().zip(&mut results) {
        let saved = 100.0 * (bytes.len_f64() - result.stored) / bytes.len_f64();
        println!(
            "  {:28} {saved:6.1}% {:7.3} {:7.2} {:7.2}  {}",
            candidate.name(),
            bytes.len_f64() / result.stored,
            speed(bytes, &mut result.encode),
            speed(bytes, &mut result.decode),
            candidate.remarks(),
        );
    }
    println!();
    Ok(())
}

#[derive(Default)]
struct Result {
    stored: f64,
    encode: Vec<Duration>,
    decode: Vec<Duration>,
}

fn round(candidate: &mut dyn Candidate, bytes: &[u8], result: &mut Result) -> io::Result<()> {
    let mut stored_sum = 0.0;
    let (mut encode, mut decode) = (Duration::ZERO, Duration::ZERO);
    let mut back = vec![0; CHUNK_BYTES];
    for raw in bytes.chunks(CHUNK_BYTES) {
        let back = &mut back[..raw.len()];
        let begin = now()?;
        let len = candidate.encode(raw)?;
        let encoded = now()?;
        candidate.decode(back)?;
        decode += now()?.saturating_sub(encoded);
        encode += encoded.saturating_sub(begin);
        assert!(back == raw, "{} gives other bytes back", candidate.name());
        // No store keeps a stored form that is longer than the chunk.
        stored_sum += raw[..len.min(raw.len())].len_f64();
    }
    result.stored = stored_sum;
    result.encode.push(encode);
    result.decode.push(decode);
    Ok(())
}

fn now() -> io::Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?.into())
}

fn speed(bytes: &[u8], rounds: &mut [Duration]) -> f64 {
    rounds.sort_unstable();
    bytes.len_f64() / rounds[rounds.len() / 2].as_secs_f64() / 1e9
}

trait LenF64 {
    fn len_f64(&self) -> f64;
}

impl LenF64 for [u8] {
    fn len_f64(&self) -> f64 {
        u32::try_from(self.len()).map_or(f64::MAX, f64::from)
    }
}

fn machine() -> String {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("unknown", |(_, model)| model);
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    format!("{cpus} CPUs, {model}")
}
