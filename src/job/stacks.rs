//! State of a job's threads as the kernel reports it, for the report about a hung job.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

use super::tree::Process;

/// Limit on the described threads. This number is enough to diagnose a larger job.
const THREADS_MAX: usize = 2048;
/// Limit on the bytes read from one file of `/proc`.
const FILE_BYTES_MAX: u64 = 16 << 10;

/// Writes the state of the threads of these processes: state, wait channel, system call and kernel stack, with the
/// command lines of processes. Processes and threads that have exited are left out.
///
/// # Errors
/// `log` cannot be written.
pub fn write_stacks(processes: &[Process], log: &mut impl Write) -> io::Result<()> {
    let mut left = THREADS_MAX;
    for process in processes {
        let folder = format!("/proc/{}", process.host_pid);
        let line = read(Path::new(&folder), "cmdline").replace('\0', " ");
        writeln!(
            log,
            "\nprocess {} (here {}), {} bytes resident: {}",
            process.pid,
            process.host_pid,
            process.resident,
            line.trim_end()
        )?;
        let Ok(tasks) = fs::read_dir(format!("{folder}/task")) else {
            continue;
        };
        for task in tasks.flatten() {
            if left == 0 {
                return writeln!(
                    log,
                    "\n(more than {THREADS_MAX} threads; the rest is omitted)"
                );
            }
            left -= 1;
            write_thread(&task.path(), log)?;
        }
    }
    Ok(())
}

fn write_thread(task: &Path, log: &mut impl Write) -> io::Result<()> {
    let status = read(task, "status");
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.map(str::trim).unwrap_or_default().to_owned()
    };
    let inside = field("NSpid:");
    writeln!(
        log,
        "  thread {} {}: {}, waits in {}, system call {}",
        inside.split_whitespace().last().unwrap_or("?"),
        field("Name:"),
        field("State:"),
        or_nothing(&read(task, "wchan"), "0"),
        or_nothing(&read(task, "syscall"), ""),
    )?;
    for line in read(task, "stack").lines() {
        writeln!(log, "    {line}")?;
    }
    Ok(())
}

fn or_nothing(text: &str, nothing: &str) -> String {
    let text = text.trim();
    if text == nothing { "-" } else { text }.to_owned()
}

/// Reads a file of `/proc` as text, up to the limit; empty if it cannot be read.
fn read(folder: &Path, name: &str) -> String {
    let mut bytes = Vec::new();
    let file = File::open(folder.join(name));
    // The file of an exited thread, or one without permission, counts as missing.
    let _ = file.and_then(|file| file.take(FILE_BYTES_MAX).read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::super::tree::{is_alive, tree};
    use super::*;

    #[test]
    fn a_sleeping_child_is_described_with_its_wait() {
        let mut child = std::process::Command::new("sleep")
            .arg("1000")
            .spawn()
            .unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let begun = crate::clock::now();
        let text = loop {
            let mut log = Vec::new();
            write_stacks(&tree(pid).unwrap(), &mut log).unwrap();
            let text = String::from_utf8(log).unwrap();
            // The process does not sleep immediately.
            if text.contains("S (sleeping)") && text.contains("sleep 1000") {
                break text;
            }
            assert!(begun.elapsed().as_secs() < 60, "{text}");
        };
        assert!(text.contains(&format!("(here {pid})")), "{text}");
        assert!(
            text.contains("nanosleep") || text.contains("system call 2"),
            "{text}"
        );
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_alive(pid));
    }
}
