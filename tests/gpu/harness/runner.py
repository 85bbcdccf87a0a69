"""Command line of the scripts: options, several trials in parallel, and their end."""

import argparse
import concurrent.futures
import dataclasses
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import threading
import time

from . import machine, report, supervised, trials

# A trial with less time left than this is not started.
TRIAL_SECONDS_MIN = 60
# Longest trial: several times the usual time.
TRIAL_SECONDS_MAX = 210
# Time for ending running trials when the time is up.
END_SECONDS = 25
# Length kept of each log.
LOG_BYTES_MAX = 200_000


@dataclasses.dataclass
class Tools:
    """Tools of the trials."""

    bin: pathlib.Path
    criu: pathlib.Path
    python: str
    device: str
    cpus: int
    # `cuda.memory`; empty: ckpt-run's default.
    memory: str = ""


def add_tools(parser):
    """Adds the options for tools and times."""
    root = pathlib.Path(__file__).resolve().parents[3]
    path = pathlib.Path
    parser.add_argument("--bin", type=path, default=root / "target/release/ckpt-run")
    parser.add_argument("--criu", type=path, default=root / ".criu", help="prefix of a CRIU")
    parser.add_argument("--python", default=sys.executable, help="has the jobs' packages")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--work", type=path, help="folder for images and logs, some GB")
    parser.add_argument("--keep", action="store_true", help="the work folder stays")


def check_tools(parser, options):
    options.bin, options.criu = options.bin.resolve(), options.criu.resolve()
    for needed in (options.bin, options.criu):
        if not needed.exists():
            parser.error(f"{needed} is not there")


def parse(doc, jobs, parallel, minutes, add=lambda parser: None):
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_tools(parser)
    parser.add_argument("--jobs", help=f"of: {', '.join(job.name for job in jobs)}")
    parser.add_argument("--parallel", type=int, default=parallel, help="jobs at a time")
    parser.add_argument("--minutes", type=float, default=minutes, help="for everything")
    parser.add_argument("--limit", type=int, default=TRIAL_SECONDS_MAX, help="seconds for a job")
    parser.add_argument("--seed", type=int, default=1, help="of the moments of the crashes")
    parser.add_argument("--cpus", type=int, default=4, help="ckpt-run's, for each job")
    parser.add_argument(
        "--memory", choices=supervised.MEMORY, default="", help="ckpt-run's cuda.memory"
    )
    parser.add_argument(
        "--logs", type=pathlib.Path, help="the logs of failed and odd jobs are copied there"
    )
    parser.add_argument(
        "--record", nargs="?", const="", metavar="NAME", help="writes benches/results/…-NAME.md"
    )
    add(parser)
    options = parser.parse_args()
    check_tools(parser, options)
    usual = [job.name for job in jobs if not job.on_request]
    names = options.jobs.split(",") if options.jobs else usual
    if unknown := set(names) - {job.name for job in jobs}:
        parser.error(f"no such jobs: {', '.join(sorted(unknown))}")
    options.chosen = [job for job in jobs if job.name in names]
    return options


