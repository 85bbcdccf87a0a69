//! Tests of the whole store from outside its modules.

use std::fs;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};

use super::support::{OPTIONS, never, packs, place_of, read_stream, temporary_store, write_image};
use crate::store::format::chunk::ZEROS;
use crate::store::format::codec::tests::noise;
use crate::store::*;

#[test]
fn image_round_trips_byte_for_byte() {
    let (_folder, store) = temporary_store();
    let lock = store.lock().unwrap();
    let mut large = noise(1, 3 * CHUNK_BYTES + 77);
    large.extend_from_slice(&ZEROS);
    large.extend(b"the same again ".repeat(40_000));
    let streams: [(&str, &[u8]); 4] = [
        ("pages-1.img", &large),
        ("empty", &[]),
        ("zeros", &ZEROS[..1000]),
        ("files/0/log", b"line\n"),
    ];
    let manifest = write_image(&store, &lock, &streams);
    assert_eq!(manifest.id.to_string(), "000001");
    assert_eq!(manifest, store.manifest(manifest.id).unwrap());
    let reader = store.read(manifest.id).unwrap();
    for (name, bytes) in streams {
        assert!(reader.contains(name));
        assert!(
            reader.read_to_vec(name, bytes.len() as u64).unwrap() == bytes,
            "{name}"
        );
    }
    assert!(!reader.contains("other"));
    let verified = store.verify(manifest.id, &never).unwrap();
    assert_eq!(verified.raw_bytes, manifest.raw_bytes);
    let entry = store.images().unwrap().remove(0);
    assert_eq!(
        (entry.raw_bytes, entry.stored_bytes),
        (manifest.raw_bytes, manifest.stored_bytes)
    );
    assert_eq!((entry.meta, entry.damaged), (b"meta".to_vec(), None));
    let on_disk: u64 = packs(&store)
        .iter()
        .map(|name| {
            store
                .path()
                .join("packs")
                .join(name)
                .metadata()
                .unwrap()
                .len()
        })
        .sum();
    assert_eq!(on_disk, manifest.stored_bytes);
}

#[test]
fn zeros_and_known_chunks_are_not_stored() {
    let (_folder, store) = temporary_store();
    let lock = store.lock().unwrap();
    let zeros = vec![0; 10 * CHUNK_BYTES + 5];
    let data = noise(1, 2 * CHUNK_BYTES);
    let first = write_image(&store, &lock, &[("z", &zeros), ("a", &data), ("b", &data)]);
    let zero = |chunk: &&Chunk| chunk.content == Content::Zero;
    let lens: Vec<u32> = first
        .chunks
        .iter()
        .filter(zero)
        .map(|chunk| chunk.raw_len)
        .collect();
    assert_eq!(lens.len(), 2, "{lens:?}");
    assert!(first.stored_bytes < data.len() as u64 + 100);
    let second = write_image(&store, &lock, &[("c", &data)]);
    assert_eq!(second.stored_bytes, 0);
    assert_eq!(read_stream(&store, second.id, "c"), data);
    store.rotate(&lock, 1).unwrap();
    assert_eq!(read_stream(&store, second.id, "c"), data);
}

#[test]
fn a_stream_of_an_earlier_image_is_taken_over_unread() {
    let (_folder, store) = temporary_store();
    let lock = store.lock().unwrap();
    let bytes = [&noise(1, 2 * CHUNK_BYTES + 77)[..], &ZEROS].concat();
    let earlier = write_image(&store, &lock, &[("a", &bytes), ("b", b"b")]);
    let writer = store.begin(&lock, OPTIONS).unwrap();
    assert!(writer.take_over(&earlier, "a").unwrap());
    assert!(writer.take_over(&earlier, "a").is_err(), "a second time");
    assert!(!writer.take_over(&earlier, "none").unwrap());
    assert_eq!(writer.taken().bytes(), 0);
    let taken = writer.commit(b"meta").unwrap();
    let len = bytes.len() as u64;
    assert_eq!((taken.raw_bytes, taken.stored_bytes), (len, 0));
    store.rotate(&lock, 1).unwrap();
    assert!(read_stream(&store, taken.id, "a") == bytes);
    // A pack is damaged.
    fs::write(store.pack_file(place_of(&taken, "a").0), "").unwrap();
    let writer = store.begin(&lock, OPTIONS).unwrap();
    assert!(!writer.take_over(&taken, "a").unwrap());
}

