//! Retention: the rules for keeping images. A pure function of the images, the rules and the present time.
//!
//! An image stays if any rule keeps it. Days and hours are those of local time, as in the
//! schedule of snapshots; when a clock is set back, an hour that comes twice is two hours.

use std::collections::HashSet;
use std::time::Duration;

use jiff::Zoned;

use crate::clock;
use crate::store::format::image_id::ImageId;

const HOUR_MS: i64 = 3_600_000;
const DAY_MS: i64 = 24 * HOUR_MS;

/// The rules for keeping images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Newest good images that stay; the newest one stays even with 0.
    pub keep_last: u32,
    /// Images that are not older stay.
    pub keep_within: Duration,
    /// Number of hours of which the newest good image stays: the newest hours with a good image.
    pub keep_hourly: u32,
    /// Number of days, as for `keep_hourly`.
    pub keep_daily: u32,
}

/// Fate of an image, and its reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planned {
    /// The image.
    pub id: ImageId,
    /// Its fate.
    pub fate: Fate,
}

/// Fate of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The image stays.
    Kept(KeptBy),
    /// The image is removed.
    Removed(RemovedBy),
}

/// The first rule that keeps an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptBy {
    /// The image is the newest good one, which always stays.
    Newest,
    /// The image is the newest good one from which the run can continue, which always stays.
    Current,
    /// The image is pinned.
    Pin,
    /// The image cannot be judged for now.
    OutOfReach,
    /// [`Policy::keep_last`].
    Last,
    /// [`Policy::keep_within`].
    Within,
    /// [`Policy::keep_hourly`].
    Hourly,
    /// [`Policy::keep_daily`].
    Daily,
    /// Only named images are removed, and the image was not named.
    Unnamed,
}

/// Why an image goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemovedBy {
    /// No rule keeps it.
    Policy,
    /// The image was named.
    Name,
}

impl Fate {
    /// Returns true if the image goes.
    #[must_use]
    pub fn is_removed(self) -> bool {
        match self {
            Self::Kept(_) => false,
            Self::Removed(_) => true,
        }
    }

    /// The reason in a few words.
    #[must_use]
    pub fn reason(self) -> &'static str {
        match self {
            Self::Kept(KeptBy::Newest) => "the newest good image",
            Self::Kept(KeptBy::Current) => "the newest good image that the run goes on from",
            Self::Kept(KeptBy::Pin) => "pinned",
            Self::Kept(KeptBy::OutOfReach) => "it cannot be read for now",
            Self::Kept(KeptBy::Last) => "keep_last",
            Self::Kept(KeptBy::Within) => "keep_within",
            Self::Kept(KeptBy::Hourly) => "keep_hourly",
            Self::Kept(KeptBy::Daily) => "keep_daily",
            Self::Kept(KeptBy::Unnamed) => "not named",
            Self::Removed(RemovedBy::Policy) => "no rule keeps it",
            Self::Removed(RemovedBy::Name) => "named",
        }
    }
}

/// Facts about an image that the rules need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub(crate) id: ImageId,
    pub(crate) created_unix_ms: u64,
    pub(crate) condition: Condition,
    pub(crate) pin: Pin,
    pub(crate) line: Line,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    Good,
    Damaged,
    /// The image cannot be read for now.
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pin {
    Pinned,
    Loose,
}

/// The line of attempts to which an image belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// The run goes on from it, or did from one that came of it.
    Ours,
    /// The image belongs to an abandoned attempt, or to another run.
    Other,
}

