//! Tests of archives that no export wrote.

use tar::{Builder, EntryType, Header};

use super::super::super::format::manifest::{Content, Stored};
use super::super::super::format::manifest_file;
use super::super::archive::{ArchiveWriter, BLOCK};
use super::super::{FileDamage, IMAGE, ImportError, MANIFEST_ENTRY, PACK_ENTRY};
use super::{assert_refused, export, import, key, small};
use crate::store::format::store_folder::{Store, format_line};
use crate::store::tests::support::temporary_store;
use crate::store::{Codec, Form, Manifest};

/// Returns the names and contents of a file's entries.
fn entries(file: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut archive = tar::Archive::new(file);
    let entries = archive.entries().unwrap().map(|entry| {
        let mut entry = entry.unwrap();
        let mut content = Vec::new();
        std::io::Read::read_to_end(&mut entry, &mut content).unwrap();
        let name = String::from_utf8(entry.path_bytes().into_owned()).unwrap();
        (name, content)
    });
    entries.collect()
}

/// Builds a file as an export does.
fn archive(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let mut file = Vec::new();
    let mut writer = ArchiveWriter::new(&mut file);
    for (name, content) in entries {
        writer.entry(name, content).unwrap();
    }
    writer.end().unwrap();
    file
}

/// Gives the entry of a header a name that `tar` refuses to write.
fn rename(block: &mut [u8], name: &str) {
    let mut header = Header::new_gnu();
    header.as_mut_bytes().copy_from_slice(block);
    header.as_mut_bytes()[..100].fill(0);
    header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
    header.set_cksum();
    block.copy_from_slice(header.as_bytes());
}

/// Builds a file of this manifest and pack, with correct checksums.
fn forged(manifest: &Manifest, pack: &[u8]) -> Vec<u8> {
    let manifest = manifest_file::encode(manifest, None).unwrap();
    let format = format_line();
    archive(&[
        ("format", format.as_bytes()),
        (MANIFEST_ENTRY, &manifest),
        (PACK_ENTRY, pack),
    ])
}

/// Returns the manifest and the pack of an exported image.
fn parts(store: &Store) -> (Manifest, Vec<u8>) {
    let mut entries = entries(&export(store, small(store), Form::AsStored));
    let (_, pack) = entries.pop().unwrap();
    let (_, manifest) = entries.pop().unwrap();
    (manifest_file::decode(&manifest, IMAGE, None).unwrap(), pack)
}

#[test]
fn entries_that_an_export_does_not_write_are_refused() {
    let (_folder, store) = temporary_store();
    let (folder, other) = temporary_store();
    let file = export(&store, small(&store), Form::AsStored);
    let good = entries(&file);
    let good: Vec<(&str, &[u8])> = good.iter().map(|(name, c)| (&name[..], &c[..])).collect();
    assert_eq!(archive(&good), file);
    for place in 0..good.len() {
        let (before, after) = good.split_at(place);
        let (this, rest) = after.split_first().unwrap();
        let offset = archive(before).len() - 2 * BLOCK;
        for name in [
            "../x",
            "/tmp/x",
            "x",
            "images/../x",
            "images/000002.manifest",
        ] {
            let mut renamed = file.clone();
            rename(&mut renamed[offset..offset + BLOCK], name);
            assert_refused(&other, &renamed, None, name);
        }
        let without = [before, rest].concat();
        assert_refused(&other, &archive(&without), None, "an entry is missing");
        let twice = [before, &[*this], after].concat();
        assert_refused(&other, &archive(&twice), None, "an entry comes twice");
        for kind in [
            EntryType::Symlink,
            EntryType::Link,
            EntryType::Directory,
            EntryType::Fifo,
            EntryType::Char,
            EntryType::GNUSparse,
            EntryType::GNULongName,
            EntryType::XHeader,
            EntryType::XGlobalHeader,
            EntryType::Continuous,
        ] {
            let mut builder = Builder::new(Vec::new());
            for (number, (name, content)) in good.iter().enumerate() {
                let mut header = Header::new_gnu();
                header.set_size(content.len() as u64);
                header.set_mode(0o600);
                header.set_mtime(0);
                if number == place {
                    header.set_entry_type(kind);
                    header.set_link_name("/etc/passwd").unwrap();
                }
                builder.append_data(&mut header, name, *content).unwrap();
            }
            let file = builder.into_inner().unwrap();
            assert_refused(&other, &file, None, &format!("{kind:?} at {place}"));
        }
    }
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(left.len(), 1, "the store alone");
    import(&other, &file[..], None).unwrap();
}

#[test]
fn too_large_lengths_are_refused_before_an_allocation() {
    let (_folder, store) = temporary_store();
    let (_other_folder, other) = temporary_store();
    let file = export(&store, small(&store), Form::AsStored);
    for (at, name) in [(0, "format"), (2 * BLOCK, MANIFEST_ENTRY)] {
        for len in [100, 1 << 29, 1 << 40, u64::MAX >> 1] {
            let longer = super::super::archive::header(name, len);
            let forged = [&file[..at], &longer, &file[at + BLOCK..]].concat();
            assert_refused(&other, &forged, None, &format!("{len} bytes of {name}"));
        }
    }
}