#[test]
fn an_image_of_several_packs_reads_and_rotates() {
    let (_folder, store) = temporary_store();
    let lock = store.lock().unwrap();
    let data = noise(3, 8 << 20);
    let manifest = write_image(&store, &lock, &[("a", &data)]);
    assert!(manifest.packs.len() >= 4, "{:?}", manifest.packs);
    assert_eq!(packs(&store).len(), manifest.packs.len());
    assert!(read_stream(&store, manifest.id, "a") == data);
    write_image(&store, &lock, &[("a", b"new")]);
    store.rotate(&lock, 1).unwrap();
    assert_eq!(packs(&store).len(), 1);
}

#[test]
fn more_streams_than_buffers_are_written_at_once() {
    let (_folder, store) = temporary_store();
    let lock = store.lock().unwrap();
    let options = WriteOptions {
        buffer: 2 * CHUNK_BYTES as u64,
        ..OPTIONS
    };
    let writer = store.begin(&lock, options).unwrap();
    writer.reserve(u64::MAX);
    let barrier = std::sync::Barrier::new(20);
    std::thread::scope(|scope| {
        for number in 0..20_u64 {
            let (writer, barrier) = (&writer, &barrier);
            scope.spawn(move || {
                let mut stream = writer.stream(&format!("s{number}")).unwrap();
                // All streams hold half a chunk before any of them continues.
                stream.write_all(&noise(number, CHUNK_BYTES / 2)).unwrap();
                barrier.wait();
                stream
                    .copy_from(&mut &noise(number, 3 * CHUNK_BYTES)[..])
                    .unwrap();
                stream.finish().unwrap();
            });
        }
    });
    let raw = 20 * 7 * CHUNK_BYTES as u64 / 2;
    writer.start_workers();
    let manifest = writer.commit(b"").unwrap();
    assert_eq!(manifest.raw_bytes, raw);
    for number in 0..20 {
        let read = read_stream(&store, manifest.id, &format!("s{number}"));
        assert!(
            read[CHUNK_BYTES / 2..] == noise(number, 3 * CHUNK_BYTES),
            "{number}"
        );
    }
}

#[test]
fn image_number_is_not_reused_while_anything_refers_to_it() {
    let (_folder, store) = temporary_store();
    let lock = store.lock().unwrap();
    fs::write(store.path().join("images/000007.damaged"), "x").unwrap();
    assert_eq!(
        store.begin(&lock, OPTIONS).unwrap().id().to_string(),
        "000008"
    );
    fs::write(store.path().join("packs/000009-03.pack"), "x").unwrap();
    assert_eq!(
        store.begin(&lock, OPTIONS).unwrap().id().to_string(),
        "000010"
    );
    for (newest, next) in [(3, "000010"), (12, "000013")] {
        let writer = store.begin_after(&lock, OPTIONS, ImageId::new(newest));
        assert_eq!(writer.unwrap().id().to_string(), next);
    }
    fs::write(store.path().join("packs/999999999999-00.pack"), "x").unwrap();
    assert!(matches!(
        store.begin(&lock, OPTIONS),
        Err(WriteError::NumbersExhausted)
    ));
}

#[test]
fn an_image_that_is_removed_while_it_is_read_stays_readable() {
    let (_folder, store) = temporary_store();
    let lock = store.lock().unwrap();
    let data = noise(1, 4 << 20);
    let image = write_image(&store, &lock, &[("a", &data)]);
    let reader = store.read(image.id).unwrap();
    write_image(&store, &lock, &[("a", b"new")]);
    store.rotate(&lock, 1).unwrap();
    assert!(store.read(image.id).is_err());
    assert!(reader.read_to_vec("a", u64::MAX).unwrap() == data);
}

