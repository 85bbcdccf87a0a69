"""Part c: many snapshots and kills of a program with changing GPU memory, and its result at the end.

The kills are spread evenly over the snapshots, each at a random moment of the interval.
"""

import random
import statistics
import time

from harness import processes, sessions, subjects, supervised
from harness.budget import OutOfTime
from harness.trials import Failure

TITLE = "c. Endurance"
LEGEND = """Memory is allocated and freed by two threads in each step while ckpt-run (`cuda.memory = "resident"`)
takes a snapshot a second and the job is killed now and then. snapshots: taken, refused ones after a slash (the job
continues). freeze: median and longest; back: from the kill until ckpt-run has restored, median; seconds. result: output
and exit code against an uninterrupted run of as many steps."""
COLUMNS = (
    ("program", 16),
    ("snapshots", 10),
    ("kills", 6),
    ("restores", 8),
    ("freeze", 12),
    ("back", 6),
    ("own MiB", 8),
    ("steps", 6),
    ("result", 0),
)
GIB, PACE_MS, INTERVAL = 2, 20, "1s"
SNAPSHOTS, KILLS = 50, 10
# Time for the end of the job, and the uninterrupted run.
END_SECONDS = 75


def run(context, section):
    subject = subjects.churn(context, GIB)
    folder = context.folder("endurance", "resident")
    settings = supervised.Settings(keep=2, memory="resident", backoff="0s")
    words = subject.endless(PACE_MS)
    with sessions.Session(context, folder, words, settings, INTERVAL) as session:
        why, back = "", []
        try:
            part = context.budget.part(context.budget.left() - END_SECONDS)
            endure(part, session.run, back)
        except OutOfTime as late:
            section.remark(f"cut short: {late}")
        except Failure as failure:
            why = f"FAILED: {failure}"
        result = why or finish(context, subject, session)
        log = session.run.log()
    freezes = [sessions.freeze_of(*both).seconds for both in zip(log.snapshots, log.reports)]
    section.row(
        subject.name,
        f"{len(log.snapshots)}/{len(log.failures)}",
        len(back),
        len(log.restores),
        f"{statistics.median(freezes):.2f}, {max(freezes):.2f}" if freezes else "-",
        f"{statistics.median(back):.2f}" if back else "-",
        f"{session.meter.own_mib:.0f}",
        sessions.steps_done(session.run.stdout),
        result,
    )
    # Repeated refusals are left out; logs are deleted after the run.
    for text in dict.fromkeys(text.partition(" (log: ")[0] for text in log.failures):
        section.remark(text)
    context.judge(result)


def endure(budget, run, back):
    """Waits for the snapshots and kills in between; `back` receives the seconds of each restore."""
    chance = random.Random(1)
    for number in range(1, KILLS + 1):
        snapshots_then(budget, run, SNAPSHOTS * number // KILLS, chance.uniform(0, 1))
        back.append(kill(budget, run))


def snapshots_then(budget, run, count, seconds):
    """Waits for this many snapshots, and a time after that."""
    budget.until(lambda: len(run.log().snapshots) >= count, f"snapshot {count}", run)
    moment = time.monotonic() + seconds
    budget.until(lambda: time.monotonic() >= moment, "a kill", run)


def kill(budget, run):
    """Returns the seconds until it was restored."""
    restores, pids = len(run.log().restores), run.job()
    killed = time.monotonic()
    if not processes.kill(pids[:1]):
        raise Failure("no process of the job was there to be killed")
    budget.until(lambda: len(run.log().restores) > restores, "the restore", run)
    return time.monotonic() - killed


def finish(context, subject, session):
    """Lets the program end, and compares."""
    run = session.run
    try:
        session.computes()
        if subject.ends:
            (run.folder / subjects.ENOUGH).touch()
            context.budget.until(lambda: run.code() is not None, "the end of the job")
            if run.code() != 0:
                return f"FAILED: ended with {run.code()}"
        else:
            run.end()
        folder = context.folder("endurance", "uninterrupted")
        words = subject.words(sessions.steps_done(run.stdout), 0)
        reference = processes.Program(words, folder, context.variables())
        try:
            context.budget.until(lambda: reference.code() is not None, "the uninterrupted run")
        finally:
            reference.end()
    except OutOfTime as late:
        return f"not compared: {late}"
    except Failure as failure:
        return f"FAILED: {failure}"
    result = sessions.verdict(reference.stdout, run.stdout)
    if subject.ends and reference.stdout.read_bytes() != run.stdout.read_bytes():
        return "DIFFERS: at the end"
    return result