#[test]
fn packs_that_do_not_fit_their_manifest_are_refused() {
    let (_folder, store) = temporary_store();
    let (_other_folder, other) = temporary_store();
    let (manifest, pack) = parts(&store);
    let stored: Vec<usize> = (0..manifest.chunks.len())
        .filter(|index| matches!(manifest.chunks[*index].content, Content::Stored(_)))
        .collect();
    assert!(stored.len() >= 2);
    let refused = |what: &str, change: &dyn Fn(&mut Manifest, &mut Vec<u8>)| {
        let (mut manifest, mut pack) = (manifest.clone(), pack.clone());
        change(&mut manifest, &mut pack);
        assert_refused(&other, &forged(&manifest, &pack), None, what)
    };
    let change = |what: &str, place: usize, change: fn(&mut Stored)| {
        refused(
            what,
            &|manifest, _| match &mut manifest.chunks[stored[place]].content {
                Content::Stored(stored) => change(stored),
                Content::Zero => unreachable!(),
            },
        )
    };
    let is_chunk = |error: ImportError| {
        let damage = FileDamage::Chunk.to_string();
        assert!(error.to_string().contains(&damage), "{error}");
    };
    is_chunk(change("another name", 0, |stored| stored.hash[0] ^= 1));
    is_chunk(change("another check", 0, |stored| stored.check = Some(7)));
    change("another codec", 0, |stored| stored.codec = Codec::Planes);
    change("an earlier place", 1, |stored| stored.offset -= 1);
    // Workers place chunks in any order.
    refused("the place of another chunk", &|manifest, _| {
        let place = |index: usize| match &manifest.chunks[stored[index]].content {
            Content::Stored(stored) => stored.offset,
            Content::Zero => unreachable!(),
        };
        let other = place(0);
        assert_ne!(other, place(1));
        if let Content::Stored(moved) = &mut manifest.chunks[stored[1]].content {
            moved.offset = other;
        }
    });
    change("another length", 0, |stored| stored.len -= 1);
    refused("another uncompressed length", &|manifest, _| {
        let index = u32::try_from(stored[0]).unwrap();
        manifest.chunks[stored[0]].raw_len += 1;
        for stream in &mut manifest.streams {
            let uses = stream.chunks.iter().filter(|one| **one == index).count() as u64;
            stream.raw_len += uses;
            manifest.raw_bytes += uses;
        }
    });
    refused("a chunk that no stream uses", &|manifest, _| {
        let unused = manifest.streams.remove(0);
        manifest.raw_bytes -= unused.raw_len;
    });
    refused("streams in another order", &|manifest, _| {
        manifest.streams.reverse();
    });
    refused("a stream that is there twice", &|manifest, _| {
        let twice = manifest.streams[0].clone();
        manifest.raw_bytes += twice.raw_len;
        manifest.streams.push(twice);
    });
    refused("a stream with an impossible name", &|manifest, _| {
        manifest.streams[0].name = "../x".to_owned();
    });
    refused("more in the pack than its chunks", &|manifest, pack| {
        pack.extend([0; 7]);
        manifest.packs[0].len += 7;
    });
    refused("less in the pack than its chunks", &|_, pack| {
        pack.pop();
    });
    refused("another header of the pack", &|_, pack| pack[63] = 1);
    refused("a changed byte", &|_, pack| pack[64] ^= 1);
    import(&other, &forged(&manifest, &pack)[..], None).unwrap();
}

#[test]
fn encryption_that_is_removed_or_claimed_is_refused() {
    let key = key(1);
    let (_folder, store) = super::encrypted_store(&key);
    let (_other_folder, other) = super::encrypted_store(&key);
    let file = export(&store, small(&store), Form::AsStored);
    let good = entries(&file);
    let mut good: Vec<(&str, &[u8])> = good.iter().map(|(name, c)| (&name[..], &c[..])).collect();
    let key_check = good.remove(1);
    assert_refused(&other, &archive(&good), Some(&key), "no check of the key");
    let plain = entries(&export(&store, super::ImageId::FIRST, Form::Plain));
    let mut plain: Vec<(&str, &[u8])> = plain.iter().map(|(name, c)| (&name[..], &c[..])).collect();
    plain.insert(1, key_check);
    assert_refused(&other, &archive(&plain), Some(&key), "nothing is sealed");
}

#[test]
fn foreign_files_and_other_versions_are_named() {
    let (_folder, store) = temporary_store();
    for other in [&b""[..], b"C", b"\x7fELF", &[0; 500], &[0; 5000]] {
        let error = assert_refused(&store, other, None, "another file");
        assert!(matches!(error, ImportError::NotOurs), "{error}");
    }
    let error = assert_refused(&store, b"CKPTFILE and more", None, "an older file");
    assert!(matches!(error, ImportError::Older), "{error}");
    let newer = archive(&[("format", b"ckpt-run store 3\n")]);
    let error = assert_refused(&store, &newer, None, "a newer file");
    assert!(matches!(error, ImportError::Newer { format: 3 }), "{error}");
    let unknown = archive(&[("format", b"ckpt-run store x\n")]);
    assert_refused(&store, &unknown, None, "an unknown format");
}
