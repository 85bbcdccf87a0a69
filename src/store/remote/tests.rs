//! Tests of images in object storage, with a folder of files as the storage.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::bucket::{Bucket, Created};
use super::download;
use super::image_object::RemoteImage;
use super::upload::Uploads;
use crate::store::format::codec::tests::noise;
use crate::store::tests::old_formats;
use crate::store::tests::support::{names, packs, read_stream, temporary_store, write_image};
use crate::store::*;

const LIMIT: Duration = Duration::from_secs(60);
const TENURE: u64 = 3;

/// A store, and object storage.
struct Scene {
    folder: tempfile::TempDir,
    store: Store,
    bucket: Bucket,
}

impl Scene {
    fn new() -> Self {
        let (folder, store) = temporary_store();
        fs::create_dir(folder.path().join("bucket")).unwrap();
        let url = format!("file://{}/bucket/run", folder.path().display());
        let bucket = Bucket::open(&url, LIMIT).unwrap();
        Self {
            folder,
            store,
            bucket,
        }
    }

    fn objects(&self, kind: &str) -> Vec<String> {
        let folder = self.folder.path().join("bucket/run").join(kind);
        if folder.exists() {
            names(&folder)
        } else {
            Vec::new()
        }
    }

    fn object(&self, name: &str) -> PathBuf {
        self.folder.path().join("bucket/run").join(name)
    }

    fn begin(&self, images: &[RemoteImage]) -> Uploads {
        Uploads::begin(&self.bucket, TENURE, images, self.store.secrets(), None).unwrap()
    }

    fn upload(&self, uploads: &mut Uploads, id: ImageId) -> (RemoteImage, u64) {
        let sent = ByteCounter::default();
        let image = uploads.upload(&self.store, id, &[], &sent).unwrap();
        (image, sent.bytes())
    }
}

/// Streams of every codec, of zeros, and of chunks that occur twice; longer than a pack.
fn contents() -> Vec<(&'static str, Vec<u8>)> {
    let text = "some text, which can be compressed; ".repeat(40_000);
    let random = noise(1, 35 << 20);
    vec![
        ("pages-1.img", [&random[..], text.as_bytes()].concat()),
        ("core-1.img", text.into_bytes()),
        ("again", random[..3 * CHUNK_BYTES].to_vec()),
        ("zeros", vec![0; 2 * CHUNK_BYTES]),
        ("short", b"x".to_vec()),
        ("empty", Vec::new()),
    ]
}

fn write(store: &Store, contents: &[(&str, Vec<u8>)]) -> ImageId {
    let lock = store.lock().unwrap();
    let streams: Vec<(&str, &[u8])> = contents.iter().map(|(n, b)| (*n, &b[..])).collect();
    write_image(store, &lock, &streams).id
}

fn create(path: &Path, key: Option<&Key>) -> Store {
    Store::create_or_open_with(path, key).unwrap()
}

/// Offers an image to a store under its next number.
fn offer(
    bucket: &Bucket,
    image: &RemoteImage,
    store: &Store,
    lock: &StoreLock,
) -> Result<ImageId, RemoteError> {
    let id = download::next_number(image, None, store)?;
    download::offer(bucket, image, id, store, lock).map(|()| id)
}

/// Waits until a download is an ordinary image.
fn complete(store: &Store, id: ImageId) {
    store.start_download(id).unwrap();
    while store.pending.find(id).is_some() {
        std::thread::yield_now();
    }
}

#[test]
fn an_image_comes_back_equal_in_another_store() {
    let scene = Scene::new();
    let contents = contents();
    let id = write(&scene.store, &contents);
    let (image, _) = scene.upload(&mut scene.begin(&[]), id);
    assert!(scene.objects("packs").len() > 1);

    let other = create(&scene.folder.path().join("other"), None);
    write(&other, &[("earlier", b"image".to_vec())]);
    let lock = other.lock().unwrap();
    let id = offer(&scene.bucket, &image, &other, &lock).unwrap();
    assert_eq!(id.number(), 2);
    // Readable at once, whatever has arrived.
    for (name, content) in &contents {
        assert!(read_stream(&other, id, name) == *content, "{name}");
    }
    complete(&other, id);
    drop((lock, other));
    let again = Store::open(&scene.folder.path().join("other")).unwrap();
    assert_eq!(again.manifest(id).unwrap().meta, b"meta");
    for (name, content) in &contents {
        assert!(read_stream(&again, id, name) == *content, "{name}");
    }
    again.verify(id, &|_, _| {}).unwrap();
}

