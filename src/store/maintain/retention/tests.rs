//! The rules one by one, and all of them against a model that judges each image on its own.

use jiff::Timestamp;
use jiff::tz::TimeZone;
use proptest::prelude::*;

use super::*;

const MINUTE: u64 = 60_000;
const HOUR: u64 = 60 * MINUTE;
const DAY: u64 = 24 * HOUR;
/// A midnight in UTC.
const NOW: u64 = 20_000 * DAY;

const NOTHING: Policy = Policy {
    keep_last: 0,
    keep_within: Duration::ZERO,
    keep_hourly: 0,
    keep_daily: 0,
};

fn zoned(unix_ms: u64, zone: TimeZone) -> Zoned {
    let ms = i64::try_from(unix_ms).unwrap();
    Timestamp::from_millisecond(ms).unwrap().to_zoned(zone)
}

fn image(number: u64, created_unix_ms: u64) -> Candidate {
    Candidate {
        id: ImageId::new(number).unwrap(),
        created_unix_ms,
        condition: Condition::Good,
        pin: Pin::Loose,
        line: Line::Ours,
    }
}

/// Good images of these ages, oldest first.
fn aged(ages: &[u64]) -> Vec<Candidate> {
    let images = (1..)
        .zip(ages)
        .map(|(number, age)| image(number, NOW - age));
    images.collect()
}

fn removed(images: &[Candidate], policy: &Policy) -> Vec<u64> {
    removed_in(images, policy, TimeZone::UTC)
}

fn removed_in(images: &[Candidate], policy: &Policy, zone: TimeZone) -> Vec<u64> {
    plan(images, policy, &zoned(NOW, zone))
        .into_iter()
        .filter(|planned| planned.fate.is_removed())
        .map(|planned| planned.id.number())
        .collect()
}

#[test]
fn the_newest_good_images_stay() {
    let keep = |keep_last| Policy {
        keep_last,
        ..NOTHING
    };
    let images = aged(&[3, 2, 1]);
    assert_eq!(removed(&images, &keep(2)), [1]);
    assert_eq!(removed(&images, &keep(0)), [1, 2]);
    assert_eq!(removed(&[], &keep(2)), [0; 0]);
}

#[test]
fn damaged_images_take_no_place_and_go_with_their_time() {
    let images = |damaged: &[usize]| {
        let mut images = aged(&[4, 3, 2, 1]);
        for index in damaged {
            images[*index].condition = Condition::Damaged;
        }
        images
    };
    let keep_two = Policy {
        keep_last: 2,
        ..NOTHING
    };
    assert_eq!(removed(&images(&[1, 3]), &keep_two), [0; 0]);
    assert_eq!(removed(&images(&[1]), &keep_two), [1, 2]);
    assert_eq!(removed(&images(&[0, 1, 2, 3]), &NOTHING), [0; 0]);
}

#[test]
fn images_within_the_time_stay_and_the_future_is_within_it() {
    let within = Policy {
        keep_within: Duration::from_secs(3600),
        ..NOTHING
    };
    let mut images = aged(&[2 * HOUR, HOUR + 1, HOUR, 5, 1]);
    images.insert(0, image(9, NOW + DAY));
    assert_eq!(removed(&images, &within), [1, 2]);
}

#[test]
fn the_newest_image_of_each_hour_and_day_stays() {
    let images = aged(&[
        50 * HOUR,
        49 * HOUR,
        26 * HOUR,
        70 * MINUTE,
        61 * MINUTE,
        50 * MINUTE,
        1,
    ]);
    let hourly = Policy {
        keep_hourly: 3,
        ..NOTHING
    };
    // The images aged 50 and 1 minutes share an hour, as do those aged 70 and 61; hours without an image are not
    // counted.
    assert_eq!(removed(&images, &hourly), [1, 2, 4, 6]);
    let daily = Policy {
        keep_daily: 2,
        ..NOTHING
    };
    assert_eq!(removed(&images, &daily), [1, 2, 4, 5, 6]);
}

#[test]
fn days_are_those_of_the_local_clock() {
    // 23:30 and 00:30 in UTC are on the same day two hours west of it.
    let images = [image(1, NOW - 30 * MINUTE), image(2, NOW + 30 * MINUTE)];
    let daily = Policy {
        keep_daily: 2,
        ..NOTHING
    };
    assert_eq!(removed(&images, &daily), [0; 0]);
    let west = TimeZone::fixed(jiff::tz::offset(-2));
    assert_eq!(removed_in(&images, &daily, west), [1]);
}

#[test]
fn pinned_image_stays_despite_the_rules() {
    let mut images = aged(&[30 * DAY, 2, 1]);
    images[0].pin = Pin::Pinned;
    assert_eq!(removed(&images, &NOTHING), [2]);
    images[0].condition = Condition::Damaged;
    assert_eq!(removed(&images, &NOTHING), [2]);
    let planned = plan(&images, &NOTHING, &zoned(NOW, TimeZone::UTC));
    assert_eq!(planned[0].fate, Fate::Kept(KeptBy::Pin));
    assert_eq!(planned[2].fate, Fate::Kept(KeptBy::Newest));
}

