//! Tests of images that fail while they are written, and of the other images after the failure.

use std::fs;
use std::io::{self, Read, Write};

use super::support::{OPTIONS, image_files, packs, read_stream, temporary_store, write_image};
use crate::store::format::codec::tests::noise;
use crate::store::format::manifest_file::META_BYTES_MAX;
use crate::store::*;

#[test]
fn an_abandoned_image_leaves_nothing() {
    let (_folder, store) = temporary_store();
    let lock = store.lock().unwrap();
    let writer = store.begin(&lock, OPTIONS).unwrap();
    assert!(matches!(store.begin(&lock, OPTIONS), Err(WriteError::Busy)));
    assert!(matches!(store.rotate(&lock, 1), Err(WriteError::Busy)));
    assert!(matches!(store.sweep(&lock), Err(WriteError::Busy)));
    let mut stream = writer.stream("a").unwrap();
    stream.write_all(&noise(1, 20 << 20)).unwrap();
    assert!(
        !packs(&store).is_empty(),
        "the buffer was full, so packs were begun"
    );
    drop(writer);
    assert_eq!(packs(&store), [""; 0]);
    let error = stream.write_all(&noise(2, CHUNK_BYTES * 2)).unwrap_err();
    assert!(error.to_string().contains("was abandoned"), "{error}");
    drop(stream);
    assert_eq!(image_files(&store), [""; 0]);
    assert_eq!(write_image(&store, &lock, &[]).id.to_string(), "000001");
}

#[test]
fn an_image_with_an_unfinished_stream_is_not_published() {
    let (_folder, store) = temporary_store();
    let lock = store.lock().unwrap();
    let writer = store.begin(&lock, OPTIONS).unwrap();
    let open = writer.stream("open").unwrap();
    let error = writer.commit(b"").unwrap_err();
    assert!(
        matches!(&error, WriteError::StreamUnfinished { stream } if stream == "open"),
        "{error}"
    );
    drop(open);
    let writer = store.begin(&lock, OPTIONS).unwrap();
    drop(writer.stream("dropped").unwrap());
    let error = writer.commit(b"").unwrap_err().to_string();
    assert!(error.contains("\"dropped\" was not finished"), "{error}");
    assert_eq!(image_files(&store), [""; 0]);
}

#[test]
fn a_failing_source_fails_the_image() {
    struct Broken;
    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::ErrorKind::ConnectionReset.into())
        }
    }
    let (_folder, store) = temporary_store();
    let lock = store.lock().unwrap();
    let writer = store.begin(&lock, OPTIONS).unwrap();
    let mut stream = writer.stream("a").unwrap();
    assert!(matches!(
        stream.copy_from(&mut Broken),
        Err(WriteError::Source { .. })
    ));
    drop(stream);
    assert!(writer.stream("b").is_err());
    assert!(writer.commit(b"").is_err());
}

#[test]
fn names_and_meta_out_of_bounds_are_refused() {
    let (_folder, store) = temporary_store();
    let lock = store.lock().unwrap();
    let writer = store.begin(&lock, OPTIONS).unwrap();
    assert!(matches!(
        writer.stream("../x"),
        Err(WriteError::StreamName { .. })
    ));
    writer.stream("a").unwrap().finish().unwrap();
    assert!(matches!(
        writer.stream("a"),
        Err(WriteError::StreamTwice { .. })
    ));
    let error = writer.commit(&vec![0; META_BYTES_MAX + 1]).unwrap_err();
    assert!(matches!(error, WriteError::MetaTooLarge { .. }), "{error}");
}

