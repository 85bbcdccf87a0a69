//! Tests that run the corpus without the fuzzer, and the generator of its seeds.

use std::fs;
use std::path::{Path, PathBuf};

use super::{TARGETS, Target};

/// The limit on the size of the corpus, which keeps a clone small.
const CORPUS_BYTES_MAX: u64 = 500 << 10;

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus")
}

fn inputs((name, _): &Target) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = corpus().join(name);
    let mut paths: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.sort();
    paths
        .into_iter()
        .map(|path| (path.clone(), fs::read(path).unwrap()))
        .collect()
}

#[test]
fn corpus_breaks_nothing_and_valid_inputs_are_accepted() {
    let (mut sum, mut refused) = (0, Vec::new());
    for target in &TARGETS {
        let inputs = inputs(target);
        let is_valid = |path: &Path| {
            let name = path.file_name().unwrap().to_str().unwrap();
            name.starts_with("valid")
        };
        assert!(
            inputs.iter().any(|(path, _)| is_valid(path)),
            "{}",
            target.0
        );
        for (path, bytes) in inputs {
            sum += bytes.len() as u64;
            if !(target.1)(&bytes) && is_valid(&path) {
                refused.push(path);
            }
        }
    }
    assert!(refused.is_empty(), "{refused:#?}");
    assert!(sum < CORPUS_BYTES_MAX, "{sum}");
}

#[test]
fn valid_inputs_cut_short_break_nothing() {
    for target in &TARGETS {
        for (_, bytes) in inputs(target) {
            for len in [0, 1, bytes.len() / 2, bytes.len().saturating_sub(1)] {
                // The input may be accepted or rejected.
                let _ = (target.1)(&bytes[..len.min(bytes.len())]);
            }
        }
    }
}

/// Writes the seeds of the store's formats, taken from stores that earlier versions wrote. The other seeds are real
/// messages and files, maintained manually.
#[test]
#[ignore = "writes into the source tree, once a format"]
fn write_seeds() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    for folder in fs::read_dir(fixtures).unwrap() {
        let folder = folder.unwrap().path();
        let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
        for (letter, seed, bytes) in crate::store::tests::fuzz_store::seeds(&folder) {
            let target = if letter == 'c' { "pack" } else { "manifest" };
            let path = corpus().join(target).join(format!("{seed}-{name}"));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, [&[letter as u8][..], &bytes].concat()).unwrap();
        }
    }
}

#[test]
#[ignore = "writes into the source tree, once a format"]
fn write_seeds_of_portable_files() {
    let portable = crate::store::tests::fuzz_store::portable_seed();
    for (letter, seed) in [(b'p', "valid-portable"), (b'q', "valid-portable-resealed")] {
        let bytes = [&[letter][..], &portable].concat();
        fs::write(corpus().join("pack").join(seed), bytes).unwrap();
    }
}
