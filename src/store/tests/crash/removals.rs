//! Crash tests of removals: those of a plan, those of the pruner, and the pins that both respect.

use super::*;

fn forget(path: &Path, ledger: &Ledger) -> Outcome {
    let store = Store::open(path)?;
    let swept = ledger.forget(&store, &store.lock()?, &[id(1), id(2)])?;
    assert!(swept.packs == 1 && swept.hole_bytes > 0, "{swept:?}");
    Ok(())
}

/// Prunes a store in which only a hole can be freed: the pack serves the other images.
fn prune(path: &Path, ledger: &Ledger) -> Outcome {
    let store = Store::open(path)?;
    let swept = ledger.prune(&store, &store.lock()?, &[id(1)])?;
    assert!(swept.packs == 0 && swept.hole_bytes > 0, "{swept:?}");
    Ok(())
}

fn pins(path: &Path, ledger: &Ledger) -> Outcome {
    let store = Store::open(path)?;
    let lock = store.lock()?;
    ledger.pin(&store, id(1), "the paper")?;
    ledger.rotate(&store, &lock, 1, &[id(2)])?;
    ledger.pin(&store, id(1), "the thesis")?;
    ledger.unpin(&store, id(1))?;
    ledger.rotate(&store, &lock, 1, &[id(1)])?;
    Ok(())
}

#[test]
fn a_crash_while_images_are_forgotten_and_holes_are_punched() {
    check(three_images, forget);
}

#[test]
fn crash_while_completing_a_killed_prune() {
    check(three_images, prune);
}

#[test]
fn a_crash_while_images_are_pinned_unpinned_and_rotated() {
    check(three_images, pins);
}

#[test]
fn a_rotation_punches_holes_here() {
    let events = Recorded::new(three_images, rotate).events;
    let is_hole = |event: &Event| matches!(event, Event::Data(_, DataChange::Punch { .. }));
    assert!(events.iter().any(is_hole));
}

#[test]
fn a_failing_step_fails_the_removal_and_no_other_image() {
    for change in [forget, prune, pins] {
        let passed_over = fail_each_step(three_images, change);
        let all = passed_over.iter().all(|step| is_dispensable(step));
        assert!(all, "{passed_over:?}");
    }
}

/// Leaves out each sync in turn. The most important one is that of the image folder before packs are removed and holes
/// are punched. The removal of packs need not be durable: a sweep removes them again.
#[test]
fn each_omitted_sync_of_a_removal_is_noticed() {
    expect_needless(&[
        (three_images, forget, &["6: store/packs: sync"]),
        (three_images, prune, &[]),
        (three_images, pins, &["10: store/packs: sync"]),
    ]);
}
