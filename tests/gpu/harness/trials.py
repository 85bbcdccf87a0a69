"""Trials of a job: killed and restored, or refused; and the comparison afterwards."""

import dataclasses
import shutil
import statistics
import time

from . import machine, processes, programs, supervised

POLL_SECONDS = 0.05
# A refused snapshot must not leave the job slower than this share of its pace before; others share the GPU.
PACE_MIN = 0.9
# Steps before and after the refused snapshots from which the pace is computed.
PACE_STEPS = 40
REFUSALS = 2
# Processes that a crash kills, of those of the job: all, the first one, the last one.
WHOLE = slice(None)
KILLED = (WHOLE, slice(1), slice(-1, None))


class Failure(Exception):
    """Error that ends a trial, described for the user."""


class Skipped(Exception):
    """The trial is not possible here, for this reason."""


@dataclasses.dataclass
class Outcome:
    """A row of the table."""

    name: str
    good: bool = False
    verdict: str = ""
    snapshots: list = dataclasses.field(default_factory=list)
    failures: list = dataclasses.field(default_factory=list)
    called_off: int = 0
    crashes: int = 0
    restores: int = 0
    back: list = dataclasses.field(default_factory=list)
    seconds: float = 0
    notes: list = dataclasses.field(default_factory=list)
    # Its logs are worth reading, however it ends.
    odd: bool = False
    # The reason for not trying it.
    skipped: str = ""

    def fail(self, why):
        """Records a failure; the first reason counts."""
        if self.good or not self.verdict.startswith("FAILED"):
            self.good, self.verdict = False, f"FAILED: {why}"


class Trial:
    """One job in a separate folder."""

    def __init__(self, job, tools, folder, random, deadline, called_off):
        self.job, self.tools, self.folder, self.random = job, tools, folder, random
        self.deadline, self.called_off = deadline, called_off
        self.outcome = Outcome(job.name)
        # Environment of the job and of all programs around it.
        self.environment = job.environment()
        self.programs = []
        self.plain = None

    def run(self):
        """Never raises: other jobs are not affected."""
        begun = time.monotonic()
        self.guard(self.work)
        for program in self.programs:
            self.guard(program.end)
        self.guard(self.count)
        self.outcome.seconds = time.monotonic() - begun

    def work(self):
        if self.job.program:
            programs.build(self.job.program, self.folder)
        self.outcome.verdict = self.job.trial(self)
        self.outcome.good = True

    def guard(self, step):
        try:
            step()
        except Skipped as skipped:
            self.outcome.skipped = str(skipped)
        except Failure as failure:
            self.outcome.fail(str(failure))
        except Exception as error:  # noqa: BLE001 (other jobs continue)
            self.outcome.fail(f"{type(error).__name__}: {error}")

    def count(self):
        for program in self.programs:
            if isinstance(program, supervised.Supervised):
                log = program.log()
                self.outcome.snapshots = log.snapshots
                self.outcome.failures = log.failures
                self.outcome.called_off = log.called_off
                self.outcome.restores = len(log.restores)
                if len(log.ends) > self.outcome.crashes:
                    self.outcome.odd = True
                    self.outcome.notes.append(
                        f"ended more often than killed: {'; '.join(log.ends)}"
                    )

    # --- steps of trials ---

    def reference(self, pace_ms=0):
        """Starts the job without ckpt-run."""
        self.plain = self.start(processes.Program, "reference", pace_ms)
        return self.plain

    def supervise(self, interval, environment=None, options=(), settings=None, name="supervised"):
        """Starts the job under ckpt-run, or continues its run."""
        return self.start(
            lambda words, folder, own: supervised.Supervised(
                self.tools, folder, words, own | (environment or {}), interval, options, settings
            ),
            name,
            self.job.ms_per_step,
        )

    def start(self, make, name, pace_ms):
        words = self.job.words(self.tools, pace_ms)
        program = make(words, self.folder / name, self.environment)
        self.programs.append(program)
        return program

    def until(self, condition, what, program=None):
        """Waits until a condition holds; an earlier exit of `program` is a failure."""
        while not condition():
            if self.plain and self.plain.code():
                raise Failure(f"the uninterrupted run ended with {self.plain.code()}")
            if program and program.code() is not None:
                # Both may have happened since the condition was checked.
                if condition():
                    return
                raise Failure(f"ended with {program.code()} before {what}")
            if self.called_off.is_set() or time.monotonic() > self.deadline:
                raise Failure(f"no time left while waiting for {what}")
            time.sleep(POLL_SECONDS)

    def wait(self, seconds, program):
        """Waits for a random time."""
        self.pass_time(seconds, "its crash", program)

    def pass_time(self, seconds, what="a moment", program=None):
        moment = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= moment, what, program)

    def computes(self, run, steps=1):
        self.until(lambda: run.lines() >= steps, f"step {steps}", run)

    def new_image(self, run):
        """Waits for an image of the job's present state: the next one may have been begun earlier."""
        wanted = len(run.log().snapshots) + 2
        self.until(lambda: len(run.log().snapshots) >= wanted, "two new images", run)

    def crash(self, run, which=WHOLE):
        """Kills the whole job, its first process or its last one, and waits until it is restored."""
        restores, pids = len(run.log().restores), run.job()
        if not processes.kill(pids[which]):
            raise Failure("no process of the job was there to be killed")
        killed = time.monotonic()
        self.outcome.crashes += 1
        self.until(lambda: len(run.log().restores) > restores, "the restore", run)
        self.outcome.back.append(time.monotonic() - killed)

    def kill_all(self, run):
        """Sends SIGKILL to ckpt-run, as if the machine failed; its job dies with it."""
        job = run.job()
        run.kill()
        self.outcome.crashes += 1
        self.until(lambda: not any(map(processes.alive, job)), "the end of the killed job")

    def finish(self, program, what):
        self.until(lambda: program.code() is not None, f"the end of {what}")
        if program.code() != 0:
            raise Failure(f"{what} ended with {program.code()}")

    def same(self, reference, run):
        """Compares the result files and stdout byte for byte."""
        for name in (self.job.result, "stdout"):
            expected, got = (where.folder / name for where in (reference, run))
            if not expected.is_file() or not got.is_file():
                raise Failure(f"there is no {name} to compare")
            if expected.read_bytes() != got.read_bytes():
                raise Failure(f"DIFFERS: {name}: {first_difference(expected, got)}")

    def ask(self, run, verb):
        return run.ask(verb, max(1, self.deadline - time.monotonic()))

    def demand(self, run, verb):
        code, words = self.ask(run, verb)
        if code != 0:
            raise Failure(f"{verb}: {words}")
        return words

    def clear(self):
        """Removes images, which are large; keeps logs."""
        shutil.rmtree(self.folder / "supervised" / "store", ignore_errors=True)


