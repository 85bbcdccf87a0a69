//! An image in words.

use std::fmt::{self, Write as _};

use super::show::Shown;
use crate::cli::print::plain;
use crate::files::Kept;
use crate::job::{Access, MemoryUse, OpenFile, ProcessAccount};
use crate::run::{CudaFacts, GpuFacts, ImageFacts, StreamKind, Trigger, size};
use crate::store::WorkShares;

/// Limit on the indentation of a process in the tree, in levels.
const INDENT_MAX: usize = 16;
/// Limit on the shown processes, equal to the limit of an image.
const SHOWN_MAX: usize = 512;

pub(super) fn text(image: &Shown<'_>) -> Result<String, fmt::Error> {
    let mut out = String::new();
    head(&mut out, image)?;
    let facts = image.facts;
    processes(&mut out, facts)?;
    if let Some(memory) = image.memory {
        writeln!(out, "memory     {}", used(memory))?;
    }
    match &facts.cuda {
        Some(cuda) => gpus(&mut out, cuda)?,
        None => writeln!(out, "cuda       none")?,
    }
    writeln!(
        out,
        "made with  CRIU {}, Linux {}",
        facts.criu, facts.kernel
    )?;
    sockets(&mut out, facts)?;
    files(&mut out, facts)?;
    if let Some(kept) = &facts.kept {
        kept_files(&mut out, kept)?;
    }
    Ok(out)
}

fn head(out: &mut String, image: &Shown<'_>) -> fmt::Result {
    let facts = image.facts;
    writeln!(out, "image      {}", image.id)?;
    if let Some(reason) = image.damaged {
        writeln!(out, "damaged    {reason}")?;
    }
    if image.pinned {
        writeln!(out, "pinned     {}", image.note.as_deref().unwrap_or("yes"))?;
    }
    writeln!(
        out,
        "created    {} on {} ({})",
        image.created,
        facts.host,
        who(facts.trigger)
    )?;
    writeln!(out, "command    {}", plain(&facts.command.to_string()))?;
    writeln!(out, "directory  {}", facts.directory.display())?;
    writeln!(
        out,
        "size       {}, {} stored",
        size(image.raw_bytes),
        size(image.stored_bytes)
    )?;
    for kind in StreamKind::ALL {
        let streams = image.streams.iter().filter(|stream| stream.kind == kind);
        let (count, bytes) = streams.fold((0, 0), |(count, bytes), stream| {
            (count + 1, bytes + stream.bytes)
        });
        if count > 0 {
            let kind = kind.as_str();
            writeln!(out, "  {kind:<8} {}, streams: {count}", size(bytes))?;
        }
    }
    writeln!(out, "freeze     {:.3} s", facts.freeze_seconds)?;
    for phase in &facts.phases {
        writeln!(out, "  {:<8} {:.3} s", phase.name, phase.seconds)?;
    }
    match &facts.writing {
        Some(shares) => writeln!(out, "writing    {}", in_percent(shares)),
        None => Ok(()),
    }
}

/// Returns the shares of the writing threads' time, the largest first: it bounded the time until the image was durable.
fn in_percent(shares: &WorkShares) -> String {
    let mut named = [
        ("waiting for copies and CRIU", shares.input),
        ("hash", shares.hash),
        ("compression", shares.compression),
        ("disk", shares.disk),
    ];
    named.sort_by(|one, other| other.1.total_cmp(&one.1));
    let words = named.map(|(name, share)| format!("{name} {:.0} %", share * 100.0));
    words.join(", ")
}

/// Returns the origin of the snapshot.
fn who(trigger: Trigger) -> &'static str {
    match trigger {
        Trigger::Schedule => "schedule",
        Trigger::Signal => "signal: SIGUSR1",
        Trigger::Request => "request: ckpt-run snapshot",
        Trigger::Stop => "stop: ckpt-run stop, SIGUSR2 or SIGTERM",
    }
}

/// Writes the tree, each process below its parent.
fn processes(out: &mut String, facts: &ImageFacts) -> fmt::Result {
    writeln!(out, "processes  {}", facts.processes)?;
    let shown = facts.process_tree.len().min(SHOWN_MAX);
    for (depth, process) in in_order(&facts.process_tree[..shown]) {
        let indent = 2 * depth.min(INDENT_MAX);
        writeln!(
            out,
            "  {:>7} {:indent$}{} [threads {}, {}]",
            process.pid,
            "",
            command_line(process),
            process.threads,
            used(process.memory)
        )?;
    }
    if shown > 0 && shown < facts.processes {
        writeln!(out, "          and {} more", facts.processes - shown)?;
    }
    Ok(())
}

/// Returns each process with its depth, children after their parents; processes with an unknown parent are roots. A
/// list read from disk may be inconsistent, for example with a process as its own ancestor; each process is returned
/// once.
fn in_order(tree: &[ProcessAccount]) -> Vec<(usize, &ProcessAccount)> {
    let is_child_of = |child: &ProcessAccount, parent: &ProcessAccount| {
        child.parent == parent.pid && child.pid != parent.pid
    };
    let mut left: Vec<Option<&ProcessAccount>> = tree.iter().map(Some).collect();
    let mut ordered = Vec::with_capacity(tree.len());
    let roots_first = (0..tree.len())
        .filter(|at| !tree.iter().any(|parent| is_child_of(&tree[*at], parent)))
        .chain(0..tree.len());
    for root in roots_first {
        let mut open = vec![(0, root)];
        while let Some((depth, at)) = open.pop() {
            let Some(process) = left[at].take() else {
                continue;
            };
            ordered.push((depth, process));
            let children = (0..tree.len()).filter(|child| is_child_of(&tree[*child], process));
            open.extend(children.rev().map(|child| (depth + 1, child)));
        }
    }
    ordered
}