#[test]
fn retention_withdraws_an_offered_image() {
    let scene = Scene::new();
    let id = write(&scene.store, &[("a", noise(1, 1 << 20))]);
    let (image, _) = scene.upload(&mut scene.begin(&[]), id);
    let other = create(&scene.folder.path().join("other"), None);
    let lock = other.lock().unwrap();
    let [first, second] = [(); 2].map(|()| offer(&scene.bucket, &image, &other, &lock).unwrap());
    assert_eq!((first.number(), second.number()), (1, 2));
    // Reads its part, and creates the file of its pack.
    assert!(read_stream(&other, first, "a") == noise(1, 1 << 20));
    assert_eq!(packs(&other).len(), 1);
    write_image(&other, &lock, &[("b", b"new")]);
    assert_eq!(other.rotate(&lock, 2).unwrap(), [first]);
    let images = other.images().unwrap();
    let numbers: Vec<u64> = images.iter().map(|image| image.id.number()).collect();
    assert_eq!(numbers, [2, 3]);
    assert_eq!(packs(&other).len(), 1, "that of the new image");
}

#[test]
fn an_encrypted_image_needs_its_key_elsewhere() {
    let mut scene = Scene::new();
    let key = |byte| Key::from_bytes(&[byte; 32]);
    scene.store = create(&scene.folder.path().join("sealed"), Some(&key(1)));
    let contents = [("pages-1.img", b"swordfish ".repeat(10_000))];
    let id = write(&scene.store, &contents);
    let (image, _) = scene.upload(&mut scene.begin(&[]), id);
    for pack in scene.objects("packs") {
        let bytes = fs::read(scene.object(&format!("packs/{pack}"))).unwrap();
        assert!(!bytes.windows(9).any(|part| part == b"swordfish"));
    }
    let other = |name: &str, key: Option<&Key>| {
        let store = create(&scene.folder.path().join(name), key);
        let lock = store.lock().unwrap();
        let begun = offer(&scene.bucket, &image, &store, &lock);
        begun.map(|id| read_stream(&store, id, "pages-1.img"))
    };
    assert_eq!(other("same", Some(&key(1))).unwrap(), contents[0].1);
    let refused = other("different", Some(&key(2))).unwrap_err().to_string();
    assert!(refused.contains("sealed with another key"), "{refused}");
    let refused = other("plain", None).unwrap_err().to_string();
    assert!(
        refused.contains("the image is encrypted, but the store is not"),
        "{refused}"
    );
}

#[test]
fn only_new_chunks_are_uploaded() {
    let scene = Scene::new();
    let mut contents = contents();
    let first = write(&scene.store, &contents);
    let mut uploads = scene.begin(&[]);
    let (image, sent) = scene.upload(&mut uploads, first);
    assert!(sent > 35 << 20);
    contents.push(("new", noise(2, 1 << 20)));
    let second = write(&scene.store, &contents);
    let (_, sent) = scene.upload(&mut uploads, second);
    assert!((1 << 20..2 << 20).contains(&sent), "{sent}");
    // Another process knows them, too.
    let (_, sent) = scene.upload(&mut scene.begin(&[image]), second);
    assert!(sent < 2 << 20, "{sent}");
}

#[test]
fn an_interrupted_upload_continues_with_the_missing_packs() {
    let scene = Scene::new();
    let id = write(&scene.store, &contents());
    scene.upload(&mut scene.begin(&[]), id);
    let (packs, images) = (scene.objects("packs"), scene.objects("images"));
    // As if it had been killed before one of the packs was there.
    let missing = [
        format!("images/{}", images[0]),
        format!("packs/{}", packs[0]),
    ];
    let missing = missing.map(|name| scene.object(&name));
    let len: u64 = missing
        .iter()
        .map(|path| fs::metadata(path).unwrap().len())
        .sum();
    for path in &missing {
        fs::remove_file(path).unwrap();
    }
    let (_, sent) = scene.upload(&mut scene.begin(&[]), id);
    assert_eq!(
        (scene.objects("packs"), scene.objects("images")),
        (packs, images)
    );
    assert_eq!(sent, len);
}

#[test]
fn garbage_of_the_remote_store_is_removed() {
    let scene = Scene::new();
    let first = write(
        &scene.store,
        &[("a", noise(1, 1 << 20)), ("b", noise(2, 1 << 20))],
    );
    let second = write(
        &scene.store,
        &[("b", noise(2, 1 << 20)), ("c", noise(3, 1 << 20))],
    );
    let mut uploads = scene.begin(&[]);
    scene.upload(&mut uploads, first);
    let (image, _) = scene.upload(&mut uploads, second);
    // Of an upload that was never completed.
    let stray = "packs/000003-00000000000000000000000000000000";
    assert_eq!(
        scene.bucket.create(stray, "x".into()).unwrap(),
        Created::New
    );
    let mut uploads = scene.begin(std::slice::from_ref(&image));
    uploads
        .remove_garbage(std::slice::from_ref(&image))
        .unwrap();
    assert_eq!(scene.objects("images").len(), 1);
    assert_eq!(scene.objects("packs").len(), 2, "the first one has b");

    // What is gone is uploaded again.
    let third = write(
        &scene.store,
        &[("a", noise(1, 1 << 20)), ("d", noise(4, 1 << 20))],
    );
    let (image, _) = scene.upload(&mut uploads, third);
    let images = std::slice::from_ref(&image);
    uploads.remove_garbage(images).unwrap();
    let other = create(&scene.folder.path().join("other"), None);
    let lock = other.lock().unwrap();
    let id = offer(&scene.bucket, &image, &other, &lock).unwrap();
    assert!(read_stream(&other, id, "a") == noise(1, 1 << 20));
    assert!(read_stream(&other, id, "d") == noise(4, 1 << 20));
}

