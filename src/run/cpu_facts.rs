//! Instructions of the processor. A restored job continues to use them.
//!
//! Programs choose their instructions at their start by what the processor has. A processor without one of them kills
//! the restored job with SIGILL, at any time.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

/// Limit on what is read of the list of processors: the first one takes 4 KiB.
const LIST_BYTES_MAX: u64 = 64 << 10;

/// Families of instructions that user programs can choose, as the kernel names them.
const FAMILIES: [&str; 2] = ["amx_", "avx"];
/// Further instructions of this kind.
const INSTRUCTIONS: [&str; 37] = [
    "3dnow",
    "3dnowext",
    "abm",
    "adx",
    "aes",
    "bmi1",
    "bmi2",
    "clflushopt",
    "clwb",
    "cx16",
    "f16c",
    "fma",
    "fma4",
    "gfni",
    "movbe",
    "movdir64b",
    "movdiri",
    "pclmulqdq",
    "pni",
    "popcnt",
    "rdpid",
    "rdrand",
    "rdseed",
    "rdtscp",
    "rtm",
    "serialize",
    "sha_ni",
    "sse4_1",
    "sse4_2",
    "sse4a",
    "ssse3",
    "vaes",
    "vpclmulqdq",
    "waitpkg",
    "xop",
    "xsavec",
    "xsaveopt",
];

/// A machine's processor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuFacts {
    /// Its model.
    pub model: String,
    /// The instructions that it has.
    pub instructions: BTreeSet<String>,
}

impl CpuFacts {
    /// Returns the processor of this machine; one without instructions if it cannot be read.
    pub(crate) fn of_this_machine() -> &'static Self {
        static CPU: OnceLock<CpuFacts> = OnceLock::new();
        CPU.get_or_init(|| read().map_or_else(|_| Self::default(), |list| Self::parse(&list)))
    }

    /// Reads the first processor of a list in the form of `/proc/cpuinfo`.
    fn parse(list: &str) -> Self {
        let value = |name: &str| {
            let mut lines = list.lines().filter_map(|line| line.split_once(':'));
            let found = lines.find(|(key, _)| key.trim() == name);
            found.map_or("", |(_, value)| value.trim())
        };
        let flags = value("flags").split_whitespace();
        let is_chosen = |flag: &&str| {
            INSTRUCTIONS.contains(flag) || FAMILIES.iter().any(|family| flag.starts_with(family))
        };
        Self {
            model: value("model name").to_owned(),
            instructions: flags.filter(is_chosen).map(str::to_owned).collect(),
        }
    }

    /// Returns the instructions that `other` lacks.
    pub(crate) fn missing_in(&self, other: &Self) -> Vec<String> {
        let missing = self.instructions.difference(&other.instructions);
        missing.cloned().collect()
    }
}

fn read() -> io::Result<String> {
    let mut list = String::new();
    let file = File::open("/proc/cpuinfo")?;
    file.take(LIST_BYTES_MAX).read_to_string(&mut list)?;
    Ok(list)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_that_programs_choose_are_compared() {
        let cpu = |flags: &str| {
            CpuFacts::parse(&format!(
                "processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\nflags\t\t: {flags}\nbugs\t\t:\n\nflags\t\t: avx\n"
            ))
        };
        let (new, old) = (
            cpu("fpu aes avx avx2 avx512f constant_tsc"),
            cpu("fpu avx arch_perfmon"),
        );
        assert_eq!(new.model, "Some CPU @ 3 GHz");
        assert_eq!(new.missing_in(&old), ["aes", "avx2", "avx512f"]);
        assert!(old.missing_in(&new).is_empty());
    }

    #[test]
    fn this_machine_has_instructions() {
        assert!(!CpuFacts::of_this_machine().instructions.is_empty());
    }
}
