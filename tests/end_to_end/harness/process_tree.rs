//! Processes below a supervisor, from `/proc`.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use super::wait_until;

/// Returns the host pid of the job's first process. It is below the root of the job's tree, which is the child of the
/// sandbox's pid 1 with the lowest pid of those not reserved for CRIU. In a container the supervisor may be a pid 1,
/// too.
pub fn job_of(supervisor: i32) -> i32 {
    let mut found = None;
    wait_until("the job's process", || {
        let inside = |pid: &i32| inner_pid(*pid).filter(|inner| *inner >= 300);
        let init = descendants(supervisor)
            .into_iter()
            .rfind(|pid| inner_pid(*pid) == Some(1));
        let root = init.and_then(|init| {
            let candidates = children(init).into_iter();
            candidates
                .filter(|pid| inside(pid).is_some())
                .min_by_key(inside)
        });
        found = root.and_then(|root| children(root).first().copied());
        found.is_some()
    });
    found.expect("found above")
}

/// Waits until `is_it` holds for a descendant of a process; returns its pid.
pub fn wait_for_descendant(of: i32, what: &str, is_it: impl Fn(i32) -> bool) -> i32 {
    let mut found = None;
    wait_until(what, || {
        found = descendants(of).into_iter().find(|pid| is_it(*pid));
        found.is_some()
    });
    found.expect("found above")
}

/// Waits until all of these processes have exited.
pub fn wait_until_gone(pids: &[i32]) {
    wait_until(&format!("the end of {pids:?}"), || {
        pids.iter()
            .all(|pid| !Path::new(&format!("/proc/{pid}")).exists())
    });
}

/// Returns the name of the program that a process executes.
pub fn name_of(pid: i32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim_end().to_owned()
}

/// Returns all descendants of a process.
pub fn descendants(pid: i32) -> Vec<i32> {
    let mut found = vec![];
    let mut open = vec![pid];
    while let Some(next) = open.pop() {
        let children = children(next);
        found.extend(&children);
        open.extend(children);
    }
    found
}

fn children(pid: i32) -> Vec<i32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"));
    let lists = tasks.into_iter().flatten().flatten().map(|task| {
        // A thread that has exited has no list.
        fs::read_to_string(task.path().join("children")).unwrap_or_default()
    });
    let words = lists.collect::<Vec<_>>().join(" ");
    words
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect()
}

/// Returns the pid of a process in its own PID namespace.
pub fn inner_pid(pid: i32) -> Option<i32> {
    let mut status = String::new();
    File::open(format!("/proc/{pid}/status"))
        .and_then(|mut file| file.read_to_string(&mut status))
        .ok()?;
    let line = status.lines().find(|line| line.starts_with("NSpid:"))?;
    line.split_whitespace().last()?.parse().ok()
}

/// Returns the state letter of a process, as in `ps`; `None` if it does not exist.
pub fn state(pid: i32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

/// Returns true if a process does not exist, or is dead and not yet reaped.
pub fn is_dead(pid: i32) -> bool {
    matches!(state(pid), None | Some('Z'))
}
