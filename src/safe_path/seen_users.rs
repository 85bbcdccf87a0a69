//! Users as which processes of the job have acted since the run began, as far as snapshots have seen them.
//!
//! A user's files stay when the user's last process has ended. Without this, a later snapshot or restore would act on them
//! with root's rights, or with those of another user.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::JobUsers;

/// Groups of users, each one's primary group first.
type Groups = BTreeMap<u32, Vec<u32>>;

/// The users, and their groups as far as they are known.
#[derive(Debug, Default)]
pub(crate) struct SeenUsers(Mutex<(BTreeSet<u32>, Groups)>);

impl SeenUsers {
    /// Adds users; the groups that are known of one are replaced.
    pub fn add(&self, users: &[u32], groups: &Groups) {
        let mut seen = self.locked();
        seen.0.extend(users);
        for (user, groups) in groups {
            seen.1.insert(*user, groups.clone());
        }
    }

    /// Returns all users and their groups.
    pub fn all(&self) -> (Vec<u32>, Groups) {
        let seen = self.locked();
        (seen.0.iter().copied().collect(), seen.1.clone())
    }

    /// Returns the users for operations on the job's files.
    pub fn job_users(&self) -> JobUsers {
        let (users, groups) = self.all();
        JobUsers::new(&users, &groups)
    }

    /// Each change is complete, also if a thread panicked.
    fn locked(&self) -> MutexGuard<'_, (BTreeSet<u32>, Groups)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_stay_and_their_groups_are_the_last_ones() {
        let seen = SeenUsers::default();
        seen.add(&[0, 7], &BTreeMap::from([(7, vec![70])]));
        seen.add(&[0], &BTreeMap::from([(0, vec![0]), (7, vec![71, 72])]));
        let groups = BTreeMap::from([(0, vec![0]), (7, vec![71, 72])]);
        assert_eq!(seen.all(), (vec![0, 7], groups));
        assert!(seen.job_users().has_others());
    }
}
