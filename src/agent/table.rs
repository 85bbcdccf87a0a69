//! Table of the agent's pieces of device memory, by address. Plain bookkeeping without calls.
//!
//! The table has a fixed size, because the agent allocates no memory in the job's process; unused pages take no memory.

/// Maximum number of pieces; further allocations are left to the driver. A training run of 17 GiB had 49, and an entry
/// takes 72 bytes.
pub const ENTRIES_MAX: usize = 16_384;

/// Piece of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Address of the mapping, as the job sees it.
    pub address: u64,
    /// Length of the mapping in bytes.
    pub len: u64,
    /// Requested length in bytes.
    pub asked: u64,
    /// Driver's handle; meaningless unless `mapped`.
    pub handle: u64,
    /// Driver's context in which the piece was created.
    pub context: usize,
    /// Number, unique in its process; assigned by the owner if that is another process.
    pub id: u64,
    /// Driver's number of the GPU.
    pub device: i32,
    /// Descriptor of imported memory, which the driver cannot export again; -1 for own memory.
    pub descriptor: i32,
    /// True if memory is mapped at the address.
    pub mapped: bool,
    /// True if other processes may use the piece, because a handle of it was created.
    pub lent: bool,
    /// Pid of the owner if that is another process (CUDA IPC); else 0.
    pub owner: i32,
    /// Number of times that another process's piece was opened.
    pub opened: u32,
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
    };
}

/// Entries sorted by address.
pub struct Table {
    entries: [Entry; ENTRIES_MAX],
    count: usize,
}

impl Table {
    #[allow(
        clippy::large_stack_arrays,
        reason = "for statics: computed when compiled"
    )]
    pub const fn new() -> Self {
        // An initial value with non-zero descriptors would put the table in .data; `insert` explains why zeros are
        // valid.
        Self {
            entries: [Entry {
                descriptor: 0,
                ..Entry::NONE
            }; ENTRIES_MAX],
            count: 0,
        }
    }

    pub fn entries(&self) -> &[Entry] {
        self.entries.get(..self.count).unwrap_or(&[])
    }

    pub fn entries_mut(&mut self) -> &mut [Entry] {
        self.entries.get_mut(..self.count).unwrap_or(&mut [])
    }

    pub fn is_full(&self) -> bool {
        self.count >= ENTRIES_MAX
    }

    /// Returns the position of the entry that begins at the address.
    pub fn at(&self, address: u64) -> Option<usize> {
        self.entries()
            .binary_search_by_key(&address, |entry| entry.address)
            .ok()
    }

    /// Returns the entry that contains the address.
    pub fn around(&self, address: u64) -> Option<&Entry> {
        let after = self
            .entries()
            .partition_point(|entry| entry.address <= address);
        let entry = self.entries().get(after.checked_sub(1)?)?;
        (address - entry.address < entry.len).then_some(entry)
    }

    /// Inserts an entry. Returns false if there is no room or the address is in use.
    pub fn insert(&mut self, entry: Entry) -> bool {
        let Err(position) = self
            .entries()
            .binary_search_by_key(&entry.address, |other| other.address)
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
