//! Templates under a real Slurm: time limits, preemption, scancel, exit codes. Only the parts that users have to edit
//! are edited.

use std::fs;

use super::cluster::{Cluster, NODES, messages_of};
use crate::harness::{Place, apply, as_root_and_user, as_user, lines};

use super::templates::filled;

/// Returns the template with other times: Slurm counts them in minutes.
fn with_times(script: &str, limit: &str, before: &str) -> String {
    let limited = script.replace("--time=24:00:00", &format!("--time={limit}"));
    let both = limited.replace("USR2@300", &format!("USR2@{before}"));
    assert_ne!(limited, script);
    assert_ne!(both, limited);
    both
}

/// Waits for the job's end, which must equal that of an uninterrupted one.
fn ends_equal(place: &Place, cluster: &Cluster<'_>, id: &str, restarts: &str) {
    place.go();
    cluster.wait_for(id, &["JobState=COMPLETED", "ExitCode=0:0", restarts]);
    assert_eq!(place.text("log"), lines(40));
    let output = place.text(&format!("train-{id}.out"));
    assert_eq!(output, lines(40), "{}", place.text(&messages_of(id)));
}

#[apply(as_root_and_user)]
fn slurm_time_limit_saves_and_the_next_allocation_continues() {
    let place = Place::new();
    let Some(cluster) = Cluster::start(&place, 1) else {
        return;
    };
    let id = cluster.submit(&with_times(&filled(&place, "slurm"), "1", "40"), &[]);
    cluster.wait_for(&id, &["Restarts=1"]);
    assert_eq!(place.images().len(), 1, "{}", place.text(&messages_of(&id)));
    ends_equal(&place, &cluster, &id, "Restarts=1");
}

#[apply(as_user)]
fn job_not_saved_in_time_continues_from_an_older_image() {
    let place = Place::new();
    let Some(cluster) = Cluster::start(&place, 1) else {
        return;
    };
    fs::write(
        place.file("ckpt-run.toml"),
        "[hooks]\nbefore_snapshot = \"test ! -e slow || sleep 1000\"\ntimeout = \"1h\"\n",
    )
    .unwrap();
    // Slurm checks every 30 s, and sends the signal rather too early: 25 s after the start at the earliest.
    let id = cluster.submit(&with_times(&filled(&place, "slurm"), "1", "5"), &[]);
    place.wait_for("log", "20\n");
    place.snapshot();
    fs::write(place.file("slow"), "").unwrap();
    cluster.wait_for(&id, &["Restarts=1"]);
    assert_eq!(place.images().len(), 1);
    fs::remove_file(place.file("slow")).unwrap();
    ends_equal(&place, &cluster, &id, "Restarts=1");
}

/// Starts another job that occupies this node until the file `enough` exists.
fn take(cluster: &Cluster<'_>, node: &str) -> String {
    let node = format!("--nodelist={node}");
    let wrapped = "--wrap=until [ -e enough ]; do sleep 0.1; done";
    let urgent = ["--parsable", "--partition=urgent", "--gres=gpu:1", wrapped];
    let other = cluster.tell("sbatch", &[&urgent[..], &[&node]].concat());
    cluster.wait_for(&other, &["JobState=RUNNING"]);
    other
}

/// Starts another job that preempts the only node.
fn preempt(place: &Place, cluster: &Cluster<'_>, id: &str) {
    let other = take(cluster, NODES[0]);
    cluster.wait_for(id, &["JobState=PENDING", "Restarts=1"]);
    fs::write(place.file("enough"), "").unwrap();
    cluster.wait_for(&other, &["JobState=COMPLETED"]);
}

#[apply(as_root_and_user)]
fn preempted_slurm_job_continues_on_the_next_node() {
    let place = Place::new();
    let Some(cluster) = Cluster::start(&place, 1) else {
        return;
    };
    let id = cluster.submit(&filled(&place, "slurm-preempt"), &[]);
    place.wait_for("log", "5\n");
    cluster.wait_for_step(&id);
    preempt(&place, &cluster, &id);
    assert_eq!(place.images().len(), 1, "{}", place.text(&messages_of(&id)));
    ends_equal(&place, &cluster, &id, "Restarts=1");
}