def first_difference(expected, got):
    expected, got = (path.read_text(errors="replace").splitlines() for path in (expected, got))
    for number, (left, right) in enumerate(zip(expected, got), 1):
        if left != right:
            return f"line {number}: {right[:50]!r} instead of {left[:50]!r}"
    return f"{len(got)} lines instead of {len(expected)}"


def restored(trial):
    """Killed at random moments, each after a new image, the job's result equals an uninterrupted one."""
    reference = trial.reference()
    run = trial.supervise(f"{trial.job.interval}s")
    for number in range(trial.job.crashes):
        trial.computes(run)
        trial.new_image(run)
        trial.wait(trial.random.uniform(0.1, trial.job.interval + 1), run)
        trial.crash(run, KILLED[number % len(KILLED)])
    trial.finish(run, "the job")
    trial.finish(reference, "the uninterrupted run")
    trial.same(reference, run)
    # None is expected of such a job, and its logs contain more.
    failures = [failure.partition(" (log: ")[0] for failure in run.log().failures]
    trial.outcome.notes += dict.fromkeys(failures)
    trial.outcome.odd |= bool(failures)
    return "equal"


def paused(trial):
    """A paused job is stopped and uses no GPU, on which the uninterrupted run computes meanwhile."""
    run = trial.supervise("never")
    trial.computes(run, PACE_STEPS)
    on = machine.gpus_of(run.job())
    trial.demand(run, "pause")
    left = machine.gpus_of(run.job())
    lines = run.lines()
    reference = trial.reference()
    trial.finish(reference, "the uninterrupted run")
    if run.lines() != lines or run.code() is not None:
        raise Failure("it continued while it was paused")
    trial.demand(run, "unpause --wait")
    back = machine.gpus_of(run.job())
    trial.finish(run, "the job")
    trial.same(reference, run)
    trial.outcome.notes.append(f"GPUs in use: {len(on)}, paused {len(left)}, then {len(back)}")
    if left or on != back:
        raise Failure(f"on {on}, paused on {left}, then on {back}")
    return "paused, equal"


def refused(trial):
    """A snapshot is refused with a message, and the job continues at its pace, to the same result."""
    reference = trial.reference()
    run = trial.supervise("never")
    said = []
    for number in range(REFUSALS):
        trial.computes(run, PACE_STEPS * (number + 1))
        code, words = trial.ask(run, "snapshot")
        if code == 0:
            raise Failure("a snapshot was taken of what cannot be restored")
        said.append(words)
    trial.finish(run, "the job")
    trial.finish(reference, "the uninterrupted run")
    trial.same(reference, run)
    trial.outcome.notes.append(said[0].splitlines()[-1] if said[0] else "nothing was said")
    if any(len(words.splitlines()) != 1 for words in said):
        trial.outcome.notes.append(f"the refusal has {len(said[0].splitlines())} lines, not one")
    # The first step also waits for processes that are still starting.
    times = [float(line) for line in (run.folder / trial.job.times).read_text().split()]
    before, after = (statistics.median(part) for part in (times[:PACE_STEPS], times[-PACE_STEPS:]))
    trial.outcome.notes.append(
        f"step before {before:.0f} ms, after {after:.0f} ms, longest {max(times[1:]):.0f} ms"
    )
    if before / after < PACE_MIN:
        raise Failure(f"slower after the refusals: {before:.0f} ms a step, then {after:.0f} ms")
    return "refused, continues, equal"
