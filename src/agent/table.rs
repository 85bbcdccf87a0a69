//! The pieces of device memory that the agent made, by address. Plain bookkeeping: it calls nothing.
//!
//! Of a fixed size, for nothing is allocated in the job's process; pages that were never used take no memory.

/// Pieces that are remembered at a time; more are the driver's own. A training run of 17 GiB had 49, and an entry
/// costs 72 bytes.
pub const ENTRIES_MAX: usize = 16_384;

/// A piece of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Address of the mapping, by which the job knows it.
    pub address: u64,
    /// Bytes mapped.
    pub len: u64,
    /// Bytes the job asked for.
    pub asked: u64,
    /// The driver's handle; without meaning while not `mapped`.
    pub handle: u64,
    /// The driver's context it was made in.
    pub context: usize,
    /// Never given twice in a process; of the other process's, when there is one.
    pub id: u64,
    /// The driver's number of its GPU.
    pub device: i32,
    /// Descriptor of memory that came from elsewhere, which the driver exports no second time; else -1.
    pub descriptor: i32,
    /// True if there is memory behind the address.
    pub mapped: bool,
    /// True if other processes may have it as well: a handle of it was given out.
    pub lent: bool,
    /// The process it belongs to, when that is another (CUDA IPC); else 0.
    pub owner: i32,
    /// Times that it was opened, when it is another process's.
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

/// Entries in order of their addresses.
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
        // All zeros but the descriptors would put the table in .data; see `insert` for what makes the rest valid.
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

    /// Number of the entry that begins at the address.
    pub fn at(&self, address: u64) -> Option<usize> {
        self.entries()
            .binary_search_by_key(&address, |entry| entry.address)
            .ok()
    }

    /// The entry that the address lies in.
    pub fn around(&self, address: u64) -> Option<&Entry> {
        let after = self
            .entries()
            .partition_point(|entry| entry.address <= address);
        let entry = self.entries().get(after.checked_sub(1)?)?;
        (address - entry.address < entry.len).then_some(entry)
    }

    /// False, and nothing done, when there is no room or the address is taken.
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
