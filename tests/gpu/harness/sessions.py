"""Program under ckpt-run that is snapshotted and killed on request, with measured times."""

import dataclasses
import os
import pathlib
import re
import time

from . import meter, processes, supervised
from .trials import Failure, first_difference

# Lines before the first snapshot, and after each event, that show that the program computes.
LINES = 3
# Resolution of the restore's time.
BACK_POLL_SECONDS = 0.002
READ_BYTES = 1 << 24
# `12 1f…`: a step and its result.
STEP_LINE = re.compile(rb"^(\d+) ")


@dataclasses.dataclass(frozen=True)
class Freeze:
    """A snapshot; `durable` is the time from its start until it is on the disk."""

    seconds: float
    phases: dict
    durable: float | None = None
    stored: str = ""


@dataclasses.dataclass(frozen=True)
class Back:
    """Time from a SIGKILL to the first new line, and the restore's time reported by ckpt-run."""

    computing: float
    took: float
    phases: dict


class Session:
    """Context: leaving it ends the program and removes its images."""

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
        """Waits for this many more lines."""
        wanted = self.run.lines() + lines
        self.budget.until(lambda: self.run.lines() >= wanted, "its next steps", self.run)

    def snapshot(self):
        """Takes a snapshot and waits until it is durable and the program computes."""
        code, words = self.run.ask("snapshot", max(1, self.budget.left()))
        if code != 0:
            raise Failure(f"snapshot: {(words.splitlines() or ['failed'])[-1]}")
        log = self.run.log()
        if not log.snapshots:
            raise Failure("the log has no line about the snapshot")
        self.computes()
        return freeze_of(log.snapshots[-1], log.reports[-1])

    def crash(self):
        """Kills the job's first process, with its images in the page cache, and measures the time of the restore.

        The program's output after the snapshot is truncated before the program writes the same again.
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
        """Returns the log after it reports more restores than those."""
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
    """Returns `5.60s` as a number."""
    return float(text.removesuffix("s")) if text else None


def read_all(folder):
    """Reads files into the page cache, which ckpt-run bypasses when writing."""
    for path in (path for path in pathlib.Path(folder).rglob("*") if path.is_file()):
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
            while file.read(READ_BYTES):
                pass


def steps_done(stdout):
    """Returns the steps in a program's output."""
    for line in reversed(stdout.read_bytes().splitlines()):
        if found := STEP_LINE.match(line):
            return int(found[1]) + 1
    return 0


def verdict(reference, stdout):
    """Checks that a program's output is a prefix of the uninterrupted run's; returns the result as text."""
    expected, got = reference.read_bytes(), stdout.read_bytes()
    # The last line may be incomplete.
    got = got[: got.rfind(b"\n") + 1]
    if not got:
        return "FAILED: no output"
    if expected.startswith(got):
        return "equal ({} lines)".format(got.count(b"\n"))
    return f"DIFFERS: {first_difference(reference, stdout)}"
