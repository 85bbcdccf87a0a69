//! Rules of retention, applied to the images of a run in a remote store.

use crate::clock;
use crate::store::maintain::retention::{self, Candidate, Condition, Line, Pin};
use crate::store::{Planned, Policy, RemoteImage};

/// Decides which of these images, oldest first, stay. The newest image of the run and pinned ones do in any case.
pub(super) fn plan_by_rules(images: &[RemoteImage], policy: &Policy) -> Vec<Planned> {
    retention::plan(&candidates(images), policy, &clock::local())
}

/// Returns the properties that the rules depend on.
pub(super) fn candidates(images: &[RemoteImage]) -> Vec<Candidate> {
    let candidate = |image: &RemoteImage| Candidate {
        id: image.id,
        created_unix_ms: image.created_unix_ms,
        // A damaged one is found by a restore or by `verify`, and not by a look at the list.
        condition: Condition::Good,
        pin: match image.pinned {
            Some(_) => Pin::Pinned,
            None => Pin::Loose,
        },
        line: if image.abandoned {
            Line::Other
        } else {
            Line::Ours
        },
    };
    images.iter().map(candidate).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::store::ImageId;

    fn image(number: u64) -> RemoteImage {
        RemoteImage {
            object: format!("images/{number}"),
            id: ImageId::new(number).unwrap(),
            created_unix_ms: number,
            raw_bytes: 0,
            pinned: None,
            abandoned: false,
        }
    }

    fn kept(images: &[RemoteImage], keep_last: u32) -> Vec<u64> {
        let policy = Policy {
            keep_last,
            keep_within: Duration::ZERO,
            keep_hourly: 0,
            keep_daily: 0,
        };
        let planned = plan_by_rules(images, &policy).into_iter();
        let kept = planned.filter(|planned| !planned.fate.is_removed());
        kept.map(|planned| planned.id.number()).collect()
    }

    #[test]
    fn a_pinned_image_is_kept() {
        let mut images: Vec<_> = (1..=4).map(image).collect();
        images[0].pinned = Some(String::new());
        assert_eq!(kept(&images, 2), [1, 3, 4]);
    }

    #[test]
    fn an_abandoned_image_takes_no_place_of_the_runs_images() {
        let mut images: Vec<_> = (1..=4).map(image).collect();
        images[3].abandoned = true;
        assert_eq!(kept(&images, 2), [2, 3, 4]);
    }
}