class Runner:
    def __init__(self, options, title):
        self.options, self.title = options, title
        self.tools = Tools(
            *(options.bin, options.criu, options.python, options.device),
            *(options.cpus, options.memory),
        )
        self.deadline = time.monotonic() + options.minutes * 60 - END_SECONDS
        if options.work is not None:
            options.work.mkdir(parents=True, exist_ok=True)
        self.work = pathlib.Path(tempfile.mkdtemp(prefix="gpu-jobs.", dir=options.work)).resolve()
        self.output, self.called_off = threading.Lock(), threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self.called_off.set())
        self.outcomes = []
        # Names, and the reasons for not starting these.
        self.skipped = {}

    def run(self):
        """Returns the exit code."""
        begun = time.monotonic()
        facts = machine.facts(self.tools)
        print(*(f"{name}: {value}" for name, value in facts), sep="\n")
        print(report.header(), flush=True)
        chosen = self.options.chosen
        self.several([job for job in chosen if not job.alone], self.options.parallel)
        self.several([job for job in chosen if job.alone], 1)
        self.outcomes.sort(
            key=lambda found: [j.name for j in self.options.chosen].index(found.name)
        )
        if self.options.record is not None:
            self.record(facts)
        if not self.options.keep:
            shutil.rmtree(self.work, ignore_errors=True)
        bad = [found.name for found in self.outcomes if not found.good]
        passed = len(self.outcomes) - len(bad)
        counts = f"{passed} passed, {len(self.skipped)} skipped, {len(bad)} failed"
        print(f"{counts} in {time.monotonic() - begun:.0f} s", *bad)
        return 1 if bad or not self.outcomes else 0

    def several(self, jobs, at_a_time):
        with concurrent.futures.ThreadPoolExecutor(at_a_time) as pool:
            running = {pool.submit(self.one, job): job for job in jobs}
            for future, job in running.items():
                if error := future.exception():
                    self.say(f"{job.name}: a mistake in this script: {error!r}")
                    self.outcomes.append(trials.Outcome(job.name, verdict="FAILED: in the script"))

    def skip(self, job, why):
        self.skipped[job.name] = f"SKIPPED: {why}"
        self.say(f"{job.name:<16}  SKIPPED: {why}")

    def one(self, job):
        if missing := job.missing(self.tools.device):
            return self.skip(job, f"no {missing} here")
        left = self.deadline - time.monotonic()
        # Seeded by the job's name: the same crashes whatever runs in parallel.
        chance = random.Random(f"{self.options.seed} {job.name}")
        deadline = time.monotonic() + min(left, self.options.limit)
        trial = trials.Trial(
            job, self.tools, self.work / job.name, chance, deadline, self.called_off
        )
        if left < TRIAL_SECONDS_MIN or self.called_off.is_set():
            trial.outcome.fail("not run, no time left")
        else:
            trial.run()
        outcome = trial.outcome
        if outcome.skipped:
            return self.skip(job, outcome.skipped)
        text = [report.line(report.cells(outcome))]
        text += [f"    {note[: report.LINE_WIDTH_MAX * 2]}" for note in report.notes(outcome)]
        if not outcome.good:
            text += [f"    | {line}" for line in report.tails(trial)]
        if not outcome.good or outcome.odd:
            self.keep_logs(trial)
        if not self.options.keep:
            trial.clear()
        self.outcomes.append(outcome)
        return self.say("\n".join(text))

    def say(self, text):
        with self.output:
            print(text, flush=True)

    def keep_logs(self, trial):
        """Copies the ends of a trial's logs, including CRIU's."""
        if not self.options.logs:
            return
        patterns = ("*/stdout", "*/stderr", "*/*.txt", "supervised/store/logs/*")
        for path in (found for pattern in patterns for found in trial.folder.glob(pattern)):
            copy = self.options.logs / trial.job.name / path.relative_to(trial.folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes()[-LOG_BYTES_MAX:])

    def record(self, facts):
        name = self.options.record or dict(facts)["GPU"].partition(",")[0].removeprefix("NVIDIA ")
        name = name.lower().replace(" ", "-")
        path = report.RESULTS / f"{self.title}-{name}.md"
        line = f"tests/gpu/{pathlib.Path(sys.argv[0]).name} {self.arguments()}".rstrip()
        report.record(path, self.title, line, facts, self.outcomes, self.skipped)
        print(f"written: {path}")

    def arguments(self):
        """Returns the options that affect the measurement."""
        options = self.options
        told = [f"--parallel {options.parallel}", f"--seed {options.seed}"]
        told += [f"--jobs {options.jobs}"] if options.jobs else []
        told += [f"--memory {options.memory}"] if options.memory else []
        return " ".join(told)
