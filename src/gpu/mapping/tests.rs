//! Tests of every mapping from the GPUs of an image to those of a machine.

use super::*;
use crate::cuda::GpuMemory;

const H100: &str = "NVIDIA H100 80GB HBM3";
const H200: &str = "NVIDIA H200";
const GIB: u64 = 1 << 30;

/// UUID, model, and GiB in use or free.
type Rows<'a> = &'a [(&'a str, &'a str, u64)];
type Map<'a> = &'a [(&'a str, &'a str)];

fn then(gpus: Rows) -> CudaFacts {
    let facts = |(uuid, name, used): &(&str, &str, u64)| GpuFacts {
        uuid: (*uuid).to_owned(),
        name: (*name).to_owned(),
        used_bytes: Some(used * GIB),
        ..GpuFacts::default()
    };
    CudaFacts {
        driver: "580.159.04".to_owned(),
        gpus: gpus.iter().map(facts).collect(),
        pids: vec![300],
        ..CudaFacts::default()
    }
}

fn now(gpus: Rows) -> Inventory {
    let gpu = |(uuid, name, free): &(&str, &str, u64)| Gpu {
        index: 0,
        name: (*name).to_owned(),
        uuid: (*uuid).to_owned(),
        memory: Some(GpuMemory {
            total_bytes: 100 * GIB,
            free_bytes: free * GIB,
        }),
        persistent: Some(true),
        mig: Some(false),
        mode: Some(ComputeMode::Shared),
        busy: Some(false),
    };
    Inventory {
        driver: Some("580.159.04".to_owned()),
        gpus: gpus.iter().map(gpu).collect(),
    }
}

fn pairs(map: Map) -> GpuPairs {
    let own = |(old, new): &(&str, &str)| ((*old).to_owned(), (*new).to_owned());
    map.iter().map(own).collect()
}

fn plan_on(then: &CudaFacts, machine: &Inventory, wanted: Map) -> Result<GpuPlan, Refusal> {
    let open: Vec<usize> = (0..machine.gpus.len()).collect();
    let here = Here {
        machine,
        open: &open,
        wanted: &pairs(wanted),
    };
    plan(then, here)
}

fn chosen(then: &CudaFacts, machine: &Inventory) -> GpuPairs {
    plan_on(then, machine, &[]).unwrap().map
}

#[test]
fn job_is_restored_on_its_gpus_or_others_of_the_model() {
    let two = then(&[("a", H200, 10), ("b", H200, 20)]);
    let cases: [(&str, Rows, Map); 8] = [
        ("the same", &[("a", H200, 90), ("b", H200, 90)], &[]),
        ("in another order", &[("b", H200, 90), ("a", H200, 90)], &[]),
        (
            "and emptier ones beside them",
            &[("a", H200, 30), ("b", H200, 30), ("c", H200, 99)],
            &[],
        ),
        (
            "all gone",
            &[("c", H200, 80), ("d", H200, 90)],
            &[("a", "c"), ("b", "d")],
        ),
        (
            "all gone: the emptiest, and most for the one that needs most",
            &[("c", H200, 50), ("d", H200, 70), ("e", H200, 60)],
            &[("a", "e"), ("b", "d")],
        ),
        (
            "one gone: the other stays, and is in the map",
            &[("c", H200, 90), ("a", H200, 90)],
            &[("a", "a"), ("b", "c")],
        ),
        (
            "what is too full is left out",
            &[("a", H200, 90), ("c", H200, 19), ("d", H200, 20)],
            &[("a", "a"), ("b", "d")],
        ),
        (
            "what is of another model is left out",
            &[("a", H200, 90), ("c", H100, 95), ("d", H200, 20)],
            &[("a", "a"), ("b", "d")],
        ),
    ];
    for (case, here, expected) in cases {
        assert_eq!(chosen(&two, &now(here)), pairs(expected), "{case}");
    }
}

