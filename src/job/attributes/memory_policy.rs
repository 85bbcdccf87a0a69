#![allow(
    unsafe_code,
    reason = "the policy of this thread, which no library has"
)]
//! Memory policy of a thread: the NUMA nodes from which the kernel allocates its memory.

use std::fs::File;
use std::io::Read;

use nix::libc;
use serde::{Deserialize, Serialize};

/// Bytes read from `numa_maps`. The kernel checks every page of each mapping that it reports, and reports only as many
/// mappings as the reader requests.
const FIRST_LINE_BYTES: u64 = 64;
/// Words for the nodes of this thread's policy: kernels know up to 1024 nodes.
const OWN_WORDS: usize = 16;
/// Names and numbers of the modes (Linux, `policy_modes`). A name precedes its own prefixes.
const MODES: [(&str, u32); 7] = [
    ("default", 0),
    ("prefer (many)", 5),
    ("prefer", 1),
    ("bind", 2),
    ("interleave", 3),
    ("local", 4),
    ("weighted interleave", 6),
];
/// Flags of a mode.
const FLAGS: [(&str, u32); 3] = [
    ("static", 1 << 15),
    ("relative", 1 << 14),
    ("balancing", 1 << 13),
];

/// Mode and nodes, in the form of `set_mempolicy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryPolicy {
    /// The mode with its flags.
    pub mode: u32,
    /// Bit mask of the first 64 nodes.
    pub nodes: u64,
}

impl MemoryPolicy {
    /// Returns the policy of a thread, by its host thread id. The first mapping of a process is its program, for which
    /// the kernel reports the thread's policy.
    pub(super) fn of(thread: i32) -> Option<Self> {
        let mut line = String::new();
        let file = File::open(format!("/proc/{thread}/task/{thread}/numa_maps")).ok()?;
        file.take(FIRST_LINE_BYTES).read_to_string(&mut line).ok()?;
        Self::parse(line.split_once(' ')?.1)
    }

    /// Parses the text after the address of a mapping.
    fn parse(text: &str) -> Option<Self> {
        let (rest, mut mode) = MODES
            .iter()
            .find_map(|(name, mode)| Some((text.strip_prefix(name)?, *mode)))?;
        let rest = rest.split([' ', '\n']).next()?;
        let (flags, nodes) = rest.split_once(':').unwrap_or((rest, ""));
        for flag in flags.trim_start_matches('=').split('|') {
            let known = FLAGS.iter().find(|(name, _)| *name == flag);
            match known {
                Some((_, bit)) => mode |= bit,
                None if flag.is_empty() => {}
                None => return None,
            }
        }
        let mut set = 0;
        for range in nodes.split(',').filter(|range| !range.is_empty()) {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            for node in first.parse::<u32>().ok()?..=last.parse().ok()? {
                set |= 1_u64.checked_shl(node)?;
            }
        }
        Some(Self { mode, nodes: set })
    }
}

/// Returns the policy of this thread.
pub(super) fn own_memory_policy() -> Option<MemoryPolicy> {
    let (mut mode, mut nodes) = (0_u32, [0_u64; OWN_WORDS]);
    let bits = u64::BITS as usize * OWN_WORDS;
    // SAFETY: there is room for the mode and for so many bits; the address is not used.
    let result = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            &raw mut mode,
            nodes.as_mut_ptr(),
            bits,
            0,
            0,
        )
    };
    let [nodes, rest @ ..] = nodes;
    (result == 0 && rest == [0; OWN_WORDS - 1]).then_some(MemoryPolicy { mode, nodes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_is_read_as_the_kernel_writes_it() {
        for (text, expected) in [
            ("default file=/usr/bin/x mapped=3", Some((0, 0))),
            ("bind:0-1,3 file=/usr/bin/x", Some((2, 0b1011))),
            ("interleave=static:0 file=", Some((3 | 1 << 15, 1))),
            ("prefer (many):1 anon=3", Some((5, 2))),
            ("prefer:63", Some((1, 1 << 63))),
            ("weighted interleave:0 ", Some((6, 1))),
            ("bind=relative|balancing:2\n", Some((2 | 3 << 13, 4))),
            ("local", Some((4, 0))),
            ("prefer:64", None),
            ("bind=new:0", None),
            ("unheard:0", None),
            ("", None),
        ] {
            let expected = expected.map(|(mode, nodes)| MemoryPolicy { mode, nodes });
            assert_eq!(MemoryPolicy::parse(text), expected, "{text}");
        }
    }
}
