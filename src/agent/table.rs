//! Tables of pieces of device memory and of mappings, by address. Plain bookkeeping without calls.
//!
//! A table has a fixed size, because the agent allocates no memory in the job's process; unused pages take no memory.

/// Maximum number of pieces; further allocations are left to the driver. A training run of 17 GiB had 49, and an entry
/// takes 96 bytes.
pub const ENTRIES_MAX: usize = 16_384;

/// Lowest handle that the agent gives to a program for memory of `cuMemCreate`. No address is as high, and the driver's
/// handles are numbers or addresses.
pub const HANDLE_MIN: u64 = 1 << 62;

/// Range of addresses.
pub trait Range: Copy {
    fn address(&self) -> u64;
    fn len(&self) -> u64;
}

/// Piece of device memory.
///
/// A piece of `cuMemAlloc` has one mapping, made by the agent. A piece of `cuMemCreate` belongs to the program, which maps
/// it as it likes ([`Mapping`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Address of the mapping, as the job sees it; for a program's own piece the handle that the program has.
    pub address: u64,
    /// Length of the mapping in bytes.
    pub len: u64,
    /// Requested length in bytes.
    pub asked: u64,
    /// Driver's handle; meaningless unless `mapped`.
    pub handle: u64,
    /// Driver's context in which the piece was created; 0 for a program's own piece, which outlives contexts.
    pub context: usize,
    /// Number, unique in its process; assigned by the owner if that is another process.
    pub id: u64,
    /// Driver's number of the GPU.
    pub device: i32,
    /// Descriptor of imported memory, which the driver cannot export again; -1 for own memory.
    pub descriptor: i32,
    /// True if memory is mapped at the address, or at all mappings of a program's own piece.
    pub mapped: bool,
    /// True if other processes may use the piece, because a handle of it was created.
    pub lent: bool,
    /// Pid of the owner if that is another process (CUDA IPC); else 0.
    pub owner: i32,
    /// Number of times that another process's piece was opened.
    pub opened: u32,
    /// Number of references of the program to its handle.
    pub references: u32,
    /// Address of the latest mapping of a program's own piece; 0 if there is none.
    pub mapping: u64,
    /// Types of handles (`CUmemAllocationHandleType`) that the program asked for.
    pub handle_types: i32,
    /// True if the program asked for memory for RDMA.
    pub rdma: bool,
}

/// Mapping of a program's own piece (`cuMemMap`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    pub address: u64,
    pub len: u64,
    /// Offset in the piece.
    pub offset: u64,
    /// Handle of the piece.
    pub piece: u64,
    /// Address of the next mapping of the same piece; 0 if there is none.
    pub next: u64,
    /// Devices that may read, and those that may write, one bit each.
    pub readers: u64,
    pub writers: u64,
    /// True if memory is mapped at the address.
    pub mapped: bool,
}

impl Entry {
    pub const NONE: Self = Self {
        address: 0,
        len: 0,
        asked: 0,
        handle: 0,
        context: 0,
        id: 0,
        device: 0,
        descriptor: -1,
        mapped: false,
        lent: false,
        owner: 0,
        opened: 0,
        references: 0,
        mapping: 0,
        handle_types: 0,
        rdma: false,
    };
    /// Entry of zeros, for unused places of a table: others would put it in .data.
    pub const ZEROS: Self = Self {
        descriptor: 0,
        ..Self::NONE
    };

    /// Returns true for a piece of `cuMemCreate`.
    pub const fn is_programs(&self) -> bool {
        self.address >= HANDLE_MIN
    }
}

impl Mapping {
    /// Mapping of zeros.
    pub const ZEROS: Self = Self {
        address: 0,
        len: 0,
        offset: 0,
        piece: 0,
        next: 0,
        readers: 0,
        writers: 0,
        mapped: false,
    };
}

impl Range for Entry {
    fn address(&self) -> u64 {
        self.address
    }

    fn len(&self) -> u64 {
        self.len
    }
}

impl Range for Mapping {
    fn address(&self) -> u64 {
        self.address
    }

    fn len(&self) -> u64 {
        self.len
    }
}

/// Entries sorted by address.
pub struct Table<T> {
    entries: [T; ENTRIES_MAX],
    count: usize,
}

impl<T: Range> Table<T> {
    /// Returns an empty table whose unused places have this value.
    #[allow(
        clippy::large_stack_arrays,
        reason = "for statics: computed when compiled"
    )]
    pub const fn new(unused: T) -> Self {
        Self {
            entries: [unused; ENTRIES_MAX],
            count: 0,
        }
    }

    pub fn entries(&self) -> &[T] {
        self.entries.get(..self.count).unwrap_or(&[])
    }

    pub fn entries_mut(&mut self) -> &mut [T] {
        self.entries.get_mut(..self.count).unwrap_or(&mut [])
    }

    pub fn is_full(&self) -> bool {
        self.count >= ENTRIES_MAX
    }

    /// Returns the position of the entry that begins at the address.
    pub fn at(&self, address: u64) -> Option<usize> {
        self.entries()
            .binary_search_by_key(&address, Range::address)
            .ok()
    }

    /// Returns the entry that begins at the address.
    pub fn get_mut(&mut self, address: u64) -> Option<&mut T> {
        let position = self.at(address)?;
        self.entries_mut().get_mut(position)
    }

    /// Returns the positions of the entries that begin in a range.
    pub fn within(&self, address: u64, len: u64) -> core::ops::Range<usize> {
        let end = address.saturating_add(len);
        let before = |limit: u64| {
            self.entries()
                .partition_point(|entry| entry.address() < limit)
        };
        before(address)..before(end)
    }

    /// Returns the entry that contains the address.
    pub fn around(&self, address: u64) -> Option<&T> {
        let after = self
            .entries()
            .partition_point(|entry| entry.address() <= address);
        let entry = self.entries().get(after.checked_sub(1)?)?;
        (address - entry.address() < entry.len()).then_some(entry)
    }

    /// Inserts an entry. Returns false if there is no room or the address is in use.
    pub fn insert(&mut self, entry: T) -> bool {
        let Err(position) = self
            .entries()
            .binary_search_by_key(&entry.address(), Range::address)
        else {
            return false;
        };
        let Some(moved) = self.entries.get_mut(position..=self.count) else {
            return false;
        };
        moved.rotate_right(1);
        if let Some(first) = moved.first_mut() {
            *first = entry;
        }
        self.count += 1;
        true
    }

    pub fn remove(&mut self, position: usize) {
        if let Some(moved) = self.entries.get_mut(position..self.count) {
            moved.rotate_left(1);
            self.count -= 1;
        }
    }

    pub fn clear(&mut self) {
        self.count = 0;
    }
}