#[test]
fn unsuitable_gpus_are_refused_with_name_and_numbers() {
    let one = then(&[("a", H200, 20)]);
    let two = then(&[("a", H200, 20), ("b", H200, 20)]);
    let cases: [(&CudaFacts, Rows, &str); 7] = [
        (&one, &[], "this machine has no NVIDIA GPU"),
        (
            &two,
            &[("a", H200, 90)],
            "had 2 GPUs and 1 can be used here",
        ),
        (
            &one,
            &[("a", H200, 10), ("c", H200, 90)],
            "NVIDIA H200 (a) has 10.0 GiB free and the job needs 20.0 GiB",
        ),
        (
            &one,
            &[("c", H200, 10), ("d", H200, 15), ("e", H100, 70)],
            "NVIDIA H200 (d) has 15.0 GiB free and the job needs 20.0 GiB",
        ),
        (
            &two,
            &[("c", H200, 90), ("d", H200, 15)],
            "NVIDIA H200 (d) has 15.0 GiB free",
        ),
        (
            &one,
            &[("c", H100, 70)],
            "had NVIDIA H200 (a) and there is only NVIDIA H100 80GB HBM3",
        ),
        (
            &two,
            &[("a", H200, 90), ("c", H100, 70)],
            "had NVIDIA H200 (b) and there is only NVIDIA H100",
        ),
    ];
    for (then, here, expected) in cases {
        let refusal = plan_on(then, &now(here), &[]).unwrap_err().to_string();
        assert!(refusal.contains(expected), "{refusal}");
    }
}

#[test]
fn gpu_in_a_closed_mode_is_refused_or_skipped() {
    let job = then(&[("a", H200, 20)]);
    let set = |change: fn(&mut Gpu)| {
        let mut here = now(&[("a", H200, 90)]);
        change(&mut here.gpus[0]);
        plan_on(&job, &here, &[])
    };
    let mig = set(|gpu| gpu.mig = Some(true));
    assert!(matches!(mig, Err(Refusal::Mig { .. })), "{mig:?}");
    let closed = set(|gpu| gpu.mode = Some(ComputeMode::Prohibited));
    assert!(matches!(closed, Err(Refusal::Prohibited { .. })));
    let taken = set(|gpu| (gpu.mode, gpu.busy) = (Some(ComputeMode::Exclusive), Some(true)));
    assert!(matches!(taken, Err(Refusal::Taken { .. })), "{taken:?}");
    assert!(set(|gpu| gpu.mode = Some(ComputeMode::Exclusive)).is_ok());
    // Unknown properties are no reason for a refusal.
    assert!(set(|gpu| (gpu.mig, gpu.mode, gpu.memory) = (None, None, None)).is_ok());

    let mut here = now(&[("c", H200, 90), ("d", H200, 30)]);
    here.gpus[0].mig = Some(true);
    assert_eq!(chosen(&job, &here), pairs(&[("a", "d")]));
}

#[test]
fn older_driver_branch_is_refused_other_release_reported() {
    let job = then(&[("a", H200, 20)]);
    let cases = [
        ("580.159.04", Ok(None)),
        ("580.95.05", Ok(Some("580.95.05"))),
        ("590.44.01", Ok(Some("590.44.01"))),
        ("575.57.08", Err(())),
        ("garbage", Ok(Some("garbage"))),
        ("", Ok(None)),
    ];
    for (driver, expected) in cases {
        let mut here = now(&[("a", H200, 90)]);
        here.driver = Some(driver.to_owned());
        let told = match plan_on(&job, &here, &[]) {
            Ok(plan) => Ok(plan.other_driver.map(|(_, now)| now)),
            Err(Refusal::OlderDriver { .. }) => Err(()),
            Err(other) => panic!("{other}"),
        };
        let expected = expected.map(|now| now.map(str::to_owned));
        assert_eq!(told, expected, "{driver:?}");
    }
}

