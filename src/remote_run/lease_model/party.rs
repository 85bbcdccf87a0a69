//! Parties of the model: machines, their requests and replies, and the source of decisions.

use std::time::Duration;

use crate::remote_run::lease::{Held, Watched};
use crate::remote_run::shared_state::State;

/// Longest delay of a request or a reply.
const DELAY_MS: u64 = 15_000;

/// Source of decisions; after its end nothing goes wrong.
pub(super) struct Fate {
    pub(super) choices: std::vec::IntoIter<u32>,
}

impl Fate {
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.choices
            .next()
            .map_or(0, |choice| u64::from(choice) % limit)
    }

    /// Returns a delay that is mostly short.
    pub(super) fn delay(&mut self) -> u64 {
        match self.below(8) {
            0 => self.below(DELAY_MS),
            _ => self.below(200),
        }
    }
}

/// The change that an entry makes.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Intent {
    /// Another holder, or a later end of the lease.
    Lease,
    /// A new image, and the removal of an old one by the holder, which does not know the newest pins.
    Commit {
        object: String,
        old: Option<String>,
    },
    Release,
    /// Changes by verbs: this one and the following.
    Pin(String),
    Forget(String),
    Prune,
}

#[derive(Clone, Debug)]
pub(super) struct Append {
    /// Number of the entry to be created.
    pub(super) serial: usize,
    pub(super) state: State,
    pub(super) intent: Intent,
    /// Time of the first attempt, on the machine's clock.
    pub(super) begun: Duration,
}

#[derive(Clone, Debug)]
pub(super) enum Request {
    Look,
    Append(Append),
}

#[derive(Clone, Debug)]
pub(super) enum Reply {
    /// The newest entry, and its number.
    Newest(Option<(usize, State)>),
    Appended(Append, bool),
    /// The reply was lost: the request is repeated.
    Lost(Request),
}

pub(super) enum Role {
    Waits(Option<Watched>),
    /// Runs the job, until the lease ends or is lost.
    Holds(Held),
    /// Lost or released the lease: starts again later.
    Stopped,
    /// Changes the images now and then, and never holds the lease.
    Verb,
}

pub(super) struct Machine {
    pub(super) name: String,
    /// Rate of its clock, in thousandths, and its time at the beginning.
    pub(super) rate: u64,
    pub(super) offset: u64,
    pub(super) role: Role,
    pub(super) known: Option<(usize, State)>,
    pub(super) epoch: u64,
    /// Request on its way: the time of its arrival.
    pub(super) request: Option<(u64, Request)>,
    pub(super) reply: Option<(u64, Reply)>,
    /// End of the suspension.
    pub(super) suspended: u64,
    /// Time of its next action.
    pub(super) next: u64,
    pub(super) commits: u64,
}

impl Machine {
    pub(super) fn clock(&self, now: u64) -> Duration {
        Duration::from_millis(self.offset + now * self.rate / 1000)
    }

    /// Returns true if its job computes.
    pub(super) fn computes(&self, now: u64) -> bool {
        let Role::Holds(held) = &self.role else {
            return false;
        };
        now >= self.suspended && held.is_valid(self.clock(now))
    }

    pub(super) fn is_idle(&self) -> bool {
        self.request.is_none() && self.reply.is_none()
    }
}
