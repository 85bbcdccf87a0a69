//! Checkpoint and restore of the process's device memory: own memory is moved to host memory and back, to the same
//! addresses. Imported memory is released, and then the process cannot be restored (801).

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::c;
use super::card::{self, Memory};
use super::code::{Answer, Code, INVALID_VALUE, NOT_SUPPORTED, UNKNOWN};
use super::link::Pair;
use super::process::{Guard, Id, Origin, Place, process};

/// Size of a copied block; blocks of zeros are skipped.
const BLOCK: usize = 64 << 10;

/// Moves all memory or none: without enough host memory the process is unchanged.
pub fn to_host() -> Answer {
    let mut process = process();
    let copies = copy_all(&process)?;
    for (at, mapping) in &process.mappings {
        c::vacate(*at, mapping.len)?;
    }
    for (id, place) in copies {
        if let Some(piece) = process.pieces.get_mut(&id) {
            piece.place = place;
        }
    }
    Ok(())
}

fn copy_all(process: &Guard) -> Result<Vec<(Id, Place)>, Code> {
    let mut copies = Vec::new();
    for (id, piece) in &process.pieces {
        let Place::Device(memory) = &piece.place else {
            continue;
        };
        let place = match piece.origin {
            Origin::Own => copy_to_host(memory),
            Origin::Imported | Origin::Host => Ok(Place::Lost),
        };
        match place {
            Ok(place) => copies.push((*id, place)),
            Err(code) => {
                for (_, place) in &copies {
                    discard(place);
                }
                return Err(code);
            }
        }
    }
    Ok(copies)
}

fn discard(place: &Place) {
    if let Place::Host { at, len, .. } = place {
        c::unmap(*at, *len);
    }
}

fn copy_to_host(memory: &Memory) -> Result<Place, Code> {
    let file = memory.open()?;
    let at = c::host_memory(memory.len)?;
    let place = Place::Host {
        at,
        device: memory.device,
        len: memory.len,
    };
    // SAFETY: mapped above, and not used elsewhere.
    let copy = unsafe { std::slice::from_raw_parts_mut(at as *mut u8, memory.len as usize) };
    let mut block = vec![0; BLOCK];
    for (number, target) in copy.chunks_mut(BLOCK).enumerate() {
        let block = &mut block[..target.len()];
        if file.read_exact_at(block, (number * BLOCK) as u64).is_err() {
            discard(&place);
            return Err(UNKNOWN);
        }
        if block.iter().any(|byte| *byte != 0) {
            target.copy_from_slice(block);
        }
    }
    Ok(place)
}

/// Moves all memory or none: without enough GPU memory the process stays checkpointed.
pub fn to_device(pairs: &[Pair]) -> Answer {
    let mut process = process();
    let gpus = moved(&process.gpus, pairs)?;
    if process
        .pieces
        .values()
        .any(|piece| matches!(piece.place, Place::Lost))
    {
        return Err(NOT_SUPPORTED);
    }
    let memories = create_all(&process, &gpus)?;
    process.gpus = gpus;
    for (id, memory) in memories {
        if let Some(piece) = process.pieces.get_mut(&id) {
            discard(&piece.place);
            piece.place = Place::Device(memory);
        }
    }
    let mappings: Vec<_> = process
        .mappings
        .iter()
        .map(|(at, mapping)| (*at, *mapping))
        .collect();
    mappings
        .into_iter()
        .try_for_each(|(at, mapping)| process.map(at, mapping))
}

/// Returns the process's GPUs after a move. A map names each of them; without one they are the same.
fn moved(gpus: &[usize], pairs: &[Pair]) -> Result<Vec<usize>, Code> {
    let target = |gpu: &usize| {
        let old = card::uuid(*gpu);
        let new = if pairs.is_empty() {
            old
        } else {
            pairs
                .iter()
                .find(|pair| pair[0] == old)
                .ok_or(INVALID_VALUE)?[1]
        };
        (0..card::devices())
            .find(|one| card::uuid(*one) == new)
            .ok_or(INVALID_VALUE)
    };
    gpus.iter().map(target).collect()
}

fn create_all(process: &Guard, gpus: &[usize]) -> Result<Vec<(Id, Memory)>, Code> {
    let mut memories = Vec::new();
    for (id, piece) in &process.pieces {
        let Place::Host { at, device, len } = piece.place else {
            continue;
        };
        let ordinal = process.ordinal(device).ok_or(INVALID_VALUE)?;
        let memory = Memory::create(gpus[ordinal], len)?;
        // SAFETY: the copy of the checkpoint, which is not used elsewhere.
        let copy = unsafe { std::slice::from_raw_parts(at as *const u8, len as usize) };
        write(&memory.open()?, copy)?;
        memories.push((*id, memory));
    }
    Ok(memories)
}

fn write(file: &File, copy: &[u8]) -> Answer {
    for (number, block) in copy.chunks(BLOCK).enumerate() {
        if block.iter().any(|byte| *byte != 0) {
            file.write_all_at(block, (number * BLOCK) as u64)
                .map_err(|_| UNKNOWN)?;
        }
    }
    Ok(())
}
