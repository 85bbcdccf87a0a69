//! Selection of the images to keep and to remove, by the retention rules. A pure function of images, rules and time.
//!
//! An image stays if any rule keeps it. Days and hours are in local time, as in the snapshot schedule. When the clock
//! is set back, an hour that occurs twice counts as two hours.

use std::collections::HashSet;
use std::time::Duration;

use jiff::Zoned;

use crate::clock;
use crate::store::format::image_id::ImageId;

const HOUR_MS: i64 = 3_600_000;
const DAY_MS: i64 = 24 * HOUR_MS;

/// The retention rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Number of newest good images that stay; the newest one stays even with 0.
    pub keep_last: u32,
    /// Maximum age of images that stay in any case.
    pub keep_within: Duration,
    /// Number of hours: the newest good image of each of the newest hours with a good image stays.
    pub keep_hourly: u32,
    /// Number of days, in the same way as `keep_hourly`.
    pub keep_daily: u32,
}

/// The decision about an image, with its reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planned {
    /// The image.
    pub id: ImageId,
    /// The decision.
    pub fate: Fate,
}

/// The decision to keep or to remove an image.
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
    /// The newest good image, which is never removed.
    Newest,
    /// The newest good image that the run continues from, which is never removed.
    Current,
    /// The image is pinned.
    Pin,
    /// The image cannot be read at present, so its condition is unknown.
    OutOfReach,
    /// [`Policy::keep_last`].
    Last,
    /// [`Policy::keep_within`].
    Within,
    /// [`Policy::keep_hourly`].
    Hourly,
    /// [`Policy::keep_daily`].
    Daily,
    /// The image was not named, and the plan removes only named images.
    Unnamed,
}

/// The reason for removing an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemovedBy {
    /// No rule keeps the image.
    Policy,
    /// The image was named.
    Name,
}

impl Fate {
    /// Returns true if the image is removed.
    #[must_use]
    pub fn is_removed(self) -> bool {
        match self {
            Self::Kept(_) => false,
            Self::Removed(_) => true,
        }
    }

    /// Returns the reason in a few words.
    #[must_use]
    pub fn reason(self) -> &'static str {
        match self {
            Self::Kept(KeptBy::Newest) => "the newest good image",
            Self::Kept(KeptBy::Current) => "the newest good image that the run continues from",
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

/// The properties of an image that the rules depend on.
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
    /// The image cannot be read at present.
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pin {
    Pinned,
    Loose,
}

/// The relation of an image to the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// The run continues from the image, or continued from an image derived from it.
    Ours,
    /// The image belongs to an abandoned attempt or to another run.
    Other,
}

/// Applies the rules to `images`, oldest first.
///
/// The rules are applied twice: to all images, and to the images that the run continues from, so that no other image
/// takes their places. An image stays if either pass keeps it.
///
/// A damaged image takes no place of another image and expires: it stays while it is within `keep_last` or
/// `keep_within`, and it is never the image of an hour or a day. A pinned good image takes its place like any other. An
/// image of unknown condition stays and takes no place.
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

/// The places that newer images have already taken.
struct Rules<'a> {
    policy: Policy,
    now: &'a Zoned,
    /// The reason given for the newest good image.
    newest: KeptBy,
    newer_good: u32,
    /// Each hour with its offset from UTC.
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
        // At least 1: without a good image, the damaged ones may be the only images.
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

    /// Takes the places of a good image. Returns true for each of: the newest good image, the first of a counted hour,
    /// the first of a counted day.
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

    /// Returns true if the image is young enough for `keep_within`. An image from the future is: a wrong clock removes
    /// nothing.
    fn is_within(&self, created_unix_ms: u64) -> bool {
        let now = u64::try_from(self.now.timestamp().as_millisecond()).unwrap_or(0);
        let age = Duration::from_millis(now.saturating_sub(created_unix_ms));
        !self.policy.keep_within.is_zero() && age <= self.policy.keep_within
    }

    /// Returns the local hour, with its offset from UTC, and the local day.
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

/// Returns true if `period` is new and among the first `count` periods.
fn take<T: Eq + std::hash::Hash>(taken: &mut HashSet<T>, period: T, count: u32) -> bool {
    taken.len() < count as usize && taken.insert(period)
}

#[cfg(test)]
mod tests;