/// Applies the rules to `images`, oldest first.
///
/// Twice: among all images, and among those that the run goes on from, whose places no other
/// image takes. What either keeps stays.
///
/// A damaged image takes nobody's place and goes with its time: it stays while it is within
/// `keep_last` or `keep_within`, and is never the image of an hour or a day. A pinned good
/// one takes its place like any other. One of which nobody knows stays and takes no place.
pub(crate) fn plan(images: &[Candidate], policy: &Policy, now: &Zoned) -> Vec<Planned> {
    let mut among_all = Rules::new(*policy, now, KeptBy::Newest);
    let mut among_ours = Rules::new(*policy, now, KeptBy::Current);
    let newest_first = images.iter().rev();
    let planned = newest_first.map(|image| {
        let of_all = among_all.judge(image);
        let fate = match image.line {
            Line::Ours => either(of_all, among_ours.judge(image)),
            Line::Other => of_all,
        };
        Planned { id: image.id, fate }
    });
    let mut planned: Vec<Planned> = planned.collect();
    planned.reverse();
    planned
}

fn either(first: Fate, second: Fate) -> Fate {
    if first.is_removed() { second } else { first }
}

/// Places of the rules that newer images have used up.
struct Rules<'a> {
    policy: Policy,
    now: &'a Zoned,
    /// The reason why the newest good image stays.
    newest: KeptBy,
    newer_good: u32,
    /// Each with its distance to UTC.
    hours: HashSet<(i64, i32)>,
    days: HashSet<i64>,
}

impl<'a> Rules<'a> {
    fn new(policy: Policy, now: &'a Zoned, newest: KeptBy) -> Self {
        Self {
            policy,
            now,
            newest,
            newer_good: 0,
            hours: HashSet::new(),
            days: HashSet::new(),
        }
    }

    fn judge(&mut self, image: &Candidate) -> Fate {
        // At least 1: without a good image, the damaged ones may be all there is.
        let last = self.newer_good < self.policy.keep_last.max(1);
        let within = self.is_within(image.created_unix_ms);
        let (newest, hourly, daily) = match image.condition {
            Condition::Good => self.take_places(image.created_unix_ms),
            Condition::Damaged | Condition::Unknown => (false, false, false),
        };
        let rules = [
            (newest, self.newest),
            (image.pin == Pin::Pinned, KeptBy::Pin),
            (image.condition == Condition::Unknown, KeptBy::OutOfReach),
            (last, KeptBy::Last),
            (within, KeptBy::Within),
            (hourly, KeptBy::Hourly),
            (daily, KeptBy::Daily),
        ];
        let kept = rules.into_iter().find(|(keeps, _)| *keeps);
        match kept {
            None => Fate::Removed(RemovedBy::Policy),
            Some((_, rule)) => Fate::Kept(rule),
        }
    }

    /// Returns true for each rule under which a good image is the newest: of all, of a counted hour, of a counted day.
    fn take_places(&mut self, created_unix_ms: u64) -> (bool, bool, bool) {
        let (hour, day) = self.local(created_unix_ms);
        let newest = self.newer_good == 0;
        self.newer_good = self.newer_good.saturating_add(1);
        (
            newest,
            take(&mut self.hours, hour, self.policy.keep_hourly),
            take(&mut self.days, day, self.policy.keep_daily),
        )
    }

    /// An image of the future is within any time: a clock that is wrong removes nothing.
    fn is_within(&self, created_unix_ms: u64) -> bool {
        let now = u64::try_from(self.now.timestamp().as_millisecond()).unwrap_or(0);
        let age = Duration::from_millis(now.saturating_sub(created_unix_ms));
        !self.policy.keep_within.is_zero() && age <= self.policy.keep_within
    }

    /// The local hour, with its distance to UTC, and the local day.
    fn local(&self, unix_ms: u64) -> ((i64, i32), i64) {
        let time = clock::timestamp_of(unix_ms);
        let offset = self.now.time_zone().to_offset(time).seconds();
        let local = time.as_millisecond() + i64::from(offset) * 1000;
        (
            (local.div_euclid(HOUR_MS), offset),
            local.div_euclid(DAY_MS),
        )
    }
}

/// Returns true if `period` is a new one, and one of the first `count`.
fn take<T: Eq + std::hash::Hash>(taken: &mut HashSet<T>, period: T, count: u32) -> bool {
    taken.len() < count as usize && taken.insert(period)
}

#[cfg(test)]
mod tests;
