"""Reports about a run with its GPUs; and jobs that hang."""

import json
import pathlib
import time

from . import machine, processes, sessions, supervised
from .trials import Failure

# Tolerance between freezes in text and as numbers.
ROUNDING_SECONDS = 0.011
FREEZE_SECONDS_MAX = 60
SNAPSHOTS_TOLD_MAX = 10
# Phases of a snapshot of a GPU job.
GPU_PHASES = {"lock", "suspend", "dump"}
NOT_RUNNING = 3

LINES = 5
# The sign and its limit, which is longer than PyTorch takes to start; without a GPU, and with snapshots all the time.
GPU_SIGN = ("gpu", "30s")
CPU_SIGN, CPU_SIGN_ALWAYS = ("cpu", "5s"), ("output", "20s")
# From the job's last attempt to the detection, beyond the limit: samples, a snapshot in progress, stacks.
LATE_SECONDS_MAX = 70
# All images of a silence, and those before it.
KEEP = 50
LOOK_SECONDS = 2
SILENCE = "skipping the images that were taken while the job was silent"


def expect(holds, what):
    if not holds:
        raise Failure(what)


# --- status, show, list, report ---


def status(trial):
    """A run with a crash is reported correctly, while it runs and afterwards."""
    reference = trial.reference()
    run = trial.supervise(f"{trial.job.interval}s")
    trial.computes(run)
    trial.new_image(run)
    trial.crash(run)
    trial.new_image(run)
    told = calm_status(trial, run)
    check_status(trial, run, told)
    gpu = check_images(trial, run)
    trial.demand(run, "report -o running.html")
    trial.finish(run, "the job")
    trial.finish(reference, "the uninterrupted run")
    trial.same(reference, run)
    code, over = trial.ask(run, "status --json")
    over = json.loads(over)
    expect(code == NOT_RUNNING and over["state"] == "finished", f"then {over['state']}, {code}")
    expect(over["exit_code"] == 0, f"then exit code {over['exit_code']}")
    check_report(trial, run, gpu)
    freezes = " ".join(f"{one['freeze_seconds']:.2f}" for one in told["snapshots"])
    trial.outcome.notes.append(f"freezes told: {freezes}; {gpu or 'no GPU'}")
    return "told as it was, equal"


def calm_status(trial, run):
    """Returns `status --json` between two snapshots, with the log at the same point."""
    found = []

    def calm():
        found[:] = [json.loads(trial.demand(run, "status --json"))]
        told, images = found[0], run.log().images
        counted = told["summary"]["snapshots"] == len(images)
        return (
            told["state"] == "running" and counted and told["snapshots"][-1]["image"] == images[-1]
        )

    trial.until(calm, "a status between two snapshots", run)
    return found[0]


def check_status(trial, run, told):
    log, summary = run.log(), told["summary"]
    words = trial.job.words(trial.tools, trial.job.ms_per_step)
    for name, is_so in (
        ("pid", run.pid),
        ("job_pid", run.job()[0]),
        ("command", words),
        ("store", str(run.store)),
        ("interval_seconds", trial.job.interval),
        ("failed_in_a_row", 0),
    ):
        expect(told[name] == is_so, f"status: {name} is {told[name]}, and not {is_so}")
    expect(
        0 <= told["next_snapshot_seconds"] <= trial.job.interval, "status: next_snapshot_seconds"
    )
    freezes = dict(zip(log.images, (sessions.seconds_of(one["freeze"]) for one in log.reports)))
    snapshots = told["snapshots"]
    images = [one["image"] for one in snapshots]
    expect(images == log.images[-SNAPSHOTS_TOLD_MAX:], f"status: {images}, and not {log.images}")
    for one in snapshots:
        freeze, durable = one["freeze_seconds"], one["durable_seconds"]
        is_told = f"status: {one}, and {freezes[one['image']]} in the log"
        expect(abs(freeze - freezes[one["image"]]) < ROUNDING_SECONDS, is_told)
        expect(0 < freeze <= FREEZE_SECONDS_MAX and freeze < durable, is_told)
        expect(one["raw_bytes"] > 0 and one["stored_bytes"] > 0, is_told)
        expect(one["trigger"] == "schedule", is_told)
    total = sum(freezes.values())
    error = abs(summary["freeze_seconds"] - total)
    expect(
        error < ROUNDING_SECONDS * len(freezes), f"status: {summary}, and {total:.2f} in the log"
    )
    expect(sum(summary["freeze_counts"]) == len(freezes), f"status: {summary}")
    counts = [summary[name] for name in ("crashes", "survived", "restores", "hangs")]
    expect(counts == [1, 1, 1, 0], f"status: {summary}")
    expect(summary["restore_seconds"] > 0 and summary["saved_seconds"] > 0, f"status: {summary}")
    expect(told["usage"]["bytes"] > 0 and told["free_bytes"] > 0, f"status: {told['usage']}")


