//! Checks of an image against this machine that need only its facts, and no byte of its streams: an image that is
//! elsewhere is refused before anything of it is downloaded.

use std::path::Path;

use super::bundled_files::is_part;
use super::error::RestoreError;
use crate::job::{self, OpenFile, OtherBytes};
use crate::run::cpu_facts::CpuFacts;
use crate::run::image_facts::ImageFacts;

/// Limit on the instructions that are named.
const NAMED_MAX: usize = 8;

/// Checks that the working folder has not been renamed since the snapshot: the job would continue in a new one. `started`
/// is its path at this program's start, which has stayed in it.
pub(super) fn check_folder(facts: &ImageFacts, started: &Path) -> Result<(), RestoreError> {
    let now = std::env::current_dir().ok().filter(|now| now != started);
    let is_needed = || facts.nodes.iter().any(|node| node.path == started);
    match now {
        Some(now) if is_needed() => Err(RestoreError::Renamed {
            then: started.to_owned(),
            now,
        }),
        Some(_) | None => Ok(()),
    }
}

/// Checks the processor.
pub(super) fn check_cpu(facts: &ImageFacts) -> Result<(), RestoreError> {
    let (Some(then), now) = (&facts.cpu, CpuFacts::of_this_machine()) else {
        return Ok(());
    };
    let missing = then.missing_in(now);
    // Without any, the list of this machine could not be read.
    if missing.is_empty() || now.instructions.is_empty() {
        return Ok(());
    }
    Err(RestoreError::Cpu {
        missing: named(&missing),
        then: then.model.clone(),
        now: now.model.clone(),
    })
}

fn named(instructions: &[String]) -> String {
    let first = &instructions[..instructions.len().min(NAMED_MAX)];
    match instructions.len() - first.len() {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}

/// Checks the files that the job only reads or maps, such as libraries, unless the image puts them back.
pub(super) fn check_read_files(
    facts: &ImageFacts,
    other_bytes: OtherBytes,
) -> Result<(), RestoreError> {
    let files = facts.files.iter().enumerate();
    let read = files.filter(|(position, file)| {
        !file.written() && !facts.kept_open.contains(position) && !is_part(file)
    });
    let read: Vec<&OpenFile> = read.map(|(_, file)| file).collect();
    job::plan(read.iter().copied(), &[], other_bytes, |path| path)?;
    Ok(job::check_unwritten(read)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_instructions_are_named_in_part() {
        let instructions = |count: usize| -> Vec<String> {
            let names = (0..count).map(|number| format!("i{number}"));
            names.collect()
        };
        assert_eq!(named(&instructions(2)), "i0, i1");
        assert!(named(&instructions(8)).ends_with(", i7"));
        assert!(named(&instructions(10)).ends_with(", i7 and 2 more"));
    }
}
