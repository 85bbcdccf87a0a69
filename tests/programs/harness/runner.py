"""Command line, and parallel execution of the rounds."""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import random
import shutil
import signal
import tempfile
import threading
import time
import traceback

from . import catalog, packages, report, rounds, supervised, unwatched

ROOT = pathlib.Path(__file__).resolve().parents[3]
# A round waits most of the time: it uses a core for about 2 of its 12 seconds.
PARALLEL = 3 * (os.cpu_count() or 1)
# Limit on the rounds for a kill: a job may end before its first one.
ROUNDS_FOR_KILL_MAX = 2
WATCHES = {
    "fanotify": ("fanotify",),
    "reports": ("reports",),
    "none": ("none",),
    "included": ("included",),
    "failing": ("failing",),
    "both": ("fanotify", "none"),
    "all": ("fanotify", "none", "included"),
}


@dataclasses.dataclass(frozen=True)
class Tools:
    """Tools of the rounds."""

    bin: pathlib.Path
    criu: pathlib.Path
    python: str
    # Seconds of a job; 0: the program's own.
    seconds: float
    watch: str
    # target/programs: packages and what is compiled.
    folder: pathlib.Path
    keep: bool


def parse(doc):
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    path, names = pathlib.Path, [program.name for program in catalog.PROGRAMS]
    parser.add_argument("--programs", help=f"of: {', '.join(names)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--kills", type=int, default=0, help="least number for each program and watch"
    )
    parser.add_argument("--seconds", type=float, default=0, help="of a job; 0: as the catalog says")
    parser.add_argument("--watch", choices=WATCHES, default="fanotify")
    parser.add_argument("--seed", help="of the random moments; default: a new one, printed")
    parser.add_argument("--parallel", type=int, default=PARALLEL, help="rounds at a time")
    parser.add_argument("--record", action="store_true", help="write benches/results/programs.md")
    parser.add_argument("--strict", action="store_true", help="refused rounds fail, too")
    parser.add_argument("--no-install", action="store_true", help="skip what is not installed")
    parser.add_argument("--bin", type=path, default=ROOT / "target/release/ckpt-run")
    parser.add_argument("--criu", type=path, default=ROOT / ".criu", help="prefix of a CRIU")
    parser.add_argument("--work", type=path, help="folder for the runs, some GB")
    parser.add_argument("--keep", action="store_true", help="keep the folders of all rounds")
    options = parser.parse_args()
    options.bin, options.criu = options.bin.resolve(), options.criu.resolve()
    if not options.bin.exists():
        parser.error(f"{options.bin} does not exist")
    chosen = options.programs.split(",") if options.programs else names
    if unknown := set(chosen) - set(names):
        parser.error(f"no such programs: {', '.join(sorted(unknown))}")
    options.chosen = [program for program in catalog.PROGRAMS if program.name in chosen]
    options.watches = WATCHES[options.watch]
    options.seed = options.seed or str(random.SystemRandom().randrange(1_000_000))
    return options


class Runner:
    def __init__(self, options):
        self.options, self.output = options, threading.Lock()
        self.work = pathlib.Path(tempfile.mkdtemp(prefix="programs.", dir=options.work)).resolve()
        # A job may become another user.
        self.work.chmod(0o711)
        self.folder = ROOT / "target/programs"
        self.folder.mkdir(parents=True, exist_ok=True)
        # (program, watch) → rounds; program → reason.
        self.played, self.skipped = {}, {}

    def run(self):
        """Returns the exit code."""
        begun, options = time.monotonic(), self.options
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)
        self.say(f"seed {options.seed}, folder {self.work}")
        installer = packages.Installer(self.folder, not options.no_install)
        self.python = installer.prepare(options.chosen)
        if "failing" in options.watches:
            self.unwatched = self.work / "ckpt-run"
            unwatched.copy(options.bin, self.unwatched)
        with concurrent.futures.ThreadPoolExecutor(options.parallel) as pool:
            references = [pool.submit(self.begin, it, installer, pool) for it in options.chosen]
            for started in references:
                for played in started.result():
                    played.result()
        counts = report.counts(found for played in self.played.values() for found in played)
        if options.record:
            self.say(f"written: {report.record(self)}")
        bad = counts[rounds.WRONG] + options.strict * counts[rounds.REFUSED]
        if not bad and not options.keep:
            shutil.rmtree(self.work, ignore_errors=True)
        told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        self.say(f"{told}, {len(self.skipped)} programs skipped, {time.monotonic() - begun:.0f} s")
        return 1 if bad or not (self.played or self.skipped) else 0

    def begin(self, program, installer, pool):
        """Runs the reference; returns the futures of the rounds, one for each way of watching."""
        watches = self.options.watches
        if program.becomes_a_user:
            watches = [watch for watch in watches if watch != "reports"]
            if not watches:
                self.skip(program, "needs another user, which a user namespace does not have")
                return []
        with self.faults_of(program, watches[0]):
            if missing := installer.missing(program):
                self.skip(program, missing)
                return []
            place = self.work / program.name / "reference"
            reference = rounds.reference(program, self.tools("fanotify"), place)
            return [pool.submit(self.play, program, watch, reference) for watch in watches]
        return []

    @contextlib.contextmanager
    def faults_of(self, program, watch):
        """Records an exception as a failed round: one program must not end the others."""
        try:
            yield
        except Exception as error:
            self.say(f"{program.name}: {traceback.format_exc()}")
            failed = rounds.Round("-", notes=[f"cannot be tried: {error}"])
            self.played.setdefault((program.name, watch), []).append(failed)

    def skip(self, program, why):
        self.skipped[program.name] = why
        self.say(f"{program.name:<16}SKIPPED: {why}")

    def tools(self, watch):
        options = self.options
        return Tools(
            self.unwatched if watch == "failing" else options.bin,
            *(options.criu, self.python, options.seconds),
            *(watch, self.folder, options.keep),
        )

    def play(self, program, watch, reference):
        options, kills, number = self.options, 0, 0
        most = max(options.rounds, ROUNDS_FOR_KILL_MAX * options.kills)
        while number < options.rounds or (kills < options.kills and number < most):
            number += 1
            seed = f"{options.seed}/{program.name}/{number}"
            folder = self.work / program.name / f"{watch}-{number}"
            with self.faults_of(program, watch):
                found = rounds.play(program, self.tools(watch), folder, seed, *reference)
                kills += found.kills
                self.played.setdefault((program.name, watch), []).append(found)
                text = [f"{program.name:<16}{watch:<10}{found.line()}"]
                self.say("\n".join(text + [f"    {note}" for note in found.notes]))

    def say(self, text):
        with self.output:
            print(text, flush=True)


def end(number, _):
    """Ends the suite and every run at once."""
    for run in list(supervised.Supervised.running):
        run.process.kill()
    os._exit(128 + number)
