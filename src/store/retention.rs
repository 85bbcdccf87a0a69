//! Which images go when only so many are to be kept. A pure function.

use super::id::ImageId;

/// What matters of an image here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) id: ImageId,
    pub(super) condition: Condition,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Condition {
    Good,
    Damaged,
}

/// The images to remove, oldest first, of `images`, oldest first.
///
/// An image goes once `keep_last` good ones are newer: a damaged one takes nobody's place
/// and stays as long as a good one of its age would. At least one good image is kept.
pub(super) fn plan(images: &[Candidate], keep_last: usize) -> Vec<ImageId> {
    let mut newer_good = 0;
    let mut removed = Vec::new();
    for image in images.iter().rev() {
        if newer_good >= keep_last.max(1) {
            removed.push(image.id);
        }
        match image.condition {
            Condition::Good => newer_good += 1,
            Condition::Damaged => {}
        }
    }
    removed.reverse();
    removed
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn images(good: &[bool]) -> Vec<Candidate> {
        let condition = |good: &bool| {
            if *good {
                Condition::Good
            } else {
                Condition::Damaged
            }
        };
        let candidate = |(number, good)| Candidate {
            id: ImageId::new(number).unwrap(),
            condition: condition(good),
        };
        (1..).zip(good).map(candidate).collect()
    }

    fn removed(good: &[bool], keep_last: usize) -> Vec<u64> {
        plan(&images(good), keep_last)
            .into_iter()
            .map(ImageId::number)
            .collect()
    }

    #[test]
    fn the_newest_good_images_stay() {
        assert_eq!(removed(&[true, true, true], 2), [1]);
        assert_eq!(removed(&[true, true, true], 0), [1, 2]);
        assert_eq!(removed(&[], 2), [0; 0]);
    }

    #[test]
    fn damaged_images_take_no_place_and_go_with_their_time() {
        assert_eq!(removed(&[true, false, true, false], 2), [0; 0]);
        assert_eq!(removed(&[true, false, true, true], 2), [1, 2]);
        assert_eq!(removed(&[false, false], 1), [0; 0]);
    }

    proptest! {
        #[test]
        fn the_plan_obeys_its_rules(good: Vec<bool>, keep_last in 0_usize..6) {
            let images = images(&good);
            let removed = plan(&images, keep_last);
            let newer_good = |id| {
                let newer = images.iter().filter(|other| other.id > id);
                newer.filter(|other| other.condition == Condition::Good).count()
            };
            for image in &images {
                let goes = newer_good(image.id) >= keep_last.max(1);
                prop_assert_eq!(removed.contains(&image.id), goes);
            }
            prop_assert!(removed.is_sorted());
            let newest_good = images.iter().rfind(|image| image.condition == Condition::Good);
            prop_assert!(newest_good.is_none_or(|image| !removed.contains(&image.id)));
        }
    }
}
