//! Promises of the whole store that hold for any content and any damage.

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::codec::tests::noise;
use super::testing::{names, never, packs, read_stream, temporary_store, write_image};
use super::*;

/// A stream as its pieces: how many bytes of which kind.
fn stream_bytes() -> impl Strategy<Value = Vec<u8>> {
    let piece = (0..4_u8, 0..4_u64, 0..2 * CHUNK_BYTES);
    let pieces = prop::collection::vec(piece, 0..4);
    pieces.prop_map(|pieces| {
        let bytes = pieces.into_iter().map(|(kind, seed, len)| match kind {
            0 => vec![0; len],
            1 => noise(seed, len),
            2 => vec![b'a'; len % 50],
            _ => noise(seed, 64).into_iter().cycle().take(len).collect(),
        });
        bytes.flatten().collect()
    })
}

fn files_of(store: &Store) -> Vec<PathBuf> {
    let folder = |name: &str| {
        let folder = store.path().join(name);
        names(&folder)
            .into_iter()
            .map(move |name| folder.join(name))
    };
    folder("images").chain(folder("packs")).collect()
}

fn damage(path: &Path, at: f64, truncate: bool) {
    let mut bytes = fs::read(path).unwrap();
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss
    )]
    let at = (at * bytes.len() as f64) as usize;
    if truncate {
        bytes.truncate(at);
    } else {
        bytes[at] ^= 1 << (at % 8);
    }
    fs::write(path, bytes).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn random_images_come_back(images in prop::collection::vec(prop::collection::vec(stream_bytes(), 0..5), 1..4)) {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        let mut written = Vec::new();
        for streams in &images {
            let names: Vec<String> = (0..streams.len()).map(|number| format!("s/{number}")).collect();
            let named: Vec<(&str, &[u8])> =
                names.iter().zip(streams).map(|(name, bytes)| (&name[..], &bytes[..])).collect();
            written.push(write_image(&store, &lock, &named).id);
        }
        for (id, streams) in written.iter().zip(&images) {
            store.verify(*id, &never).unwrap();
            for (number, bytes) in streams.iter().enumerate() {
                let read = read_stream(&store, *id, &format!("s/{number}"));
                prop_assert!(&read == bytes);
            }
        }
        let removed = store.rotate(&lock, 1).unwrap();
        prop_assert_eq!(&removed[..], &written[..written.len() - 1]);
        let manifest = store.manifest(written[removed.len()]).unwrap();
        let mut named: Vec<String> = manifest.packs.iter().map(|pack| pack.name.to_string()).collect();
        named.sort();
        prop_assert_eq!(packs(&store), named);
        store.verify(manifest.id, &never).unwrap();
    }

    #[test]
    fn damage_is_found_and_never_handed_out(
        streams in prop::collection::vec(stream_bytes(), 1..4),
        file: prop::sample::Index,
        at in 0.0..1.0,
        truncate: bool,
    ) {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        let names: Vec<String> = (0..streams.len()).map(|number| number.to_string()).collect();
        let named: Vec<(&str, &[u8])> =
            names.iter().zip(&streams).map(|(name, bytes)| (&name[..], &bytes[..])).collect();
        let id = write_image(&store, &lock, &named).id;
        let files = files_of(&store);
        damage(file.get::<PathBuf>(&files), at, truncate);
        let verified = store.verify(id, &never);
        let mut found = false;
        for (name, bytes) in &named {
            let mut sink = Vec::new();
            let result = store.read(id).and_then(|reader| reader.copy_to(name, &mut sink));
            // What is handed out is right, up to where the damage begins.
            prop_assert!(bytes.starts_with(&sink));
            match result {
                Ok(len) => prop_assert_eq!(len, bytes.len() as u64),
                Err(error) => {
                    prop_assert!(error.is_damage());
                    found = true;
                }
            }
        }
        prop_assert!(verified.is_err());
        prop_assert!(found || verified.is_err());
    }
}
