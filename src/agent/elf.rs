//! Lookup of C library functions by name, without the C library's help.
//!
//! The agent defines `dlsym` itself and must find the real one. Before glibc 2.34, `dlsym` and `pthread_create` were in
//! separate libraries, which may be loaded later than the agent or be invisible to global lookups. So the lookup reads
//! the symbol tables of the objects loaded after the agent, in their order, as the dynamic loader does.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr;

use super::sys;

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const DT_HASH: i64 = 4;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_GNU_HASH: i64 = 0x6fff_fef5;
const STT_FUNC: u8 = 2;

/// `struct dl_phdr_info`, limited to the fields that every C library has.
#[repr(C)]
struct Object {
    base: usize,
    _name: *const c_char,
    segments: *const ProgramHeader,
    segments_len: u16,
}

/// `Elf64_Phdr`.
#[repr(C)]
struct ProgramHeader {
    kind: u32,
    _flags: u32,
    _offset: u64,
    address: usize,
    _physical: u64,
    _file_len: u64,
    len: usize,
    _align: u64,
}

/// `Elf64_Dyn`.
#[repr(C)]
struct Dynamic {
    tag: i64,
    value: usize,
}

/// `Elf64_Sym`.
#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    _other: u8,
    section: u16,
    value: usize,
    _size: u64,
}

const _: () = assert!(size_of::<ProgramHeader>() == 56);
const _: () = assert!(size_of::<Symbol>() == 24);

struct Search<'a> {
    name: &'a CStr,
    /// True after the agent's own object was visited; the objects before it are the program and other preloaded
    /// libraries.
    behind: bool,
    found: *mut c_void,
}

/// Returns the first function of this name in an object loaded after the agent, or null.
pub fn find(name: &CStr) -> *mut c_void {
    let mut search = Search {
        name,
        behind: false,
        found: ptr::null_mut(),
    };
    // SAFETY: the callback receives `search`, which is valid during this call.
    unsafe { sys::dl_iterate_phdr(visit, (&raw mut search).cast()) };
    search.found
}

