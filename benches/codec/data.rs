//! Typical contents of images, generated in the same way each time, or read from files.

use std::fs;
use std::io;
use std::path::PathBuf;

/// Typical length of a chunk in an image.
pub const CHUNK_BYTES: usize = 64 * 1024;
const BYTES: usize = 8 << 20;
/// Maximum number of measured bytes of a file, taken from positions throughout it.
const FILE_BYTES_MAX: usize = 64 << 20;

pub fn generated() -> io::Result<Vec<(String, Vec<u8>)>> {
    let noise = noise(BYTES);
    let weights: Vec<f64> = normal(1).map(|x| x * 0.02).collect();
    let float32 = narrowed(&weights, BYTES);
    let bfloat16 = bfloat16(&weights);
    let text = text()?;
    let code = code()?;
    let mixed = [&float32[..], &text, &noise, &bfloat16, &code]
        .iter()
        .flat_map(|kind| kind.chunks(80_000).take(20))
        .flatten()
        .copied()
        .collect();
    // Spread over decades, like moments of parameters with gradients of all sizes.
    let spread = normal(2).zip(normal(3));
    let moments: Vec<f64> = spread
        .map(|(x, y)| x * x * (4.0 * y).exp() * 1e-8)
        .collect();
    Ok(vec![
        ("float32 weights, N(0, 0.02)".into(), float32),
        ("bfloat16 weights, N(0, 0.02)".into(), bfloat16),
        ("float16 weights, N(0, 0.02)".into(), float16(&weights)),
        ("int8 weights".into(), int8(&weights)),
        ("float32 second moments".into(), narrowed(&moments, BYTES)),
        ("float64, N(0, 0.02)".into(), float64(&weights)),
        ("noise".into(), noise),
        ("text".into(), text),
        ("machine code (this program)".into(), code),
        ("pieces of 80 kB of all of them".into(), mixed),
    ])
}

pub fn of_file(path: &str) -> io::Result<Vec<u8>> {
    let bytes = fs::read(path)?;
    let chunks: Vec<_> = bytes
        .chunks(CHUNK_BYTES)
        .filter(|chunk| chunk.iter().any(|byte| *byte != 0))
        .collect();
    let step = (chunks.len() * CHUNK_BYTES).div_ceil(FILE_BYTES_MAX).max(1);
    Ok(chunks
        .into_iter()
        .step_by(step)
        .flatten()
        .copied()
        .collect())
}

fn noise(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new().finalize_xof().fill(&mut bytes);
    bytes
}

/// Returns an endless sequence of normal numbers, two from two uniform ones (Box and Muller).
fn normal(seed: u8) -> impl Iterator<Item = f64> {
    let mut reader = blake3::Hasher::new().update(&[seed]).finalize_xof();
    std::iter::repeat_with(move || {
        let mut even = || {
            let mut bytes = [0; 4];
            reader.fill(&mut bytes);
            (f64::from(u32::from_le_bytes(bytes)) + 0.5) / 4_294_967_296.0
        };
        let radius = (-2.0 * even().ln()).sqrt();
        let angle = std::f64::consts::TAU * even();
        [radius * angle.cos(), radius * angle.sin()]
    })
    .flatten()
    .take(BYTES / 2)
}

#[expect(clippy::cast_possible_truncation, reason = "that is the type")]
fn narrowed(numbers: &[f64], bytes: usize) -> Vec<u8> {
    numbers[..bytes / 4]
        .iter()
        .flat_map(|x| (*x as f32).to_le_bytes())
        .collect()
}

fn float64(numbers: &[f64]) -> Vec<u8> {
    numbers[..BYTES / 8]
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect()
}

fn bits(numbers: &[f64]) -> impl Iterator<Item = u32> {
    let wide = narrowed(numbers, BYTES * 2);
    (0..wide.len() / 4).map(move |at| {
        u32::from_le_bytes([
            wide[4 * at],
            wide[4 * at + 1],
            wide[4 * at + 2],
            wide[4 * at + 3],
        ])
    })
}

fn bfloat16(numbers: &[f64]) -> Vec<u8> {
    bits(numbers)
        .flat_map(|bits| (bits >> 16).to_le_bytes()[..2].to_owned())
        .collect()
}

/// Truncates instead of rounding; values below the smallest normal number become 0.
fn float16(numbers: &[f64]) -> Vec<u8> {
    bits(numbers)
        .flat_map(|bits| {
            let sign = bits >> 16 & 0x8000;
            let magnitude = (bits & 0x7fff_ffff) >> 13;
            let bits = sign | magnitude.saturating_sub(112 << 10);
            bits.to_le_bytes()[..2].to_owned()
        })
        .collect()
}

#[expect(clippy::cast_possible_truncation, reason = "that is the type")]
fn int8(numbers: &[f64]) -> Vec<u8> {
    let quantised = numbers
        .iter()
        .map(|x| (x / 0.02 * 32.0).clamp(-127.0, 127.0) as i8);
    quantised.flat_map(i8::to_le_bytes).collect()
}

/// Returns the sources of the program.
fn text() -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    let mut folders = vec![PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else {
                text.extend(fs::read(path)?);
            }
        }
    }
    Ok(text)
}

fn code() -> io::Result<Vec<u8>> {
    let mut bytes = fs::read("/proc/self/exe")?;
    bytes.truncate(BYTES);
    Ok(bytes)
}