fn command_line(process: &ProcessAccount) -> String {
    if process.arguments.is_empty() {
        return format!("({})", plain(&process.name));
    }
    let more = if process.cut { " …" } else { "" };
    format!("{}{more}", plain(&process.arguments.join(" ")))
}

fn used(memory: MemoryUse) -> String {
    let kinds = [
        ("anonymous", memory.anonymous),
        ("files", memory.file),
        ("shared", memory.shared),
        ("swapped", memory.swapped),
    ];
    let some: Vec<String> = kinds
        .into_iter()
        .filter(|(_, bytes)| *bytes > 0)
        .map(|(kind, bytes)| format!("{kind} {}", size(bytes)))
        .collect();
    if some.is_empty() {
        return "no memory".to_owned();
    }
    some.join(", ")
}

fn gpus(out: &mut String, cuda: &CudaFacts) -> fmt::Result {
    let gpus: Vec<String> = cuda.gpus.iter().map(described).collect();
    writeln!(
        out,
        "cuda       {} processes, driver {}, {}",
        cuda.pids.len(),
        cuda.driver,
        gpus.join(", ")
    )?;
    let pids: Vec<String> = cuda.pids.iter().map(i32::to_string).collect();
    writeln!(out, "  pids     {}", pids.join(" "))?;
    if let Some(resident) = &cuda.resident {
        writeln!(out, "  resident {}", size(resident.bytes()))?;
    }
    Ok(())
}

/// Formats a GPU as `NVIDIA H200 (GPU-…) 1.5 GiB in use`, with the facts that the image has.
fn described(gpu: &GpuFacts) -> String {
    let used = gpu
        .used_bytes
        .map(|bytes| format!(" {} in use", size(bytes)));
    let used = used.unwrap_or_default();
    if gpu.name.is_empty() {
        return format!("{}{used}", gpu.uuid);
    }
    format!("{} ({}){used}", gpu.name, gpu.uuid)
}

fn sockets(out: &mut String, facts: &ImageFacts) -> fmt::Result {
    let sockets = &facts.sockets;
    for address in &sockets.listening {
        writeln!(out, "listens    {address}")?;
    }
    for (local, remote) in &sockets.connections {
        writeln!(out, "connected  {local} to {remote}, within the job")?;
    }
    for (local, remote) in &sockets.outside {
        writeln!(out, "connected  {local} to {remote}, outside of the job")?;
    }
    Ok(())
}

/// Writes the image's content of files that the job writes.
fn kept_files(out: &mut String, kept: &Kept) -> fmt::Result {
    writeln!(
        out,
        "keeps      {} files of the job ({}, {} unchanged since the last image), frozen {:.3} s for them",
        kept.files,
        size(kept.bytes),
        kept.unread,
        kept.freeze_seconds
    )?;
    if kept.held > 0 {
        writeln!(
            out,
            "holds      {} large files in the store's folder `held` ({})",
            kept.held,
            size(kept.held_bytes)
        )?;
    }
    for (path, bytes, reason) in &kept.named {
        let path = path.display().to_string();
        writeln!(out, "not kept   {} ({bytes} bytes): {reason}", plain(&path))?;
    }
    if kept.unkept > kept.named.len() {
        let more = kept.unkept - kept.named.len();
        writeln!(out, "not kept   and {more} more")?;
    }
    if let Some(gap) = &kept.gap {
        writeln!(
            out,
            "unknown    which process changed which file: {}",
            plain(gap)
        )?;
    }
    Ok(())
}

/// Writes the open files; files that are only mapped (programs and libraries) are counted.
fn files(out: &mut String, facts: &ImageFacts) -> fmt::Result {
    for file in &facts.files {
        let Some(verb) = verb(file) else { continue };
        let (path, bytes) = (file.path.display().to_string(), file.size);
        writeln!(out, "{verb:<10} {} ({bytes} bytes)", plain(&path))?;
    }
    let mapped = facts.files.iter().filter(|file| verb(file).is_none());
    writeln!(out, "maps       {} files", mapped.count())
}

fn verb(file: &OpenFile) -> Option<&'static str> {
    match file.access {
        Access::Read => Some("reads"),
        Access::Write | Access::Update => Some("writes"),
        Access::Map => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: i32, parent: i32) -> ProcessAccount {
        ProcessAccount {
            pid,
            parent,
            threads: 1,
            name: "x\x1b[2J".to_owned(),
            arguments: Vec::new(),
            cut: false,
            memory: MemoryUse::default(),
        }
    }

    fn order(tree: &[(i32, i32)]) -> Vec<(usize, i32)> {
        let tree: Vec<_> = tree
            .iter()
            .map(|(pid, ppid)| process(*pid, *ppid))
            .collect();
        let ordered = in_order(&tree).into_iter();
        ordered
            .map(|(depth, process)| (depth, process.pid))
            .collect()
    }

    #[test]
    fn children_come_behind_their_parents() {
        assert_eq!(
            order(&[(1, 0), (300, 1), (301, 1), (302, 300)]),
            [(0, 1), (1, 300), (2, 302), (1, 301)]
        );
    }

    #[test]
    fn a_tree_that_cannot_be_one_is_shown_once_all_the_same() {
        assert_eq!(order(&[(1, 2), (2, 1)]), [(0, 1), (1, 2)]);
        assert_eq!(order(&[(1, 1), (1, 1), (7, 9)]).len(), 3);
    }

    #[test]
    fn names_do_not_steer_a_terminal() {
        assert_eq!(command_line(&process(1, 0)), "(x [2J)");
    }
}