def check_images(trial, run):
    """Checks `list` and `show`; returns the name of the GPU that the job used."""
    listed = json.loads(trial.demand(run, "list --json"))
    table = trial.demand(run, "list").splitlines()
    # The schedule may have added one.
    expect(len(table) > 1 and listed, "list: no images")
    expect(all(not one["damaged"] and one["freeze_ms"] > 0 for one in listed), f"list: {listed}")
    image = listed[-1]["id"]
    expect(any(image in line for line in table), f"list: no line about {image}: {table}")
    shown = json.loads(trial.demand(run, f"show --json {image}"))
    text = trial.demand(run, f"show {image}")
    names = {phase["name"] for phase in shown["phases"]}
    missing = [
        name for name in ("freeze", *names) if f"\n{name} " not in text.replace("\n  ", "\n")
    ]
    expect(not missing, f"show: nothing about {missing}: {text}")
    expect("process_tree" in shown and shown["processes"] >= 1, "show: no processes")
    if trial.tools.device == "cpu":
        expect(shown["cuda"] is None and "cuda       none" in text, "show: CUDA without a GPU")
        return ""
    expect(GPU_PHASES <= names, f"show: phases {names}")
    cuda = shown["cuda"]
    used = [gpu for gpu in cuda["gpus"] if gpu["used_bytes"]]
    expect(len(used) == 1 and cuda["pids"], f"show: {cuda['gpus']}, {cuda['pids']}")
    gpu = used[0]
    # During a snapshot it is on none.
    on_it = f"its processes to be on {gpu['uuid']}"
    trial.until(lambda: machine.gpus_of(run.job()) == [gpu["uuid"]], on_it, run)
    expect(gpu["used_bytes"] < gpu["memory_bytes"], f"show: {gpu}")
    expect(gpu["name"] in machine.gpu_query("name"), f"show: {gpu}")
    expect(cuda["driver"] == driver(), f"show: driver {cuda['driver']}")
    for word in (gpu["name"], gpu["uuid"], cuda["driver"], "in use"):
        expect(word in text, f"show: nothing about {word}: {text}")
    return gpu["name"]


def check_report(trial, run, gpu):
    told = json.loads(trial.demand(run, "report --json"))
    trial.demand(run, "report -o run.html")
    pages = [
        (run.folder / name).read_text(encoding="utf-8") for name in ("running.html", "run.html")
    ]
    for page in pages:
        expect(page.lower().startswith("<!doctype html") and "</html>" in page, "report: no page")
        expect("1 of 1" in page, "report: nothing about the crash")
        expect(gpu in page, f"report: nothing about {gpu}")
        expect(trial.tools.device == "cpu" or driver() in page, "report: nothing about the driver")
    expect(told["ended"] is not None, "report: it has not ended")
    summary = told["summary"]
    expect((summary["crashes"], summary["survived"]) == (1, 1), f"report: {summary}")
    expect(summary["snapshots"] == len(run.log().images), f"report: {summary}")
    expect(gpu in " ".join(map(str, told["machine"]["gpus"])), f"report: {told['machine']}")
    kinds = {mark["kind"] for mark in told["marks"]}
    expect({"snapshot", "crash"} <= kinds, f"report: marks {kinds}")