#[apply(as_user)]
fn preemption_without_notice_continues_from_newest_image() {
    let place = Place::new();
    let Some(cluster) = Cluster::start(&place, 1) else {
        return;
    };
    let script = filled(&place, "slurm-preempt");
    let id = cluster.submit(&script, &["--partition=graceless"]);
    place.wait_for("log", "5\n");
    place.snapshot();
    preempt(&place, &cluster, &id);
    ends_equal(&place, &cluster, &id, "Restarts=1");
}

/// Returns the node of a job, and the other of two.
fn here_and_there(cluster: &Cluster<'_>, id: &str) -> (&'static str, &'static str) {
    let known = cluster.job(id);
    let is_on = |node| known.contains(&format!(" NodeList={node} "));
    if is_on(NODES[0]) {
        (NODES[0], NODES[1])
    } else {
        assert!(is_on(NODES[1]), "{known}");
        (NODES[1], NODES[0])
    }
}

#[apply(as_user)]
fn job_of_a_preempted_node_continues_on_another() {
    let place = Place::new();
    let Some(cluster) = Cluster::start(&place, 2) else {
        return;
    };
    let id = cluster.submit(&filled(&place, "slurm-preempt"), &[]);
    place.wait_for("log", "5\n");
    cluster.wait_for_step(&id);
    let (here, there) = here_and_there(&cluster, &id);
    take(&cluster, here);
    cluster.wait_for(&id, &["JobState=RUNNING", &format!("NodeList={there}")]);
    assert_eq!(place.images().len(), 1, "{}", place.text(&messages_of(&id)));
    ends_equal(&place, &cluster, &id, "Restarts=1");
}

#[apply(as_user)]
fn job_of_a_failed_node_continues_on_another() {
    let place = Place::new();
    let Some(cluster) = Cluster::start(&place, 2) else {
        return;
    };
    let id = cluster.submit(&filled(&place, "slurm"), &[]);
    place.wait_for("log", "5\n");
    place.snapshot();
    let (here, there) = here_and_there(&cluster, &id);
    cluster.lose(here);
    cluster.wait_for(&id, &["JobState=RUNNING", &format!("NodeList={there}")]);
    ends_equal(&place, &cluster, &id, "Restarts=1");
    let said = place.text(&messages_of(&id));
    assert!(said.contains("restored image=000001"), "{said}");
}

#[apply(as_user)]
fn scancel_cancels() {
    for template in ["slurm", "slurm-preempt"] {
        let place = Place::new();
        let Some(cluster) = Cluster::start(&place, 1) else {
            return;
        };
        let script = filled(&place, template);
        let id = cluster.submit(&script, &[]);
        place.wait_for("log", "20\n");
        // The image allows the job to continue.
        place.snapshot();
        cluster.tell("scancel", &[&id]);
        cluster.wait_for(&id, &["JobState=CANCELLED", "Restarts=0"]);
        let id = cluster.submit(&script, &[]);
        place.go();
        cluster.wait_for(&id, &["JobState=COMPLETED"]);
        assert_eq!(place.text("log"), lines(40));
        let said = place.text(&messages_of(&id));
        assert!(said.contains("restored image=000001"), "{said}");
    }
}

#[apply(as_user)]
fn the_batch_shell_alone_signalled_saves_and_stops_the_job() {
    for (signal, state) in [("TERM", "JobState=FAILED"), ("USR2", "JobState=PENDING")] {
        let place = Place::new();
        let Some(cluster) = Cluster::start(&place, 1) else {
            return;
        };
        let id = cluster.submit(&filled(&place, "slurm"), &[]);
        place.wait_for("log", "5\n");
        cluster.tell("scancel", &["--batch", "--signal", signal, &id]);
        cluster.wait_for(&id, &[state]);
        assert_eq!(place.images().len(), 1);
    }
}

#[apply(as_user)]
fn a_job_that_fails_fails_the_batch_job_and_is_not_requeued() {
    for template in ["slurm", "slurm-preempt"] {
        let place = Place::new();
        let Some(cluster) = Cluster::start(&place, 1) else {
            return;
        };
        let script = filled(&place, template);
        fs::write(place.file("job.py"), "raise SystemExit(7)\n").unwrap();
        let id = cluster.submit(&script, &[]);
        cluster.wait_for(&id, &["JobState=FAILED", "ExitCode=7:0", "Restarts=0"]);
    }
}