/// # Safety
/// Called by `dl_iterate_phdr` according to its contract, with a [`Search`].
unsafe extern "C" fn visit(object: *const c_void, _len: usize, search: *mut c_void) -> c_int {
    // SAFETY: by the contract above.
    let (object, search) =
        unsafe { (&*object.cast::<Object>(), &mut *search.cast::<Search<'_>>()) };
    if object.segments.is_null() {
        return 0;
    }
    let count = usize::from(object.segments_len);
    // SAFETY: this is the loader's own table of the object.
    let segments = unsafe { core::slice::from_raw_parts(object.segments, count) };
    let here = visit as *const () as usize;
    let is_here = |segment: &ProgramHeader| {
        let start = object.base.wrapping_add(segment.address);
        segment.kind == PT_LOAD && here.wrapping_sub(start) < segment.len
    };
    if segments.iter().any(is_here) {
        search.behind = true;
    } else if search.behind {
        for segment in segments.iter().filter(|one| one.kind == PT_DYNAMIC) {
            let dynamic = ptr::without_provenance(object.base.wrapping_add(segment.address));
            // SAFETY: the dynamic section of a loaded object.
            search.found = unsafe { Tables::read(object.base, dynamic).find(search.name) };
        }
    }
    c_int::from(!search.found.is_null())
}

/// Addresses of an object's symbol tables; null for missing ones.
struct Tables {
    base: usize,
    names: *const c_char,
    symbols: *const Symbol,
    hash: *const u32,
    gnu_hash: *const u32,
}

impl Tables {
    /// # Safety
    /// The section belongs to an object loaded at `base`, and ends with a zero tag.
    unsafe fn read(base: usize, mut section: *const Dynamic) -> Self {
        let mut tables = Self {
            base,
            names: ptr::null(),
            symbols: ptr::null(),
            hash: ptr::null(),
            gnu_hash: ptr::null(),
        };
        loop {
            // SAFETY: within the section.
            let entry = unsafe { &*section };
            // glibc has added the base address to the values; musl and the vDSO have not.
            let place = match entry.value {
                value if value < base => base.wrapping_add(value),
                value => value,
            };
            match entry.tag {
                0 => return tables,
                DT_HASH => tables.hash = ptr::without_provenance(place),
                DT_STRTAB => tables.names = ptr::without_provenance(place),
                DT_SYMTAB => tables.symbols = ptr::without_provenance(place),
                DT_GNU_HASH => tables.gnu_hash = ptr::without_provenance(place),
                _ => {}
            }
            // SAFETY: this was not the last entry.
            section = unsafe { section.add(1) };
        }
    }

    /// # Safety
    /// The tables belong to a loaded object.
    unsafe fn find(&self, name: &CStr) -> *mut c_void {
        if self.names.is_null() || self.symbols.is_null() {
            return ptr::null_mut();
        }
        // SAFETY: the same tables.
        unsafe {
            if !self.gnu_hash.is_null() {
                self.find_by_gnu_hash(name)
            } else if !self.hash.is_null() {
                self.find_by_hash(name)
            } else {
                ptr::null_mut()
            }
        }
    }

    /// Looks up a name in a GNU hash table: number of buckets, first symbol, words of the filter, its shift, filter,
    /// buckets, chains that end with an odd value.
    ///
    /// # Safety
    /// `gnu_hash` is such a table.
    unsafe fn find_by_gnu_hash(&self, name: &CStr) -> *mut c_void {
        let wanted = gnu_hash(name);
        // SAFETY: the table has its header, and the linker wrote all indexes below for readers like this one.
        unsafe {
            let (buckets, first) = (*self.gnu_hash, *self.gnu_hash.add(1));
            if buckets == 0 {
                return ptr::null_mut();
            }
            let bucket = self.gnu_hash.add(4 + 2 * *self.gnu_hash.add(2) as usize);
            let chain = bucket.add(buckets as usize);
            let mut index = *bucket.add((wanted % buckets) as usize);
            while index >= first {
                let hash = *chain.add((index - first) as usize);
                if hash | 1 == wanted | 1 && self.is(index, name) {
                    return self.place(index);
                }
                if hash & 1 == 1 {
                    break;
                }
                index += 1;
            }
        }
        ptr::null_mut()
    }

    /// Looks up a name in a System V hash table: number of buckets, number of symbols, buckets, chains by symbol.
    ///
    /// # Safety
    /// `hash` is such a table.
    unsafe fn find_by_hash(&self, name: &CStr) -> *mut c_void {
        // SAFETY: the table has its header and the number of symbols given there.
        unsafe {
            let count = *self.hash.add(1);
            (1..count)
                .find(|index| self.is(*index, name))
                .map_or(ptr::null_mut(), |index| self.place(index))
        }
    }

    /// # Safety
    /// The symbol exists.
    unsafe fn is(&self, index: u32, name: &CStr) -> bool {
        // SAFETY: by the contract above; symbol names end with a zero.
        unsafe {
            let symbol = &*self.symbols.add(index as usize);
            symbol.section != 0
                && symbol.info & 15 == STT_FUNC
                && CStr::from_ptr(self.names.add(symbol.name as usize)) == name
        }
    }

    /// # Safety
    /// The symbol exists.
    unsafe fn place(&self, index: u32) -> *mut c_void {
        // SAFETY: by the contract above.
        let symbol = unsafe { &*self.symbols.add(index as usize) };
        ptr::with_exposed_provenance_mut(self.base.wrapping_add(symbol.value))
    }
}

fn gnu_hash(name: &CStr) -> u32 {
    let mix = |hash: u32, byte: &u8| hash.wrapping_mul(33).wrapping_add(u32::from(*byte));
    name.to_bytes().iter().fold(5381, mix)
}