#[test]
fn a_damaged_chunk_of_the_store_is_not_uploaded() {
    let scene = Scene::new();
    let id = write(&scene.store, &[("a", noise(1, 1 << 20))]);
    // In the oldest format, chunks have no checks.
    let oldest = scene.folder.path().join("oldest");
    old_formats::copy(&old_formats::folder("1"), &oldest);
    let oldest = Store::open(&oldest).unwrap();
    for (store, id) in [(&scene.store, id), (&oldest, ImageId::FIRST)] {
        let pack = store.packs_folder().join(&packs(store)[0]);
        let good = fs::read(&pack).unwrap();
        let mut bad = good.clone();
        bad[1000] ^= 1;
        fs::write(&pack, bad).unwrap();
        let sent = ByteCounter::default();
        let error = scene.begin(&[]).upload(store, id, &[], &sent).unwrap_err();
        assert!(error.to_string().contains("damaged"), "{error}");
        assert!(scene.objects("images").is_empty());
        fs::write(&pack, good).unwrap();
    }
    let sent = ByteCounter::default();
    let image = scene.begin(&[]).upload(&oldest, ImageId::FIRST, &[], &sent);
    let other = create(&scene.folder.path().join("other"), None);
    let lock = other.lock().unwrap();
    let id = offer(&scene.bucket, &image.unwrap(), &other, &lock).unwrap();
    let stream = read_stream(&oldest, ImageId::FIRST, "pages-1.img");
    assert!(read_stream(&other, id, "pages-1.img") == stream);
}

#[test]
fn damaged_objects_are_refused_and_leave_no_image() {
    let scene = Scene::new();
    let id = write(&scene.store, &[("a", noise(1, 1 << 20))]);
    let (image, _) = scene.upload(&mut scene.begin(&[]), id);
    let pack = scene.object(&format!("packs/{}", scene.objects("packs")[0]));
    let good = fs::read(&pack).unwrap();
    let mut bad = good.clone();
    bad[500_000] ^= 1;
    for (number, content) in [&bad[..], &good[..1000], &[]].into_iter().enumerate() {
        fs::write(&pack, content).unwrap();
        let store = create(&scene.folder.path().join(number.to_string()), None);
        let lock = store.lock().unwrap();
        let id = offer(&scene.bucket, &image, &store, &lock).unwrap();
        let error = store
            .read(id)
            .unwrap()
            .read_to_vec("a", u64::MAX)
            .unwrap_err();
        assert!(!error.is_damage(), "another attempt may succeed: {error}");
        drop((lock, store));
        let store = Store::open(&scene.folder.path().join(number.to_string())).unwrap();
        assert!(store.images().unwrap().is_empty());
        store.sweep(&store.lock().unwrap()).unwrap();
        assert!(packs(&store).is_empty());
    }
    fs::write(&pack, &good).unwrap();
    let object = scene.object(&image.object);
    let mut manifest = fs::read(&object).unwrap();
    let end = manifest.len() - 1;
    manifest[end] ^= 1;
    fs::write(&object, &manifest).unwrap();
    let store = create(&scene.folder.path().join("manifest"), None);
    let lock = store.lock().unwrap();
    let refused = offer(&scene.bucket, &image, &store, &lock).unwrap_err();
    assert!(matches!(refused, RemoteError::Damaged { .. }), "{refused}");
}

#[test]
fn an_accompanying_file_becomes_a_stream() {
    let scene = Scene::new();
    let id = write(&scene.store, &[("a", b"job".to_vec())]);
    let path = scene.folder.path().join("log");
    fs::write(&path, noise(5, CHUNK_BYTES + 7)).unwrap();
    let file = Arc::new(fs::File::open(&path).unwrap());
    let len = CHUNK_BYTES as u64 + 3;
    let companion = Companion {
        stream: "rest/0".to_owned(),
        path,
        opened: Some((file, len)),
    };
    let sent = ByteCounter::default();
    let mut uploads = scene.begin(&[]);
    let image = uploads
        .upload(&scene.store, id, &[companion], &sent)
        .unwrap();
    let other = create(&scene.folder.path().join("other"), None);
    let lock = other.lock().unwrap();
    let id = offer(&scene.bucket, &image, &other, &lock).unwrap();
    assert!(read_stream(&other, id, "rest/0") == noise(5, CHUNK_BYTES + 7)[..CHUNK_BYTES + 3]);
    assert_eq!(read_stream(&other, id, "a"), b"job");
}

#[test]
fn addresses_are_checked() {
    for bad in [
        "",
        "bucket",
        "ftp://a/b",
        "s3://key:secret@bucket/x",
        "s3://bucket/x?sig=1",
    ] {
        let refused = Bucket::open(bad, LIMIT).unwrap_err();
        assert!(
            matches!(refused, RemoteError::Address { .. }),
            "{bad}: {refused}"
        );
    }
}
