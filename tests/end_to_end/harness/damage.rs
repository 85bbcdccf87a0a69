use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use ckpt_run::store::{Content, ImageId, Store, Stream};

use super::Place;

/// Flips a bit of the byte at an offset of a file.
pub fn flip(path: &Path, at: u64) {
    let file = File::options().read(true).write(true).open(path);
    let file = file.expect("opens");
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("read");
    file.write_all_at(&[byte[0] ^ 1], at).expect("written");
}

/// Flips a bit in a chunk of the wanted streams that no earlier image has.
pub fn damage(place: &Place, image: &str, is_wanted: impl Fn(&Stream) -> bool) {
    let store = Store::open(&place.file(".ckpt-run")).expect("a store");
    let image: ImageId = image.parse().expect("an ID");
    let reader = store.read(image).expect("an image");
    let manifest = reader.manifest();
    let streams = manifest.streams.iter().filter(|one| is_wanted(one));
    let chunks = streams.flat_map(|stream| &stream.chunks);
    let mut own = chunks.filter_map(|chunk| match manifest.chunks[*chunk as usize].content {
        Content::Stored(stored) => {
            let pack = manifest.packs[stored.pack as usize].name;
            (pack.image == image).then_some((stored, pack))
        }
        Content::Zero => None,
    });
    let (stored, pack) = own.next().expect("a chunk of this image");
    let path = store.path().join("packs").join(pack.to_string());
    flip(&path, stored.offset + u64::from(stored.len) / 2);
}