def driver():
    return next(iter(machine.gpu_query("driver_version")), "no driver")


# --- hangs ---


def hangs(trial, always=False):
    """A silent job is killed and restored from an earlier image, and ends equal; `always`: snapshots continue."""
    on_gpu = trial.tools.device == "cuda"
    sign = GPU_SIGN if on_gpu else CPU_SIGN_ALWAYS if always else CPU_SIGN
    mark = trial.folder / "reference" / "hung"
    mark.parent.mkdir(parents=True)
    mark.touch()
    reference = trial.reference()
    settings = supervised.Settings(memory=trial.tools.memory, keep=KEEP, hang=sign)
    # A restore would remove this file otherwise, and the job would hang again.
    kept = {"CKPT_RUN_FILES_EXCLUDE": mark.name}
    run = trial.supervise(f"{trial.job.interval}s" if always else "never", kept, settings=settings)
    trial.computes(run, LINES)
    if not always:
        trial.demand(run, "snapshot")
    busy = utilization()
    trial.until((run.folder / "hung").exists, "its hang", run)
    before = len(run.log().images)
    trial.outcome.notes.append(f"hang.{sign[0]} = {sign[1]}; images before: {before}")
    expect(not run.log().restores, "it was restored before it hung")
    named = f"process {processes.pid_inside(run.job()[0])}"
    idle = wait_for_the_finding(trial, run, seconds(sign[1]) + LATE_SECONDS_MAX)
    if on_gpu:
        trial.outcome.notes.append(f"GPU busy before: {busy}, while it hung: {idle} %")
    check_finding(trial, run, always, named)
    trial.finish(run, "the job")
    trial.finish(reference, "the uninterrupted run")
    trial.same(reference, run)
    expect(len(run.log().hangs) == 1, f"taken for hung {len(run.log().hangs)} times")
    return "restored, equal"


def wait_for_the_finding(trial, run, seconds_max):
    """Returns the GPU's utilization meanwhile, from samples."""
    begun, seen = time.monotonic(), []
    before = len(run.log().images)

    def waited():
        passed = time.monotonic() - begun
        if passed > LOOK_SECONDS * (len(seen) + 1):
            seen.append(utilization())
        return run.log().hangs or passed > seconds_max

    trial.until(waited, "the end of its silence", run)
    taken = len(run.log().images) - before
    passed = time.monotonic() - begun
    trial.outcome.notes.append(f"silent for {passed:.0f} s, images meanwhile: {taken}")
    if not run.log().hangs:
        trial.outcome.notes.append(f"GPU busy meanwhile: {' '.join(seen)} %")
        raise Failure(f"not taken for hung within {passed:.0f} s")
    return " ".join(seen)


def check_finding(trial, run, always, named):
    reason, path = run.log().hangs[0]
    trial.outcome.notes.append(reason)
    trial.until(lambda: run.log().restores, "the restore", run)
    log = run.log()
    stacks = pathlib.Path(path).read_text(encoding="utf-8", errors="replace")
    for word in (reason, named, "sleep"):
        expect(word in stacks, f"nothing about {word!r} in {path}")
    restored, newest = log.restored[0], max(log.images)
    trial.outcome.notes.append(f"restored from {restored}; the newest was {newest}")
    left_out = any(SILENCE in line for line in log.own)
    expect(left_out == always, f"{SILENCE!r} was {'' if left_out else 'not '}said")
    expect((restored < newest) == always, f"restored from {restored}, the newest was {newest}")


def seconds(text):
    return int(text.removesuffix("s"))


def utilization():
    """Returns the utilization of the first GPU in percent, as text."""
    return next(iter(machine.gpu_query("utilization.gpu")), "?")