#[test]
fn gpus_that_the_job_did_not_see_only_complete_the_map() {
    let mut job = then(&[("a", H200, 20), ("b", H200, 0), ("c", H100, 0)]);
    (job.gpus[1].visible, job.gpus[2].visible) = (Some(false), Some(false));
    let on = |rows: Rows, open: &[usize]| {
        let machine = now(rows);
        let here = Here {
            machine: &machine,
            open,
            wanted: &[],
        };
        plan(&job, here)
    };
    let home = [("a", H200, 90), ("b", H200, 90), ("c", H100, 70)];
    assert_eq!(on(&home, &[0]).unwrap().map, pairs(&[]));
    assert_eq!(on(&[("a", H200, 90)], &[0]).unwrap().map, pairs(&[]));
    let swapped = pairs(&[("a", "b"), ("b", "a"), ("c", "c")]);
    assert_eq!(on(&home, &[1]).unwrap().map, swapped);
    let elsewhere = [("x", H200, 90), ("y", H200, 95), ("z", H200, 70)];
    let moved = pairs(&[("a", "y"), ("b", "x"), ("c", "z")]);
    assert_eq!(on(&elsewhere, &[0, 1, 2]).unwrap().map, moved);
    let fewer = on(&elsewhere[..2], &[0, 1]).unwrap_err();
    assert_eq!(fewer, Refusal::TooFew { then: 3, now: 2 });
    let refused = on(&home, &[2]).unwrap_err();
    assert!(matches!(refused, Refusal::OtherModel { .. }), "{refused}");
    assert_eq!(
        on(&home, &[]).unwrap_err(),
        Refusal::TooFew { then: 1, now: 0 }
    );
}

#[test]
fn the_user_s_map_is_checked_as_our_own_choice_is() {
    let job = then(&[("a", H200, 20), ("b", H200, 20)]);
    let mut here = now(&[
        ("a", H200, 90),
        ("b", H200, 90),
        ("c", H200, 90),
        ("full", H200, 10),
        ("other", H100, 70),
        ("mig", H200, 90),
    ]);
    here.gpus[5].mig = Some(true);
    let good: [(Map, Map); 3] = [
        (&[("a", "c"), ("b", "b")], &[("a", "c"), ("b", "b")]),
        (&[("b", "a"), ("a", "b")], &[("a", "b"), ("b", "a")]),
        (&[("a", "a"), ("b", "b")], &[]),
    ];
    for (wanted, expected) in good {
        let plan = plan_on(&job, &here, wanted).unwrap();
        assert_eq!(plan.map, pairs(expected), "{wanted:?}");
    }
    let bad: [(Map, &str); 8] = [
        (&[("a", "c")], "lacks NVIDIA H200 (b)"),
        (&[("a", "c"), ("b", "c")], "names c twice"),
        (&[("a", "c"), ("a", "b")], "names a twice"),
        (&[("a", "c"), ("x", "b")], "replaces x"),
        (
            &[("a", "c"), ("b", "x")],
            "names x, which this machine does not have",
        ),
        (
            &[("a", "full"), ("b", "b")],
            "NVIDIA H200 (full) has 10.0 GiB free",
        ),
        (&[("a", "mig"), ("b", "b")], "is in MIG mode"),
        (&[("a", "other"), ("b", "b")], "there is only NVIDIA H100"),
    ];
    for (wanted, expected) in bad {
        let refusal = plan_on(&job, &here, wanted).unwrap_err().to_string();
        assert!(refusal.contains(expected), "{wanted:?}: {refusal}");
    }
}

#[test]
fn only_temporary_refusals_are_retried() {
    let job = then(&[("a", H200, 20)]);
    let full = plan_on(&job, &now(&[("a", H200, 10)]), &[]).unwrap_err();
    let gone = plan_on(&job, &now(&[("c", H100, 90)]), &[]).unwrap_err();
    assert!(full.may_pass() && !gone.may_pass());
}

#[test]
fn image_with_uuids_only_is_restored_on_the_same_gpus() {
    let mut job = then(&[("a", "", 0)]);
    job.gpus[0].used_bytes = None;
    assert_eq!(chosen(&job, &now(&[("a", H200, 1)])), GpuPairs::new());
    let elsewhere = chosen(&job, &now(&[("c", H200, 1)]));
    assert_eq!(elsewhere, pairs(&[("a", "c")]));
}
