//! State of the driver in this process: its GPUs, contexts, memory and addresses.
//!
//! A separate lock guards the state. It is held for moments only, and never while a thread waits, because the restore
//! thread takes it when the gate is closed and all other threads may be stopped.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::c::{self, Access};
use super::card::{self, Memory};
use super::code::{Answer, Code, INVALID_CONTEXT, INVALID_DEVICE, INVALID_HANDLE, INVALID_VALUE};

/// Number of a piece of memory in this process.
pub type Id = u64;

/// Place of a piece of memory.
pub enum Place {
    Device(Memory),
    /// Host memory, while the process is checkpointed.
    Host {
        at: u64,
        device: usize,
        len: u64,
    },
    /// Nowhere: it belonged to another process and cannot be restored.
    Lost,
}

/// Origin of a piece of memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    Own,
    Imported,
    /// Created on the host. As with the driver, it is lost in a suspend.
    Host,
}

pub struct Piece {
    pub place: Place,
    pub origin: Origin,
    /// `requestedHandleTypes` of `cuMemCreate`.
    pub exportable: bool,
}

/// Kind of an address range.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// From `cuMemAlloc`: addresses and memory belong together.
    Private,
    /// From `cuMemMap` into a reservation.
    Virtual,
}

/// Device memory at an address.
#[derive(Clone, Copy)]
pub struct Mapping {
    /// Requested length in bytes.
    pub asked: u64,
    /// Mapped length in bytes.
    pub len: u64,
    pub piece: Id,
    pub access: Access,
    pub kind: Kind,
}

pub struct Context {
    /// Process's number of the GPU.
    pub ordinal: usize,
    /// Number of users of a primary context.
    pub users: u32,
    /// Memory of the driver itself.
    pub piece: Option<Id>,
}

#[derive(Default)]
pub struct Process {
    /// Physical GPU for each of the process's numbers.
    pub gpus: Vec<usize>,
    /// The same at the start of the process.
    pub gpus_at_first: Vec<usize>,
    pub pieces: BTreeMap<Id, Piece>,
    /// Number of references to each piece's handle. The handle is the piece's number: for mapped memory, the driver
    /// returns the handle that it was mapped with (documentation of `cuMemRetainAllocationHandle`).
    pub handles: BTreeMap<Id, u32>,
    pub reservations: BTreeMap<u64, u64>,
    pub mappings: BTreeMap<u64, Mapping>,
    pub contexts: BTreeMap<usize, Context>,
    /// Pinned host memory.
    pub pinned: BTreeMap<u64, u64>,
    last: Id,
}

static PROCESS: Mutex<Option<Process>> = Mutex::new(None);

