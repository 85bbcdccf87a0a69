//! Cost of encryption: the same images are written to and read from a plain and an encrypted store, alternately.
//!
//! ```text
//! cargo bench --bench seal -- [FOLDER] [FILE]...
//! ```
//! The data are generated tensors, text and noise, and the named files. There is one worker. The CPU time of the whole
//! process is measured, so that neither the disk nor other processes count; the median round is reported.

#[path = "codec/data.rs"]
mod data;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

// `CHUNK_BYTES` is used by `data`.
use ckpt_run::store::{ImageId, Key, Store, StoreLock, WriteOptions};
use nix::time::{ClockId, clock_gettime};

/// Number of rounds; odd, so that the median is one of them.
const ROUNDS: usize = 21;
const OPTIONS: WriteOptions = WriteOptions {
    buffer: 1 << 30,
    workers: 1,
    level: 1,
};

/// CPU time of a round in seconds.
#[derive(Clone, Copy, Default)]
struct Cost {
    write: f64,
    read: f64,
    stored: u64,
}

fn main() -> Result<(), Box<dyn Error>> {
    // Cargo adds `--bench`.
    let mut arguments = std::env::args().skip(1).filter(|word| word != "--bench");
    let folder = arguments
        .next()
        .map_or_else(std::env::temp_dir, PathBuf::from);
    let mut inputs = data::generated()?;
    for file in arguments {
        inputs.push((file.clone(), data::of_file(&file)?));
    }
    println!("median of {ROUNDS} rounds, CPU time, one worker, GB = 10^9 bytes\n");
    println!(
        "{:28} {:>6} {:>8} {:>8} {:>7} {:>8} {:>8} {:>7}",
        "", "ratio", "write", "sealed", "cost", "read", "sealed", "cost"
    );
    let key = Key::generate()?;
    for (name, bytes) in inputs {
        let mut plain = Vec::new();
        let mut sealed = Vec::new();
        for _ in 0..ROUNDS {
            plain.push(round(&folder, None, &bytes)?);
            sealed.push(round(&folder, Some(&key), &bytes)?);
        }
        report(&name, bytes.len(), &plain, &sealed);
    }
    Ok(())
}

/// Writes an image into a new store and reads it.
fn round(folder: &Path, key: Option<&Key>, bytes: &[u8]) -> Result<Cost, Box<dyn Error>> {
    let place = tempfile::tempdir_in(folder)?;
    let store = Store::create_or_open_with(&place.path().join("store"), key)?;
    let lock = store.lock()?;
    let begun = cpu_time()?;
    let (image, stored) = write(&store, &lock, bytes)?;
    let written = cpu_time()?;
    store.read(image)?.copy_to("data", &mut std::io::sink())?;
    Ok(Cost {
        write: written - begun,
        read: cpu_time()? - written,
        stored,
    })
}

fn write(store: &Store, lock: &StoreLock, bytes: &[u8]) -> Result<(ImageId, u64), Box<dyn Error>> {
    let writer = store.begin(lock, OPTIONS)?;
    writer.start_workers();
    let mut stream = writer.stream("data")?;
    stream.write_all(bytes)?;
    stream.finish()?;
    let manifest = writer.commit(b"")?;
    Ok((manifest.id, manifest.stored_bytes))
}

fn report(name: &str, len: usize, plain: &[Cost], sealed: &[Cost]) {
    #[expect(clippy::cast_precision_loss, reason = "a report")]
    let ratio = len as f64 / plain[0].stored as f64;
    #[expect(clippy::cast_precision_loss, reason = "a report")]
    let speed = |seconds: f64| len as f64 / 1e9 / seconds;
    print!("{name:28} {ratio:6.2}");
    for part in [(|cost| cost.write) as fn(&Cost) -> f64, |cost| cost.read] {
        let (plain, sealed) = (median(plain, part), median(sealed, part));
        let cost = 100.0 * (sealed / plain - 1.0);
        print!(" {:8.2} {:8.2} {cost:6.1}%", speed(plain), speed(sealed));
    }
    println!();
}

fn median(costs: &[Cost], part: fn(&Cost) -> f64) -> f64 {
    let mut seconds: Vec<f64> = costs.iter().map(part).collect();
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// Returns the process's CPU time in seconds.
fn cpu_time() -> nix::Result<f64> {
    let time = clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID)?;
    Ok(Duration::from(time).as_secs_f64())
}