#[test]
fn abandoned_images_take_no_place_of_current_ones() {
    // Rolled back to image 2 after image 6.
    let mut images = aged(&[8, 7, 6, 5, 4, 3]);
    for image in &mut images[2..] {
        image.line = Line::Other;
    }
    let keep_two = Policy {
        keep_last: 2,
        ..NOTHING
    };
    assert_eq!(removed(&images, &keep_two), [3, 4]);
    let planned = plan(&images, &NOTHING, &zoned(NOW, TimeZone::UTC));
    assert_eq!(planned[1].fate, Fate::Kept(KeptBy::Current));
    assert_eq!(planned[5].fate, Fate::Kept(KeptBy::Newest));
    // The images of the new attempt gradually take the places of the old ones.
    images.extend([image(7, NOW - 2), image(8, NOW - 1)]);
    assert_eq!(removed(&images, &keep_two), [1, 2, 3, 4, 5, 6]);
}

fn is_ours(image: &Candidate) -> bool {
    image.line == Line::Ours
}

#[test]
fn image_of_unknown_condition_stays_and_takes_no_place() {
    let mut images = aged(&[5, 4, 3, 2, 1]);
    images[0].condition = Condition::Unknown;
    images[4].condition = Condition::Unknown;
    let planned = plan(&images, &NOTHING, &zoned(NOW, TimeZone::UTC));
    assert_eq!(planned[0].fate, Fate::Kept(KeptBy::OutOfReach));
    assert_eq!(planned[3].fate, Fate::Kept(KeptBy::Newest));
    assert_eq!(removed(&images, &NOTHING), [2, 3]);
}

/// Applies each rule to one image on its own.
fn model(images: &[Candidate], index: usize, policy: &Policy) -> bool {
    let image = images[index];
    let good = |one: &&Candidate| one.condition == Condition::Good;
    let newer: Vec<&Candidate> = images[index + 1..].iter().filter(good).collect();
    let newest_of = |length: u64, count: u32| {
        let period = image.created_unix_ms / length;
        let periods: HashSet<u64> = newer
            .iter()
            .map(|one| one.created_unix_ms / length)
            .collect();
        good(&&image) && !periods.contains(&period) && periods.len() < count as usize
    };
    let within = u64::try_from(policy.keep_within.as_millis()).unwrap();
    newer.is_empty()
        || image.pin == Pin::Pinned
        || image.condition == Condition::Unknown
        || newer.len() < policy.keep_last as usize
        || (within > 0 && image.created_unix_ms + within >= NOW)
        || newest_of(HOUR, policy.keep_hourly)
        || newest_of(DAY, policy.keep_daily)
}

prop_compose! {
    fn any_image()(
        age in 0..4 * DAY,
        condition in prop::sample::select(vec![
            Condition::Good, Condition::Good, Condition::Good, Condition::Damaged, Condition::Unknown,
        ]),
        pinned in prop::bool::weighted(0.1),
        ours in prop::bool::weighted(0.7),
    ) -> Candidate {
        Candidate {
            condition,
            pin: if pinned { Pin::Pinned } else { Pin::Loose },
            line: if ours { Line::Ours } else { Line::Other },
            ..image(1, NOW - age)
        }
    }
}

prop_compose! {
    fn any_policy()(
        keep_last in 0..5_u32,
        within in 0..3 * DAY,
        timely in any::<bool>(),
        keep_hourly in 0..6_u32,
        keep_daily in 0..4_u32,
    ) -> Policy {
        let keep_within = Duration::from_millis(if timely { within } else { 0 });
        Policy { keep_last, keep_within, keep_hourly, keep_daily }
    }
}

proptest! {
    // The clock may have been set between two images, so their times are in any order.
    #[test]
    fn the_plan_obeys_its_rules(
        mut images in prop::collection::vec(any_image(), 0..40),
        sorted: bool,
        policy in any_policy(),
    ) {
        if sorted {
            images.sort_by_key(|image| image.created_unix_ms);
        }
        for (number, image) in (1..).zip(&mut images) {
            image.id = ImageId::new(number).unwrap();
        }
        let planned = plan(&images, &policy, &zoned(NOW, TimeZone::UTC));
        prop_assert_eq!(planned.len(), images.len());
        let ours: Vec<Candidate> = images.iter().copied().filter(is_ours).collect();
        for (index, planned) in planned.iter().enumerate() {
            prop_assert_eq!(planned.id, images[index].id);
            let among_ours = ours.iter().position(|image| image.id == planned.id);
            let kept = model(&images, index, &policy)
                || among_ours.is_some_and(|index| model(&ours, index, &policy));
            prop_assert_eq!(!planned.fate.is_removed(), kept, "{:?}", planned);
        }
        let good = |image: &Candidate| image.condition == Condition::Good;
        let newest_good = images.iter().rposition(good);
        let current = images.iter().rposition(|image| good(image) && is_ours(image));
        for index in newest_good.into_iter().chain(current) {
            prop_assert!(!planned[index].fate.is_removed());
        }
    }
}
