//! GPUs: their number, size, and memory in use, which all processes of a test share.
//!
//! Environment: `FAKE_CUDA_DIR` is the folder that represents the GPUs (on a tmpfs; each test has its own),
//! `FAKE_CUDA_DEVICES` their number (default 2), `FAKE_CUDA_MIB` the memory of each (default 1024).
//!
//! A piece of memory is a file of the folder, `d<GPU>-<unique>-<bytes>`. A process that opens it takes a shared
//! `flock`. The lock belongs to the open file and ends with its last descriptor or mapping, even in another process or
//! in transit in a socket. A file that can be locked exclusively is unused, so the kernel does the accounting. A
//! process holds its own memory by a mapping of one page instead of a descriptor: a forked child inherits neither, and
//! CRIU sees no descriptor.

use std::fmt::Write;
use std::fs::{self, File};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use super::c::{self, Access, Flock, PAGE};
use super::code::{Code, INVALID_VALUE, OUT_OF_MEMORY, UNKNOWN};

/// Maximum number of GPUs.
const DEVICES_MAX: usize = 16;
const MIB: u64 = 1 << 20;

pub fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let chosen = std::env::var_os("FAKE_CUDA_DIR").map(PathBuf::from);
        let folder = chosen.unwrap_or_else(|| Path::new("/dev/shm/fake-cuda").to_owned());
        let _ = fs::create_dir_all(&folder);
        folder
    })
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Returns the number of GPUs.
pub fn devices() -> usize {
    static DEVICES: OnceLock<usize> = OnceLock::new();
    *DEVICES.get_or_init(|| {
        let told = variable("FAKE_CUDA_DEVICES").and_then(|count| usize::try_from(count).ok());
        told.unwrap_or(2).min(DEVICES_MAX)
    })
}

/// Returns the memory of each GPU in bytes.
pub fn capacity() -> u64 {
    variable("FAKE_CUDA_MIB")
        .unwrap_or(1024)
        .saturating_mul(MIB)
}

/// Returns `GPU-fa4e0000-0000-4000-8000-0000000000NN`.
pub fn uuid(device: usize) -> [u8; 16] {
    let mut uuid = [0xfa, 0x4e, 0, 0, 0, 0, 0x40, 0, 0x80, 0, 0, 0, 0, 0, 0, 0];
    uuid[15] = device as u8;
    uuid
}

/// Parses the GPU and the length of a piece of memory from its file's name.
pub fn parse(name: &str) -> Option<(usize, u64)> {
    let mut parts = name.strip_prefix('d')?.splitn(3, '-');
    let device = parts.next()?.parse().ok()?;
    parts.next()?;
    Some((device, parts.next()?.parse().ok()?))
}

/// Returns the bytes in use on a GPU, after the removal of unused pieces.
pub fn used(device: usize) -> u64 {
    let Some(_lock) = lock_folder() else { return 0 };
    list(device)
        .filter(|(path, _)| !bury(path))
        .map(|(_, len)| len)
        .sum()
}

/// Returns true if a GPU has `len` bytes free; the caller holds the folder's lock.
fn has_room(device: usize, len: u64) -> bool {
    let in_use: u64 = list(device).map(|(_, len)| len).sum();
    if in_use.saturating_add(len) <= capacity() {
        return true;
    }
    let in_use: u64 = list(device)
        .filter(|(path, _)| !bury(path))
        .map(|(_, len)| len)
        .sum();
    in_use.saturating_add(len) <= capacity()
}

fn list(device: usize) -> impl Iterator<Item = (PathBuf, u64)> {
    let entries = fs::read_dir(folder()).into_iter().flatten().flatten();
    entries.filter_map(move |entry| {
        let (of, len) = parse(entry.file_name().to_str()?)?;
        (of == device).then(|| (entry.path(), len))
    })
}

/// Removes the file of an unused piece; returns true if it was unused.
fn bury(path: &Path) -> bool {
    let Ok(file) = File::options().read(true).write(true).open(path) else {
        return true;
    };
    let dead = c::lock_file(&file, Flock::TryExclusive);
    if dead {
        let _ = fs::remove_file(path);
    }
    dead
}

/// Locks the folder against creation and removal of memory.
fn lock_folder() -> Option<File> {
    let file = File::options()
        .create(true)
        .append(true)
        .open(folder().join("lock"))
        .ok()?;
    c::lock_file(&file, Flock::Exclusive).then_some(file)
}

/// Piece of memory that this process holds.
pub struct Memory {
    name: String,
    anchor: u64,
    pub device: usize,
    pub len: u64,
}

impl Memory {
    /// Creates memory; `len` must be a multiple of [`PAGE`].
    pub fn create(device: usize, len: u64) -> Result<Self, Code> {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        let _lock = lock_folder().ok_or(UNKNOWN)?;
        if !has_room(device, len) {
            return Err(OUT_OF_MEMORY);
        }
        let time = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_nanos();
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let name = format!(
            "d{device}-{time:x}.{:x}.{serial:x}-{len}",
            std::process::id()
        );
        let path = folder().join(&name);
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path);
        let file = file.map_err(|_| UNKNOWN)?;
        // As on a GPU, a holder of a descriptor may use the memory, whoever created it.
        let all = fs::Permissions::from_mode(0o666);
        file.set_permissions(all).map_err(|_| UNKNOWN)?;
        file.set_len(len).map_err(|_| OUT_OF_MEMORY)?;
        Self::hold(name, &file, Access::None)
    }

    /// Imports the memory of a descriptor. Its mapping is readable, by which NVML distinguishes it from the process's
    /// own memory.
    pub fn import(descriptor: BorrowedFd<'_>) -> Result<Self, Code> {
        use std::os::fd::AsRawFd;
        let link = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
        let path = fs::read_link(link).map_err(|_| INVALID_VALUE)?;
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .ok_or(INVALID_VALUE)?;
        let file = File::options()
            .read(true)
            .write(true)
            .open(folder().join(name));
        Self::hold(
            name.to_owned(),
            &file.map_err(|_| INVALID_VALUE)?,
            Access::Read,
        )
    }

    fn hold(name: String, file: &File, access: Access) -> Result<Self, Code> {
        let (device, len) = parse(&name).ok_or(INVALID_VALUE)?;
        c::lock_file(file, Flock::Shared);
        let anchor = c::map_file(None, PAGE, file, access)?;
        Ok(Self {
            name,
            anchor,
            device,
            len,
        })
    }

    /// Opens the file, which is held as long as it is open or mapped.
    pub fn open(&self) -> Result<File, Code> {
        let file = File::options()
            .read(true)
            .write(true)
            .open(folder().join(&self.name));
        let file = file.map_err(|_| UNKNOWN)?;
        c::lock_file(&file, Flock::Shared);
        Ok(file)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        c::unmap(self.anchor, PAGE);
        if let Some(_lock) = lock_folder() {
            bury(&folder().join(&self.name));
        }
    }
}

/// Returns the UUID in the form of NVML and `CUDA_VISIBLE_DEVICES`.
pub fn uuid_text(device: usize) -> String {
    let mut text = String::from("GPU");
    for (place, byte) in uuid(device).iter().enumerate() {
        if [0, 4, 6, 8, 10].contains(&place) {
            text.push('-');
        }
        let _ = write!(text, "{byte:02x}");
    }
    text
}
