//! Seccomp filters of the job that CRIU leaves out of an image, because it may not suspend them.
//!
//! The kernel lets CRIU suspend filters (`PTRACE_O_SUSPEND_SECCOMP`) if it has privileges on the machine and is under no
//! filter itself. Otherwise the plugin shows CRIU no filters (src/plugin/filters.rs), and restored processes inherit them:
//! those of a container from pid 1, and the sandbox's own from CRIU.

use std::fs;

use crate::sandbox::Sandbox;

impl Sandbox {
    /// Returns the number of filters that the sandbox has installed for the job, whose first process is `root`. `None` if
    /// CRIU suspends filters, or if the number is unknown.
    #[must_use]
    pub fn inherited_filters(&self, root: i32) -> Option<u32> {
        let outer = filters_of(self.pid())?;
        if outer == 0 && !self.is_unprivileged() {
            return None;
        }
        filters_of(root)?.checked_sub(outer)
    }
}

fn filters_of(pid: i32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    number(&status)
}

/// Returns the number of filters in the text of a status.
fn number(status: &str) -> Option<u32> {
    let mut lines = status.lines();
    let number = lines.find_map(|line| line.strip_prefix("Seccomp_filters:"))?;
    number.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_filters_is_known_since_linux_5_9() {
        assert_eq!(
            number("Name:\ta\nSeccomp:\t2\nSeccomp_filters:\t3\n"),
            Some(3)
        );
        assert_eq!(
            number("Name:\ta\nSeccomp:\t2\nSpeculation:\tvulnerable\n"),
            None
        );
    }
}