#[test]
fn verification_reports_its_progress() {
    let (_folder, store) = temporary_store();
    let lock = store.lock().unwrap();
    let image = write_image(&store, &lock, &[("a", &noise(1, 5 * CHUNK_BYTES))]);
    let last = AtomicU64::new(0);
    let progress = |done, total| {
        assert_eq!(total, 5 * CHUNK_BYTES as u64);
        let step = done - last.swap(done, Ordering::SeqCst);
        assert!((1..=CHUNK_BYTES as u64).contains(&step), "{step}");
    };
    let verified = store.verify(image.id, &progress).unwrap();
    assert_eq!(
        (verified.chunks, verified.chunk_bytes),
        (image.chunks.len() as u64, last.into_inner())
    );
}

#[test]
fn a_pipe_copied_in_lanes_gives_the_same_bytes() {
    for extra in [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES] {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        let writer = store.begin(&lock, OPTIONS).unwrap();
        writer.start_workers();
        let mut bytes = noise(7, 9 * CHUNK_BYTES + 4096);
        bytes.extend_from_slice(&ZEROS);
        bytes.extend_from_slice(&ZEROS);
        bytes.extend(noise(8, 3 * CHUNK_BYTES + extra));
        let (source, mut sink) = io::pipe().unwrap();
        let source = fs::File::from(std::os::fd::OwnedFd::from(source));
        std::thread::scope(|scope| {
            // Odd sizes, so that pages of the pipe are not full.
            scope.spawn(|| {
                for piece in bytes.chunks(70_001) {
                    sink.write_all(piece).unwrap();
                }
                drop(sink);
            });
            let mut stream = writer.stream("pages").unwrap();
            let copied = stream.copy_from_pipe(&source, 3).unwrap();
            assert_eq!(copied, bytes.len() as u64);
            assert_eq!(stream.finish().unwrap(), copied);
        });
        let manifest = writer.commit(b"").unwrap();
        assert!(
            read_stream(&store, manifest.id, "pages") == bytes,
            "{extra}"
        );
    }
}

/// Returns the bytes that this thread has read from files so far.
fn bytes_read() -> u64 {
    let account = fs::read_to_string("/proc/thread-self/io").unwrap();
    let line = account
        .lines()
        .find_map(|line| line.strip_prefix("rchar: "));
    line.unwrap().parse().unwrap()
}

#[test]
fn listing_and_beginning_read_no_bodies_of_manifests() {
    let (_folder, store) = temporary_store();
    let lock = store.lock().unwrap();
    let data = noise(1, 20 * CHUNK_BYTES);
    let mut manifest = write_image(&store, &lock, &[("a", &data)]);
    // Body length for an image of 10 GiB in chunks of 74 KiB.
    let body_len = 8 << 20;
    for _ in 0..1000 {
        manifest.id = manifest.id.next().unwrap();
        let path = store.manifest_file(manifest.id);
        crate::store::format::manifest_file::tests::write_without_body(&path, &manifest, body_len);
    }
    let begun = std::time::Instant::now();
    let before = bytes_read();
    let opened = Store::open(store.path()).unwrap();
    assert_eq!(opened.images().unwrap().len(), 1001);
    let read = bytes_read() - before;
    assert!(read < 1001 * 4096, "{read}");
    println!(
        "listed 1001 images in {:?}, {read} bytes read",
        begun.elapsed()
    );
    let newest = write_image(&store, &lock, &[("a", &data)]);
    let before = bytes_read();
    drop(store.begin(&lock, OPTIONS).unwrap());
    let read = bytes_read() - before;
    assert!(read < 5 * body_len, "{read}");
    assert_eq!(newest.id.number(), 1002);
}
