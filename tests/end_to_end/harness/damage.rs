use std::fs::File;
use std::os::unix::fs::FileExt;

use ckpt_run::store::{Content, ImageId, Store, Stream};

use super::Place;

/// Flips a bit in a chunk of the wanted streams that no earlier image has.
pub fn damage(place: &Place, image: &str, is_wanted: impl Fn(&Stream) -> bool) {
    let store = Store::open(&place.file(".ckpt-run")).expect("a store");
    let id: ImageId = image.parse().expect("an ID");
    let reader = store.read(id).expect("an image");
    let manifest = reader.manifest();
    let streams = manifest.streams.iter().filter(|one| is_wanted(one));
    let chunks = streams.flat_map(|stream| &stream.chunks);
    let mut stored = chunks.filter_map(|chunk| match manifest.chunks[*chunk as usize].content {
        Content::Stored(stored) => {
            let pack = manifest.packs[stored.pack as usize].name.to_string();
            pack.starts_with(image).then_some((stored, pack))
        }
        Content::Zero => None,
    });
    let (stored, pack) = stored.next().expect("a chunk of this image");
    let path = store.path().join("packs").join(pack);
    let pack = File::options().read(true).write(true).open(path);
    let pack = pack.expect("a pack");
    let (mut byte, at) = ([0], stored.offset + u64::from(stored.len) / 2);
    pack.read_exact_at(&mut byte, at).expect("read");
    pack.write_all_at(&[byte[0] ^ 1], at).expect("written");
}
