//! Sessions that CRIU can restore (4.2, `prepare_pstree_ids`).
//!
//! A process inherits its session from its parent, so CRIU must create it below the session's leader. CRIU does so for
//! the children of the tree's first process, including orphans, even if the leader has exited. Below any other process,
//! the leader must be an ancestor. A dump does not check this; the restore fails.

use std::collections::HashMap;

use procfs::process::Stat;

use super::{Finding, Obstacle, ProcessName};
use crate::job::tree::{self, Process};

/// Relations of a process from which CRIU creates the tree again; all numbers are host numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Member {
    pid: i32,
    parent: i32,
    session: i32,
}

/// Searches for the first of `processes` that CRIU cannot restore in its session. The first process is the tree's root.
pub(super) fn find(processes: &[(Process, Stat)]) -> Option<Obstacle> {
    let member = |(process, stat): &(Process, Stat)| Member {
        pid: process.host_pid,
        parent: stat.ppid,
        session: stat.session,
    };
    let members: Vec<Member> = processes.iter().map(member).collect();
    let lost = first_lost(&members)?;
    let inside = |host_pid| {
        let mut all = processes.iter().map(|(process, _)| process);
        let same = all.find(|process| process.host_pid == host_pid);
        same.map(|process| process.pid)
    };
    let named = |pid| ProcessName::of(pid, inside(pid).unwrap_or(pid));
    Some(Obstacle {
        process: named(lost.pid),
        finding: Finding::Session {
            leader: inside(lost.session).unwrap_or_else(|| session_inside(lost)),
            parent: named(lost.parent),
        },
    })
}

/// Returns the number of a process's session as seen by the job.
fn session_inside(lost: Member) -> i32 {
    let status = tree::status(lost.pid).ok();
    let sessions = status.and_then(|status| status.nssid);
    sessions
        .and_then(|sessions| sessions.last().copied())
        .unwrap_or(lost.session)
}

/// Returns the first member that CRIU cannot create in its session.
fn first_lost(members: &[Member]) -> Option<Member> {
    let root = *members.first()?;
    let by_pid: HashMap<i32, Member> = members.iter().map(|one| (one.pid, *one)).collect();
    // CRIU creates a child of the root below the leader of its session if that is alive, and below a helper otherwise.
    let creator = |one: &Member| {
        let in_place = one.session == root.session || one.session == one.pid;
        if one.parent != root.pid || in_place {
            return by_pid.get(&one.parent).copied();
        }
        by_pid.get(&one.session).copied()
    };
    // Sessions of members at the creation of a child, before they call `setsid`.
    let mut born_in: HashMap<i32, i32> = HashMap::new();
    let mut begins_right = |one: &Member| {
        let mut above = by_pid.get(&one.parent).copied();
        let mut steps = 0..members.len();
        while let (Some(ancestor), Some(_)) = (above, steps.next()) {
            if ancestor.pid == one.session {
                return true;
            }
            if *born_in.entry(ancestor.pid).or_insert(one.session) != one.session {
                return false;
            }
            above = creator(&ancestor);
        }
        false
    };
    let is_lost = |one: &&Member| {
        let parent = by_pid.get(&one.parent);
        let follows = one.session == one.pid
            || one.parent == root.pid
            || parent.is_none_or(|parent| parent.session == one.session);
        one.pid != root.pid && !follows && !begins_right(one)
    };
    members.iter().find(is_lost).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the search with process 1 as the tree's root and session leader, and process 2, the job, as another one.
    fn lost(others: &[(i32, i32, i32)]) -> Option<i32> {
        let all = [&[(1, 0, 1), (2, 1, 2)], others].concat();
        let member = |&(pid, parent, session)| Member {
            pid,
            parent,
            session,
        };
        let members: Vec<Member> = all.iter().map(member).collect();
        first_lost(&members).map(|member| member.pid)
    }

    #[test]
    fn a_session_is_restored_below_its_leader() {
        assert_eq!(lost(&[(3, 2, 2), (4, 3, 2), (5, 3, 5), (6, 5, 5)]), None);
        // Created before its parent became a leader.
        assert_eq!(lost(&[(3, 2, 3), (4, 3, 2)]), None);
        assert_eq!(lost(&[(3, 2, 3), (4, 3, 4), (5, 4, 2)]), None);
    }

    #[test]
    fn a_child_of_the_root_is_restored_in_any_session() {
        assert_eq!(lost(&[(3, 1, 2), (4, 3, 2)]), None, "an orphan of the job");
        assert_eq!(lost(&[(4, 1, 3), (5, 1, 3)]), None, "the leader is gone");
        assert_eq!(lost(&[(3, 1, 3), (4, 1, 3)]), None, "another leads");
        let before = [(3, 1, 2), (4, 3, 4), (5, 4, 2)];
        assert_eq!(lost(&before), None, "the orphan is created below 2");
    }

    #[test]
    fn an_adopted_process_of_a_foreign_session_is_found() {
        assert_eq!(lost(&[(4, 2, 3)]), Some(4), "the leader is gone");
        assert_eq!(lost(&[(3, 2, 3), (4, 2, 3)]), Some(4), "it is beside");
        let twice = [(3, 2, 3), (4, 3, 4), (5, 4, 2), (6, 4, 3)];
        assert_eq!(lost(&twice), Some(6), "4 can begin in one session only");
    }
}
