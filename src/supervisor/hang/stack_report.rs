//! A report about a hung job: the kernel's facts about its threads, and their stacks if py-spy, eu-stack or gdb is
//! installed.
//!
//! Blocks as long as those tools take, within limits. The tools stop the job for a moment and change nothing in it.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::clock;
use crate::config::{HookCommand, Occasion};
use crate::job::{self, Process};
use crate::run::program;
use crate::run::run_context::RunContext;
use crate::run::running_job::Job;
use crate::supervisor::hooks::hook_command::{self, Call, Outcome};
use crate::supervisor::hooks::process_group::HookGroup;

/// Processes whose stacks are asked for: ranks hang together.
const TRACED_MAX: usize = 8;
/// Time for each of those: reading the symbols of a large program takes a debugger some seconds.
const TRACE_LIMIT: Duration = Duration::from_secs(10);
/// Time for all of them: a request to stop waits for it.
const TRACES_LIMIT: Duration = Duration::from_secs(30);
const TRACE_LINES_MAX: usize = 4000;
const FRAMES_MAX: &str = "thread apply all -q backtrace 64";
const LOG_BYTES_MAX: u64 = 8 << 20;

pub(crate) fn write(context: &RunContext, job: &Job, why: &str) -> io::Result<PathBuf> {
    let root = job::child_with_pid(job.sandbox.pid(), job.pids.root);
    let processes = root.and_then(job::tree).map_err(io::Error::other)?;
    let path = context.log("hang", "job");
    let file = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)?;
    let mut log = Bounded {
        file,
        left: LOG_BYTES_MAX,
    };
    writeln!(log, "the job hangs: {why}")?;
    job::write_stacks(&processes, &mut log)?;
    let begun = clock::now();
    let of_the_job = processes.iter().filter(|one| one.pid != job.pids.root);
    for process in of_the_job.take(TRACED_MAX) {
        if begun.elapsed() < TRACES_LIMIT {
            trace(*process, &mut log)?;
        }
    }
    Ok(path)
}

/// Adds the stacks of a process, by the first tool that prints them.
fn trace(process: Process, log: &mut impl Write) -> io::Result<()> {
    for (tool, words) in tools(process.host_pid) {
        if program::check(tool.as_ref()).is_err() {
            continue;
        }
        writeln!(log, "\nprocess {}, {tool}:", process.pid)?;
        let call = Call {
            occasion: Occasion::OnHang,
            command: HookCommand::Words(words),
            hook_group: Arc::new(HookGroup::new(TRACE_LIMIT)),
            lines_max: TRACE_LINES_MAX,
            directory: "/".into(),
            // Symbols from the network are not worth the wait.
            facts: vec![("DEBUGINFOD_URLS", "".into())],
        };
        let mut written = Ok(());
        let ended = hook_command::run(&call, |line| {
            if written.is_ok() {
                written = writeln!(log, "  {line}");
            }
        });
        written?;
        match ended.outcome {
            Outcome::Done => return Ok(()),
            Outcome::Veto => writeln!(log, "  (failed: exit code 75)")?,
            Outcome::Failed(why) => writeln!(log, "  (failed: {why})")?,
            Outcome::TimedOut => writeln!(log, "  (killed after {TRACE_LIMIT:?})")?,
        }
    }
    Ok(())
}

/// Returns the command lines that print the stacks of a process, the best first. None of them prints values, which
/// belong to the job.
fn tools(pid: i32) -> Vec<(&'static str, Vec<String>)> {
    let pid = pid.to_string();
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
    let mut tools = Vec::new();
    let program = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    if is_python(&program) {
        tools.push((
            "py-spy",
            words(&["py-spy", "dump", "--nonblocking", "--pid", &pid]),
        ));
    }
    tools.push(("eu-stack", words(&["eu-stack", "-p", &pid])));
    let gdb = [
        "gdb",
        "-nx",
        "-batch",
        "-p",
        &pid,
        "-ex",
        "set print frame-arguments none",
        "-ex",
        FRAMES_MAX,
    ];
    tools.push(("gdb", words(&gdb)));
    tools
}

fn is_python(program: &Path) -> bool {
    let name = program.file_name().unwrap_or_default();
    name.to_string_lossy().starts_with("python")
}

/// A file of bounded size; what is beyond is dropped.
struct Bounded {
    file: File,
    left: u64,
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let fits = bytes
            .len()
            .min(usize::try_from(self.left).unwrap_or(usize::MAX));
        self.file.write_all(&bytes[..fits])?;
        self.left -= fits as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_has_no_more_than_its_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mut log = Bounded {
            file: File::create(&path).unwrap(),
            left: 10,
        };
        for _ in 0..100 {
            log.write_all(b"123").unwrap();
        }
        assert_eq!(std::fs::read(path).unwrap(), b"1231231231");
    }

    #[test]
    fn a_python_program_is_asked_by_py_spy_first() {
        assert!(is_python(Path::new("/usr/bin/python3.11")));
        assert!(!is_python(Path::new("/usr/bin/sleep")));
        let own = i32::try_from(std::process::id()).unwrap();
        assert_eq!(tools(own)[0].0, "eu-stack");
    }
}
