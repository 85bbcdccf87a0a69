"""The driver does not switch away from kernels of resumed processes, and ckpt-run's handling. These trials run alone."""

import subprocess

from . import processes, programs, trials

SPIN = "tests/gpu/jobs/spin.cu"
# Longer than the driver waits for a switch.
LONG_SECONDS, SHORT_SECONDS = 9, 0.01
ROUNDS = 2
# After a snapshot: a missing switch of kernels is noticed after some 6 s.
SECONDS = 10
LAUNCH_FAILURE = "unspecified launch failure"


def long_kernel(trial):
    """Kernels of some seconds beside another program's, before and after the driver has suspended and resumed them."""
    if trial.tools.device != "cuda":
        raise trials.Skipped("no GPU here")
    program = programs.build(SPIN, trial.folder)
    long, other = (
        processes.Program([program, seconds], trial.folder / name, trial.environment)
        for name, seconds in (("long", LONG_SECONDS), ("other", SHORT_SECONDS))
    )
    trial.programs += [long, other]
    trial.computes(other)
    trial.computes(long)
    for words in (f"suspend --timeout {LONG_SECONDS * 2}s", "resume"):
        cuda(trial, words, long)
    lines = long.lines()
    trial.until(lambda: long.code() is not None or long.lines() > lines, "the next kernel")
    first, last = (long.stdout.read_text().splitlines()[place] for place in (0, -1))
    trial.outcome.notes.append(
        f"a kernel of {LONG_SECONDS} s beside another program: {first}; resumed: {last}"
    )
    return "measured"


def cuda(trial, words, program):
    """Uses the driver's calls alone."""
    words = [trial.tools.bin, "cuda", *words.split(), "--pid", program.pid]
    done = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        timeout=LONG_SECONDS * 3,
        check=False,
    )
    if done.returncode != 0:
        raise trials.Failure(f"{words[2]}: {done.stderr.strip()}")


def pair(trial):
    """Two NCCL jobs on the same GPUs: snapshots are refused; when one has ended, the other is snapshotted and restored."""
    if trial.tools.device != "cuda":
        raise trials.Skipped("no GPU here")
    runs = [trial.supervise("never", name=f"supervised-{which}") for which in ("one", "other")]
    for run in runs:
        trial.computes(run, trials.PACE_STEPS)
    for _ in range(ROUNDS):
        for run in runs:
            code, words = trial.ask(run, "snapshot")
            if code == 0 or "on the same GPUs" not in words:
                raise trials.Failure(f"not refused: {words}")
        trial.pass_time(SECONDS)
        go_on(trial, runs)
    trial.outcome.notes.append(words.splitlines()[-1].replace(str(runs[0].store), "STORE"))
    runs[0].end()
    left = runs[1:]
    trial.demand(left[0], "snapshot")
    trial.pass_time(SECONDS)
    go_on(trial, left)
    trial.crash(left[0])
    go_on(trial, left)
    return "refused, then restored"


def go_on(trial, runs):
    """Checks that they compute, and that CUDA has failed in none of them."""
    for run in runs:
        trial.computes(run, run.lines() + trials.PACE_STEPS)
        if LAUNCH_FAILURE in run.stderr.read_text(encoding="utf-8", errors="replace"):
            raise trials.Failure(f"{run.folder.name}: {LAUNCH_FAILURE}")
