"""A program under ckpt-run that is snapshotted and killed on demand, with what each of it took."""

import dataclasses
import os
import pathlib
import re
import time

from . import meter, processes, supervised
from .trials import Failure, first_difference

# Lines before the first snapshot, and after each event, that show that the program computes.
LINES = 3
# How finely the way back is timed.
BACK_POLL_SECONDS = 0.002
READ_BYTES = 1 << 24
# `12 1f…`: a step and what it gave.
STEP_LINE = re.compile(rb"^(\d+) ")


@dataclasses.dataclass(frozen=True)
class Freeze:
    """A snapshot; `durable` is from its start until it is on the disk."""

    seconds: float
    phases: dict
    durable: float | None = None
    stored: str = ""


@dataclasses.dataclass(frozen=True)
class Back:
    """From a SIGKILL to the first new line, and what ckpt-run says that its restore took."""

    computing: float
    took: float
    phases: dict


class Session:
    """A context: leaving it ends the program and removes its images."""

    def __init__(self, context, folder, words, settings, interval="never", launcher=()):
        self.budget = context.budget
        self.run = supervised.Supervised(
            context.tools,
            folder,
            words,
            context.variables(),
            interval,
            settings=settings,
            launcher=launcher,
        )
        self.meter = meter.Meter(self.run.pid)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.meter.end()
        self.run.end()
        self.run.clear()

    def computes(self, lines=LINES):
        """Waits for so many more lines."""
        wanted = self.run.lines() + lines
        self.budget.until(lambda: self.run.lines() >= wanted, "its next steps", self.run)

    def snapshot(self):
        """Takes one and waits until it is durable and the program computes."""
        code, words = self.run.ask("snapshot", max(1, self.budget.left()))
        if code != 0:
            raise Failure(f"snapshot: {(words.splitlines() or ['failed'])[-1]}")
        log = self.run.log()
        if not log.snapshots:
            raise Failure("the log has no line about the snapshot")
        self.computes()
        return freeze_of(log.snapshots[-1], log.reports[-1])

    def crash(self):
        """Kills the job's first process, its images in the page cache, and times the way back.

        What the program wrote after the snapshot is cut off its output, before it writes the same again.
        """
        self.computes()
        read_all(self.run.store)
        known, pids = len(self.run.log().restores), self.run.job()
        least = size = self.run.stdout.stat().st_size
        killed = time.monotonic()
        if not processes.kill(pids[:1]):
            raise Failure("no process of the job was there to be killed")

        def writes_again():
            nonlocal least
            least = min(least, now := self.run.stdout.stat().st_size)
            return least < size and now > least

        self.budget.until(writes_again, "the restore", self.run, BACK_POLL_SECONDS)
        computing = time.monotonic() - killed
        log = self.budget.until(lambda: self.restored_since(known), "its log", self.run)
        self.computes()
        return Back(computing, log.restores[-1], log.ways_back[-1])

    def restored_since(self, known):
        """The log, once it tells of more restores than those."""
        log = self.run.log()
        return log if len(log.restores) > known else None


def freeze_of(phases, report):
    return Freeze(
        seconds_of(report.get("freeze")) or supervised.freeze(phases),
        phases,
        seconds_of(report.get("durable")),
        report.get("stored", ""),
    )


def seconds_of(text):
    """`5.60s` as a number."""
    return float(text.removesuffix("s")) if text else None


def read_all(folder):
    """Into the page cache, which ckpt-run writes past."""
    for path in (path for path in pathlib.Path(folder).rglob("*") if path.is_file()):
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
            while file.read(READ_BYTES):
                pass


def steps_done(stdout):
    """Steps that a program's output tells of."""
    for line in reversed(stdout.read_bytes().splitlines()):
        if found := STEP_LINE.match(line):
            return int(found[1]) + 1
    return 0


def verdict(reference, stdout):
    """Whether a program's output is the beginning of the uninterrupted run's, in words."""
    expected, got = reference.read_bytes(), stdout.read_bytes()
    # The last line may be in the making.
    got = got[: got.rfind(b"\n") + 1]
    if not got:
        return "FAILED: no output"
    if expected.startswith(got):
        return "equal ({} lines)".format(got.count(b"\n"))
    return f"DIFFERS: {first_difference(reference, stdout)}"