/// Exclusive access to the process's state.
pub struct Guard(MutexGuard<'static, Option<Process>>);

impl std::ops::Deref for Guard {
    type Target = Process;
    fn deref(&self) -> &Process {
        self.0.as_ref().expect("set by process()")
    }
}

impl std::ops::DerefMut for Guard {
    fn deref_mut(&mut self) -> &mut Process {
        self.0.as_mut().expect("set by process()")
    }
}

pub fn process() -> Guard {
    let mut guard = PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    guard.get_or_insert_with(|| Process {
        gpus: visible(),
        gpus_at_first: visible(),
        ..Process::default()
    });
    Guard(guard)
}

/// Returns the GPUs in `CUDA_VISIBLE_DEVICES`, in its order.
fn visible() -> Vec<usize> {
    let Ok(list) = std::env::var("CUDA_VISIBLE_DEVICES") else {
        return (0..card::devices()).collect();
    };
    let number = |word: &str| {
        let by_uuid = (0..card::devices()).find(|&device| card::uuid_text(device) == word);
        by_uuid
            .or_else(|| word.parse().ok())
            .filter(|&device| device < card::devices())
    };
    list.split(',')
        .map_while(|word| number(word.trim()))
        .collect()
}

impl Process {
    pub fn next(&mut self) -> Id {
        self.last += 1;
        self.last
    }

    /// Returns the GPU of a number.
    pub fn gpu(&self, ordinal: i32) -> Result<usize, Code> {
        let ordinal = usize::try_from(ordinal).map_err(|_| INVALID_DEVICE)?;
        self.gpus.get(ordinal).copied().ok_or(INVALID_DEVICE)
    }

    /// Returns the process's number of a GPU.
    pub fn ordinal(&self, gpu: usize) -> Option<usize> {
        self.gpus.iter().position(|&one| one == gpu)
    }

    /// Returns true if memory of a GPU can be imported, which is not the case for a GPU that replaced another
    /// (580.159.04).
    pub fn imports_from(&self, gpu: usize) -> bool {
        let mut numbers = self.gpus.iter().zip(&self.gpus_at_first);
        numbers.any(|(now, first)| *now == gpu && *first == gpu)
    }

    pub fn context(&self, context: usize) -> Result<&Context, Code> {
        self.contexts.get(&context).ok_or(INVALID_CONTEXT)
    }

    pub fn add(&mut self, memory: Memory, origin: Origin, exportable: bool) -> Id {
        let id = self.next();
        self.pieces.insert(
            id,
            Piece {
                place: Place::Device(memory),
                origin,
                exportable,
            },
        );
        id
    }

    /// Returns the memory of a piece, which exists while calls pass the gate.
    pub fn memory(&self, piece: Id) -> Result<&Memory, Code> {
        match self.pieces.get(&piece).map(|piece| &piece.place) {
            Some(Place::Device(memory)) => Ok(memory),
            Some(Place::Host { .. } | Place::Lost) | None => Err(INVALID_HANDLE),
        }
    }

    pub fn piece_of(&self, handle: Id) -> Result<Id, Code> {
        let is_held = self.handles.contains_key(&handle);
        is_held.then_some(handle).ok_or(INVALID_VALUE)
    }

    /// Removes a piece that is held neither by a handle nor by a mapping nor by a context.
    pub fn forget_unused(&mut self, piece: Id) {
        let held = self.handles.contains_key(&piece)
            || self.mappings.values().any(|one| one.piece == piece)
            || self.contexts.values().any(|one| one.piece == Some(piece));
        if !held {
            self.pieces.remove(&piece);
        }
    }

    /// Returns the mapping that contains an address.
    pub fn mapping_at(&self, address: u64) -> Option<(u64, Mapping)> {
        let (&at, &mapping) = self.mappings.range(..=address).next_back()?;
        (address < at + mapping.len).then_some((at, mapping))
    }

    /// Checks that the whole range is readable and writable device memory.
    pub fn check_range(&self, address: u64, len: u64) -> Answer {
        let end = address.checked_add(len).ok_or(INVALID_VALUE)?;
        let mut at = address;
        while at < end {
            let (from, mapping) = self.mapping_at(at).ok_or(INVALID_VALUE)?;
            if mapping.access == Access::None {
                return Err(INVALID_VALUE);
            }
            at = from + mapping.len;
        }
        Ok(())
    }

    /// Returns true if no mapping overlaps the range.
    pub fn is_vacant(&self, address: u64, len: u64) -> bool {
        let before = self.mappings.range(..address + len).next_back();
        before.is_none_or(|(at, mapping)| at + mapping.len <= address)
    }

    /// Returns true if a reservation contains the whole range.
    pub fn is_reserved(&self, address: u64, len: u64) -> bool {
        let before = self.reservations.range(..=address).next_back();
        before.is_some_and(|(at, reserved)| address + len <= at + reserved)
    }

    /// Maps a piece at addresses that are reserved or were mapped before.
    pub fn map(&mut self, at: u64, mapping: Mapping) -> Answer {
        let file = self.memory(mapping.piece)?.open()?;
        c::map_file(Some(at), mapping.len, &file, mapping.access)?;
        self.mappings.insert(at, mapping);
        Ok(())
    }
}