#[test]
fn meta_of_every_valid_length_round_trips() {
    let folder = tempfile::tempdir().unwrap();
    for key in [None, Some(Key::from_bytes(&[1; 32]))] {
        let path = folder.path().join(format!("store-{}", key.is_some()));
        let store = Store::create_or_open_with(&path, key.as_ref()).unwrap();
        let lock = store.lock().unwrap();
        for len in [20 << 20, META_BYTES_MAX] {
            let meta = noise(1, len);
            let image = store.begin(&lock, OPTIONS).unwrap().commit(&meta).unwrap();
            assert!(store.manifest(image.id).unwrap().meta == meta, "{len}");
            let entry = store.images().unwrap().pop().unwrap();
            assert_eq!((entry.id, &entry.damaged), (image.id, &None));
            assert!(entry.meta == meta, "{len}");
        }
    }
}

#[test]
fn a_full_disk_fails_the_image_and_leaves_the_older_ones() {
    use nix::mount::{MsFlags, mount};
    use nix::sched::{CloneFlags, unshare};
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: only root can mount a small disk");
        return;
    }
    // Only this thread and those it starts see the mount; it disappears with them.
    let test = || {
        let none = None::<&str>;
        let folder = tempfile::tempdir().unwrap();
        if let Err(errno) = unshare(CloneFlags::CLONE_NEWNS) {
            eprintln!("skipped: no mount namespace can be had ({errno})");
            return;
        }
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        let options = Some("size=8m,mode=0700");
        mount(
            Some("tmpfs"),
            folder.path(),
            Some("tmpfs"),
            MsFlags::empty(),
            options,
        )
        .unwrap();
        let store = Store::create_or_open(&folder.path().join("store")).unwrap();
        let lock = store.lock().unwrap();
        let old = noise(1, 1 << 20);
        let image = write_image(&store, &lock, &[("a", &old)]);
        let before = packs(&store);
        let writer = store.begin(&lock, OPTIONS).unwrap();
        let mut stream = writer.stream("a").unwrap();
        let written = stream.copy_from(&mut &noise(2, 32 << 20)[..]);
        let finished = written.and_then(|_| stream.finish());
        let error = finished.and_then(|_| writer.commit(b"")).unwrap_err();
        assert!(error.is_disk_full(), "{error}");
        assert_eq!(packs(&store), before);
        assert!(read_stream(&store, image.id, "a") == old);
        write_image(&store, &lock, &[("a", &noise(3, 1 << 20))]);
        nix::mount::umount2(folder.path(), nix::mount::MntFlags::MNT_DETACH).unwrap();
    };
    std::thread::spawn(test).join().unwrap();
}

#[test]
fn a_lost_pack_is_not_relied_on() {
    let (_folder, store) = temporary_store();
    let lock = store.lock().unwrap();
    let data = noise(1, CHUNK_BYTES);
    let first = write_image(&store, &lock, &[("a", &data)]);
    fs::remove_file(
        store
            .path()
            .join("packs")
            .join(first.packs[0].name.to_string()),
    )
    .unwrap();
    let error = store.read(first.id).unwrap_err();
    assert!(
        matches!(error, ReadError::Pack { .. }) && error.is_damage(),
        "{error}"
    );
    let second = write_image(&store, &lock, &[("a", &data)]);
    assert!(read_stream(&store, second.id, "a") == data);
}

#[test]
fn a_failing_sink_is_not_the_images_fault() {
    struct Full(usize);
    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 = self.0.checked_sub(1).ok_or(io::ErrorKind::BrokenPipe)?;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let (_folder, store) = temporary_store();
    let lock = store.lock().unwrap();
    let image = write_image(&store, &lock, &[("a", &noise(1, 100 * CHUNK_BYTES))]);
    let reader = store.read(image.id).unwrap();
    let error = reader.copy_to("a", &mut Full(20)).unwrap_err();
    assert!(
        matches!(&error, ReadError::Sink(_)) && !error.is_damage(),
        "{error}"
    );
    let error = reader.read_to_vec("a", 1000).unwrap_err();
    assert!(
        matches!(error, ReadError::TooLong { limit: 1000, .. }),
        "{error}"
    );
    assert!(matches!(
        reader.read_to_vec("b", 1),
        Err(ReadError::NoStream { .. })
    ));
}
