"""Rehearsals of jobs: one that passes and one that cannot, without any leftovers."""

import os
import pathlib

from . import processes, supervised
from .trials import Failure

# Time for a job to show that it computes: PyTorch may load for long.
PATIENCE_SECONDS = 60
# Existing files, and those that the trial creates.
KNOWN = {"ckpt-run.toml", "stdout", "stderr"}
# Figures in the report of a pass.
FIGURES = ("checked", "frozen", "durable", "restore", "image", "interval")
STEPS = (
    "machine",
    "start",
    "snapshot",
    "continues",
    "kill",
    "restore",
    "runs again",
    "again",
    "end",
    "first run",
    "second run",
    "output",
    "files",
)


def passes(trial):
    """PASS with all figures, exit code 0, and no leftovers."""
    run, lines = rehearse(trial)
    trial.outcome.notes += [line for line in lines if line.startswith(("skipped", "UNCLEAR"))]
    verdict = next((at for at, line in enumerate(lines) if line.startswith("PASS: ")), None)
    if run.code() != 0 or verdict is None:
        raise Failure(f"exit code {run.code()}: {told(lines, 'FAIL') or told(lines, 'INCONCLUSIVE')}")
    trial.outcome.notes += [" ".join(line.split()) for line in lines[verdict:]]
    names = [line.split()[0] for line in lines[verdict + 1 :]]
    if missing := [name for name in FIGURES if name not in names]:
        raise Failure(f"it does not tell: {' '.join(missing)}")
    done = [line.partition(" ")[2].strip() for line in lines[:verdict]]
    if missing := [step for step in STEPS if not any(map(begins(step), done))]:
        raise Failure(f"steps are missing: {', '.join(missing)}")
    nothing_left(run)
    return "passes"


def fails(trial):
    """FAIL with reason and remedy, exit code 1, and no leftovers."""
    run, lines = rehearse(trial)
    reason, remedy = told(lines, "FAIL: "), told(lines, "  -> ")
    trial.outcome.notes += [f"exit code {run.code()}", reason, remedy.strip()]
    if run.code() != 1 or not reason or not remedy:
        raise Failure("a FAIL with reason, remedy and exit code 1 was expected")
    word = "managed memory" if trial.tools.device == "cuda" else "pipe"
    if word not in reason.lower():
        raise Failure(f"the reason does not name {word}")
    if not any(map(begins("FAILED   snapshot"), lines)):
        raise Failure("it was not the snapshot that failed")
    nothing_left(run)
    return "fails with reason and remedy"


def rehearse(trial):
    """Returns the completed rehearsal, and its lines."""
    folder, tools = trial.folder / "rehearsal", trial.tools
    folder.mkdir(parents=True)
    text = supervised.Settings(memory=tools.memory).text(tools.cpus)
    (folder / "ckpt-run.toml").write_text(text, encoding="ascii")
    own = [tools.bin, "rehearse", "--criu", tools.criu, "--seconds", PATIENCE_SECONDS, "--"]
    run = trial.start(
        lambda words, folder, environment: processes.Program([*own, *words], folder, environment),
        folder.name,
        trial.job.ms_per_step,
    )
    trial.until(lambda: run.code() is not None, "the end of the rehearsal")
    return run, run.stdout.read_text(errors="replace").splitlines()


def told(lines, beginning):
    return next((line for line in lines if line.startswith(beginning)), "")


def begins(beginning):
    return lambda line: line.startswith(beginning)


def nothing_left(run):
    """Checks for leftover files and processes."""
    if files := {path.name for path in run.folder.iterdir()} - KNOWN:
        raise Failure(f"left in its folder: {' '.join(sorted(files))}")
    pids = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_in(pid, run)]
    if pids:
        raise Failure(f"{len(pids)} processes are left")


def is_in(pid, run):
    # The job runs in a copy beside its folder.
    try:
        return pathlib.Path(os.readlink(f"/proc/{pid}/cwd")).is_relative_to(run.folder.parent)
    except OSError:
        return False
