//! Processes that hold device files of a driver, and their ability to use them.
//!
//! A device is identified by its major number, which the kernel assigned to the driver. Paths and names are not
//! reliable.

use std::collections::HashMap;
use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};

use nix::sys::stat::major;
use procfs::ProcError;
use procfs::process::{MMapPath, Process as ProcessEntry};

use super::descriptors::Descriptors;
use super::nodes::map_link;
use super::tree::{self, TreeError};

/// List of drivers and their major numbers.
const DRIVERS: &str = "/proc/devices";
/// Flag of a process that was forked and has not executed a program since (`PF_FORKNOEXEC`, `linux/sched.h`, the same
/// since Linux 2.6).
const FORKED_NO_EXEC: u32 = 0x40;

/// A process that holds device files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Pid as the host sees it.
    pub host_pid: i32,
    /// Pid as the job sees it.
    pub pid: i32,
    /// True if the process was forked and has not executed a program since. It may have inherited all its device files
    /// from its parent.
    pub forked: bool,
    /// Number of descriptors.
    pub open: usize,
    /// Number of mappings.
    pub mapped: usize,
}

/// Returns the major numbers of the character devices of all drivers whose names begin with `prefix`. Empty if there is
/// no such driver or the list cannot be read.
#[must_use]
pub fn majors(prefix: &str) -> Vec<u32> {
    fs::read_to_string(DRIVERS).map_or_else(|_| Vec::new(), |list| majors_in(&list, prefix))
}

fn majors_in(list: &str, prefix: &str) -> Vec<u32> {
    let mut found: Vec<u32> = list
        .lines()
        .skip_while(|line| *line != "Character devices:")
        .skip(1)
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.trim_start().split_once(' '))
        .filter(|(_, driver)| driver.starts_with(prefix))
        .filter_map(|(major, _)| major.parse().ok())
        .collect();
    found.dedup();
    found
}

/// Returns the processes that have a character device with one of these numbers open or mapped. `open` are the
/// descriptors of all processes.
///
/// A process that exits during the search is left out.
///
/// # Errors
/// A process cannot be inspected.
pub fn holders(open: &[Descriptors], majors: &[u32]) -> Result<Vec<Holder>, TreeError> {
    if majors.is_empty() {
        return Ok(Vec::new());
    }
    let mut search = Search {
        majors,
        mapped: HashMap::new(),
    };
    let mut found = Vec::new();
    for one in open {
        match search.look_into(one) {
            Ok(holder) => found.extend(holder.filter(|one| one.open + one.mapped > 0)),
            Err(ProcError::NotFound(_)) => {}
            Err(source) => {
                let pid = one.process.host_pid;
                return Err(TreeError::Process { pid, source });
            }
        }
    }
    Ok(found)
}

struct Search<'a> {
    majors: &'a [u32],
    /// Cache by device and inode numbers; the value is true for a device. Processes often map the same files.
    mapped: HashMap<((i32, i32), u64), bool>,
}

impl Search<'_> {
    fn look_into(
        &mut self,
        Descriptors { process, all }: &Descriptors,
    ) -> Result<Option<Holder>, ProcError> {
        let pid = process.host_pid;
        let entry = ProcessEntry::new(pid)?;
        let files = all.iter().filter_map(|one| one.metadata());
        let open = files.filter(|file| self.is_device(file)).count();
        let mut mapped = 0;
        for map in tree::maps(pid)? {
            let MMapPath::Path(_) = map.pathname else {
                continue;
            };
            let known = self.mapped.get(&(map.dev, map.inode)).copied();
            let is_device = known.unwrap_or_else(|| {
                // The link leads to the file without opening it.
                let file = fs::metadata(map_link(pid, &map));
                let is_device = file.is_ok_and(|file| self.is_device(&file));
                self.mapped.insert((map.dev, map.inode), is_device);
                is_device
            });
            mapped += usize::from(is_device);
        }
        Ok(Some(Holder {
            host_pid: pid,
            pid: process.pid,
            forked: entry.stat()?.flags & FORKED_NO_EXEC != 0,
            open,
            mapped,
        }))
    }

    fn is_device(&self, file: &Metadata) -> bool {
        file.file_type().is_char_device()
            && u32::try_from(major(file.rdev())).is_ok_and(|major| self.majors.contains(&major))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};

    use super::super::tree::{is_alive, tree};
    use super::*;

    const LIST: &str = "Character devices:\n  1 mem\n195 nvidia\n195 nvidia-modeset\n195 nvidiactl\n\
        226 drm\n238 nvidia-uvm\n241 nvidia-caps\n\nBlock devices:\n  7 nvidia-loop\n259 blkext\n";

    #[test]
    fn the_numbers_of_the_drivers_character_devices_are_found() {
        assert_eq!(majors_in(LIST, "nvidia"), [195, 238, 241]);
        assert_eq!(majors_in(LIST, "mem"), [1]);
        for nothing in ["", "Character devices:\n", "x\n195 nvidia\n", "\0\n"] {
            assert!(majors_in(nothing, "nvidia").is_empty(), "{nothing:?}");
        }
        assert!(majors_in("Character devices:\nnvidia nvidia\n-1 nvidia\n", "nvidia").is_empty());
        assert_eq!(majors("mem"), [1]);
    }

    #[test]
    fn processes_with_a_device_open_or_mapped_are_found() {
        let script = "import mmap, os; f = os.open('/dev/zero', os.O_RDWR)\n\
            m = mmap.mmap(f, 8192, mmap.MAP_PRIVATE); os.close(f); n = os.open('/dev/null', os.O_RDONLY)\n\
            r, w = os.pipe(); child = os.fork()\n\
            if child == 0: os.close(r); os.write(w, b'x')\n\
            else: os.read(r, 1); print(child, flush=True)\n\
            os.read(0, 1)";
        let mut job = Command::new("python3");
        job.args(["-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0);
        let mut job = job.spawn().unwrap();
        let mut line = String::new();
        std::io::BufRead::read_line(
            &mut std::io::BufReader::new(job.stdout.take().unwrap()),
            &mut line,
        )
        .unwrap();
        let pid = i32::try_from(job.id()).unwrap();
        let child: i32 = line.trim().parse().unwrap();
        let processes = tree(pid).unwrap();
        let open = Descriptors::of_all(&processes).unwrap();
        let found = holders(&open, &majors("mem")).unwrap();
        let none = holders(&open, &[195]).unwrap();
        drop(job.stdin.take());
        job.wait().unwrap();
        while is_alive(child) {
            std::thread::yield_now();
        }

        let [parent, worker] = found[..] else {
            panic!("{found:?}");
        };
        assert_eq!((parent.host_pid, worker.host_pid), (pid, child));
        assert!(!parent.forked && worker.forked);
        // stderr and one more descriptor are /dev/null; the mapping holds a separate file.
        assert!(parent.open >= 3 && parent.open == worker.open, "{found:?}");
        assert_eq!((parent.mapped, worker.mapped), (1, 1));
        assert!(none.is_empty());
        let open = Descriptors::of_present(&processes);
        assert!(holders(&open, &[1]).unwrap().is_empty(), "all ended");
    }
}
