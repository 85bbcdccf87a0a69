"""Trial of a job whose machine is lost: the same line, at the same path without files, continues it from a remote store."""

import shutil
import time

from .trials import Failure


def continued(trial):
    """Lost at random moments, each after an image came to the remote store, the job's result equals an uninterrupted one."""
    reference = trial.reference()
    bucket = trial.folder / "bucket"
    bucket.mkdir(mode=0o700)
    remote = ("--remote", f"file://{bucket}", "--take-over")
    lost = []
    try:
        run = start(trial, remote)
        for number in range(trial.job.crashes):
            trial.computes(run)
            trial.until(lambda: run.log().uploads, "an image in the remote store", run)
            trial.wait(trial.random.uniform(0.1, trial.job.interval + 1), run)
            trial.kill_all(run)
            killed = time.monotonic()
            run.move(trial.folder / f"lost-{number}")
            run.clear()
            lost.append(run)
            run = start(trial, remote)
            trial.until(lambda: run.log().restores, "the restore", run)
            trial.outcome.back.append(time.monotonic() - killed)
        trial.finish(run, "the job")
        trial.finish(reference, "the uninterrupted run")
    finally:
        shutil.rmtree(bucket, ignore_errors=True)
    compare(trial, reference, lost, run)
    trial.outcome.notes.append(f"uploads: {', '.join(f'{one:.1f}' for one in run.log().uploads)} s")
    return "continued elsewhere, equal"


def start(trial, remote):
    return trial.supervise(f"{trial.job.interval}s", options=remote)


def compare(trial, reference, lost, last):
    """Compares the result, and the outputs: each machine's begins within the former one's or at its end."""
    expected, got = ((run.folder / trial.job.result).read_bytes() for run in (reference, last))
    if expected != got:
        raise Failure(f"DIFFERS: {trial.job.result}")
    whole, end = reference.stdout.read_bytes(), 0
    for run in (*lost, last):
        piece = run.stdout.read_bytes()
        begin = whole.find(piece)
        if not 0 <= begin <= end:
            raise Failure("DIFFERS: stdout")
        end = max(end, begin + len(piece))
    if end < len(whole):
        raise Failure("DIFFERS: stdout lacks its end")
