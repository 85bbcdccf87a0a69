//! The clocks that count from the machine's boot (`CLOCK_MONOTONIC`, `CLOCK_BOOTTIME`), which a restored job must find
//! where the snapshot left them: after a reboot, or on another machine, a wait until a time of the monotonic clock could
//! last for months.
//!
//! The kernel gives a time namespace its own values (Linux 5.6). CRIU creates one at a restore, but not without privileges
//! on the machine (`opts.unprivileged` in `prepare_timens`, CRIU 4.2). There, pid 1 of the sandbox does so.

use std::fmt::{self, Display};
use std::fs;
use std::io;

use nix::libc;
use nix::sched::{CloneFlags, unshare};
use serde::{Deserialize, Serialize};

use crate::clock;

const NANOS: i64 = 1_000_000_000;

/// Values of both clocks, or differences of them, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clocks {
    /// `CLOCK_MONOTONIC`.
    pub monotonic_ns: i64,
    /// `CLOCK_BOOTTIME`.
    pub boottime_ns: i64,
}

impl Clocks {
    /// Reads the clocks as the children of a process (a host pid) see them.
    ///
    /// # Errors
    /// The process has exited.
    pub fn of(pid: i32) -> io::Result<Self> {
        Ok(Self::of_the_kernel()?.plus(offsets(pid)?))
    }

    /// Returns the offsets with which the clocks of a new time namespace continue from here.
    pub(crate) fn offsets(self) -> io::Result<Self> {
        Ok(self.plus(Self::of_the_kernel()?.negated()))
    }

    /// Returns the difference to earlier values.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        self.plus(earlier.negated())
    }

    /// Reads the clocks without the offsets of this process's time namespace.
    fn of_the_kernel() -> io::Result<Self> {
        let [monotonic_ns, boottime_ns] = [clock::monotonic(), clock::since_boot()]
            .map(|time| i64::try_from(time.as_nanos()).unwrap_or(i64::MAX));
        let here = Self {
            monotonic_ns,
            boottime_ns,
        };
        Ok(here.plus(offsets("self")?.negated()))
    }

    fn plus(self, other: Self) -> Self {
        Self {
            monotonic_ns: self.monotonic_ns.saturating_add(other.monotonic_ns),
            boottime_ns: self.boottime_ns.saturating_add(other.boottime_ns),
        }
    }

    fn negated(self) -> Self {
        Self {
            monotonic_ns: self.monotonic_ns.saturating_neg(),
            boottime_ns: self.boottime_ns.saturating_neg(),
        }
    }

    /// Creates a time namespace with these offsets for the future children of this process.
    pub(super) fn offset_children(self) -> io::Result<()> {
        // nix does not list the flag.
        unshare(CloneFlags::from_bits_retain(libc::CLONE_NEWTIME))?;
        fs::write("/proc/self/timens_offsets", self.to_string())
    }
}

/// The form in which the kernel takes offsets.
impl Display for Clocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (clock, value) in [
            (libc::CLOCK_MONOTONIC, self.monotonic_ns),
            (libc::CLOCK_BOOTTIME, self.boottime_ns),
        ] {
            let (seconds, nanos) = (value.div_euclid(NANOS), value.rem_euclid(NANOS));
            writeln!(f, "{clock} {seconds} {nanos}")?;
        }
        Ok(())
    }
}

/// Reads the offsets of the children of a process; zeros if the kernel has no time namespaces.
fn offsets(process: impl Display) -> io::Result<Clocks> {
    let list =
        |process: &dyn Display| fs::read_to_string(format!("/proc/{process}/timens_offsets"));
    let list = match list(&process) {
        Err(_) if list(&"self").is_err_and(|error| error.kind() == io::ErrorKind::NotFound) => {
            return Ok(Clocks::default());
        }
        list => list?,
    };
    // That of a process that has exited is empty.
    parse(&list).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn parse(list: &str) -> Option<Clocks> {
    let offset = |name: &str| {
        let mut lines = list.lines().map(str::split_whitespace);
        let mut words = lines.find_map(|mut words| (words.next()? == name).then_some(words))?;
        let mut number = || words.next()?.parse::<i64>().ok();
        Some(number()?.saturating_mul(NANOS).saturating_add(number()?))
    };
    Some(Clocks {
        monotonic_ns: offset("monotonic")?,
        boottime_ns: offset("boottime")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_read_and_written_as_the_kernel_does() {
        let offsets = Clocks {
            monotonic_ns: -1_500_000_000,
            boottime_ns: 7_000_000_009,
        };
        assert_eq!(offsets.to_string(), "1 -2 500000000\n7 7 9\n");
        let list = "monotonic           -2 500000000\nboottime             7         9\n";
        assert_eq!(parse(list), Some(offsets));
        assert_eq!(parse("monotonic x\n"), None);
        assert_eq!(parse(""), None);
    }

    #[test]
    fn clocks_of_this_process_continue() {
        let me = i32::try_from(std::process::id()).unwrap();
        let (first, second) = (Clocks::of(me).unwrap(), Clocks::of(me).unwrap());
        let passed = second.since(first);
        assert!((0..NANOS).contains(&passed.monotonic_ns), "{passed:?}");
        assert!((0..NANOS).contains(&passed.boottime_ns), "{passed:?}");
        assert!(Clocks::of(i32::MAX).is_err());
        let extreme = Clocks {
            monotonic_ns: i64::MIN,
            boottime_ns: i64::MAX,
        };
        // Of a hostile image: no overflow.
        assert!(extreme.since(second).offsets().is_ok());
    }
}
