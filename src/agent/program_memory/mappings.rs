//! Mappings of the program's pieces: records, and their removal and return for a snapshot.

use core::ffi::c_int;

use super::super::driver::{self, Access, check};
use super::super::memory::{State, in_usize, map_at};
use super::super::sys;
use super::super::table::{Entry, Mapping};

impl State {
    /// Returns the piece with a handle that the program has.
    pub fn held(&mut self, handle: u64) -> Option<&mut Entry> {
        let entry = self.table.get_mut(handle)?;
        (entry.references > 0).then_some(entry)
    }

    /// Records a mapping of the piece with this handle.
    pub fn add_mapping(&mut self, address: u64, len: u64, offset: u64, piece: u64) {
        let Some(entry) = self.table.get_mut(piece) else {
            return;
        };
        let mapping = Mapping {
            address,
            len,
            offset,
            piece,
            next: entry.mapping,
            mapped: true,
            ..Mapping::ZEROS
        };
        if self.mappings.insert(mapping) {
            entry.mapping = address;
        }
    }

    /// Removes the mappings in a range, and the pieces that nothing refers to any more.
    pub fn remove_mappings(&mut self, address: u64, len: u64) {
        let range = self.mappings.within(address, len);
        for _ in range.clone() {
            let Some(gone) = self.mappings.entries().get(range.start).copied() else {
                return;
            };
            self.unlink(&gone);
            self.mappings.remove(range.start);
            self.drop_unused(gone.piece);
        }
    }

    fn unlink(&mut self, gone: &Mapping) {
        let Some(entry) = self.table.get_mut(gone.piece) else {
            return;
        };
        if entry.mapping == gone.address {
            entry.mapping = gone.next;
            return;
        }
        let mut at = entry.mapping;
        while let Some(mapping) = self.mappings.get_mut(at) {
            if mapping.next == gone.address {
                mapping.next = gone.next;
                return;
            }
            at = mapping.next;
        }
    }

    /// Returns a piece to the driver if the program has neither a handle nor a mapping of it.
    pub fn drop_unused(&mut self, piece: u64) {
        let Some(position) = self.table.at(piece) else {
            return;
        };
        let entry = self.table.entries()[position];
        if entry.references != 0 || entry.mapping != 0 {
            return;
        }
        // SAFETY: owned by the agent, not mapped, and not used after this.
        unsafe { driver::release(entry.handle) };
        if entry.descriptor >= 0 {
            // SAFETY: owned by the agent.
            unsafe { sys::close(entry.descriptor) };
        }
        self.remove(position);
    }

    /// Records the access of devices to the mappings in a range. Returns false if an access is not that of a device.
    pub fn set_access(&mut self, address: u64, len: u64, access: &[Access]) -> bool {
        let range = self.mappings.within(address, len);
        let mappings = self.mappings.entries_mut().get_mut(range);
        let mut known = true;
        for mapping in mappings.into_iter().flatten() {
            for one in access {
                let bit = one.parts().filter(|(device, ..)| (0..64).contains(device));
                let Some((device, reads, writes)) = bit else {
                    known = false;
                    continue;
                };
                set(&mut mapping.readers, device, reads);
                set(&mut mapping.writers, device, writes);
            }
        }
        known
    }

    /// Returns the address of the first mapping of a piece that differs from `mapped`.
    fn next_mapping(&self, entry: &Entry, mapped: bool) -> Option<Mapping> {
        let mut at = entry.mapping;
        while let Some(position) = self.mappings.at(at) {
            let mapping = self.mappings.entries()[position];
            if mapping.mapped != mapped {
                return Some(mapping);
            }
            at = mapping.next;
        }
        None
    }

    fn mark(&mut self, mapping: &Mapping, mapped: bool) {
        if let Some(found) = self.mappings.get_mut(mapping.address) {
            found.mapped = mapped;
        }
    }
}

fn set(bits: &mut u64, device: c_int, is_set: bool) {
    *bits &= !(1 << device);
    *bits |= u64::from(is_set) << device;
}

/// Maps the piece at all its mappings that have no memory.
pub fn map_all(state: &mut State, entry: &mut Entry) -> Result<(), c_int> {
    while let Some(mapping) = state.next_mapping(entry, true) {
        map_at(entry.handle, &mapping)?;
        state.mark(&mapping, true);
    }
    entry.mapped = true;
    Ok(())
}

/// Unmaps the piece at all its mappings. After an error, [`map_all`] maps it again where it is missing.
pub fn unmap_all(state: &mut State, entry: &mut Entry) -> Result<(), c_int> {
    while let Some(mapping) = state.next_mapping(entry, false) {
        // SAFETY: mapped there, and the GPU is idle.
        check(unsafe { driver::unmap(mapping.address, in_usize(mapping.len)) })?;
        state.mark(&mapping, false);
        entry.mapped = false;
    }
    entry.mapped = false;
    Ok(())
}
