"""Command line, and parallel execution of the tests."""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

from harness import report as programs

from . import report, source, trial

ROOT = pathlib.Path(__file__).resolve().parents[3]
ZDTM = ROOT / "tests/zdtm"
# Limit on a test in one way; every wait in it has a limit of its own.
TRIAL_SECONDS_MAX = 900
CAP_SYS_RESOURCE = 24
NAMESPACES = "--mount --net --ipc --pid --fork --kill-child --mount-proc --propagation private"


@dataclasses.dataclass(frozen=True)
class Tools:
    """ckpt-run's tools, in the form of `harness.supervised`."""

    bin: pathlib.Path
    criu: pathlib.Path
    starter: pathlib.Path
    watch: str = "fanotify"


class Criu:
    """Returns the CRIU of a prefix."""

    def __init__(self, prefix):
        self.words = programs.criu_words(prefix)
        self.version = programs.criu_version(prefix)
        self.environment = {"PATH": os.environ["PATH"]}
        self.features, self.asking = {}, threading.Lock()

    def has_feature(self, name):
        with self.asking:
            if name not in self.features:
                words = [*self.words, "check", "--feature", name]
                done = subprocess.run(words, capture_output=True, check=False)
                self.features[name] = done.returncode == 0
            return self.features[name]


def parse(doc):
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    path = pathlib.Path
    parser.add_argument("--criu-source", type=path, required=True)
    parser.add_argument("--revision", help="of the source; default: the version of the CRIU in use")
    parser.add_argument("--filter", default="", help="regular expression for names of tests")
    parser.add_argument("--parallel", type=int, default=1, help="tests at a time")
    parser.add_argument("--known", type=path, help="file with names of tests that may fail")
    parser.add_argument("--record", action="store_true", help="write benches/results/zdtm.md")
    parser.add_argument("--no-install", action="store_true", help="install nothing")
    parser.add_argument("--bin", type=path, default=ROOT / "target/release/ckpt-run")
    parser.add_argument("--criu", type=path, default=ROOT / ".criu", help="prefix of a CRIU")
    parser.add_argument("--work", type=path, help="folder for the runs")
    parser.add_argument("--keep", action="store_true", help="keep the folders of all tests")
    # One test, in its namespaces: the arguments with which this script calls itself.
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.bin, options.criu = options.bin.resolve(), options.criu.resolve()
    if not options.bin.exists():
        parser.error(f"{options.bin} does not exist")
    return options


def main(doc):
    options = parse(doc)
    criu = Criu(options.criu)
    target = ROOT / "target/zdtm"
    if options.one:
        way, folder, program, words = options.one
        test = source.Test.of(pathlib.Path(program), json.loads(words))
        tools = Tools(options.bin, options.criu, target / "starter")
        as_user = may_change_user() if way == "plain" else way not in trial.AS_ROOT
        arguments = (test, criu, tools, pathlib.Path(folder), as_user)
        return trial.adopt(lambda: trial.one_way(way, *arguments))
    if not options.no_install:
        source.install()
    zdtm, revision = source.build(options.criu_source, options.revision, criu.version, target)
    tests = source.tests(zdtm)
    if shutil.which("gcc"):
        words = ["gcc", "-O2", "-Wall", "-o", target / "starter", ZDTM / "starter.c"]
        subprocess.run(words, check=True)
    return Runner(options, criu, revision).run(tests)


def may_change_user():
    """Returns true if CRIU can dump a process of another user."""
    return bool(int(trial.started.status("self")["CapEff"], 16) >> CAP_SYS_RESOURCE & 1)


class Runner:
    def __init__(self, options, criu, revision):
        self.options, self.criu, self.revision = options, criu, revision
        self.as_user, self.output = may_change_user(), threading.Lock()
        self.work = pathlib.Path(tempfile.mkdtemp(prefix="zdtm.", dir=options.work)).resolve()
        # Users of tests pass through it.
        self.work.chmod(0o755)
        # Name → results of both ways, or the reason for not running it.
        self.found, self.skipped = {}, {}

    def run(self, tests):
        """Returns the exit code."""
        begun, chosen = time.monotonic(), re.compile(self.options.filter)
        tests = [test for test in tests if chosen.search(test.name)]
        self.say(f"{len(tests)} tests of CRIU {self.revision}, folder {self.work}")
        with concurrent.futures.ThreadPoolExecutor(self.options.parallel) as pool:
            list(pool.map(self.one, tests))
        self.seconds = time.monotonic() - begun
        if self.options.record:
            self.say(f"written: {report.record(self)}")
        self.say(report.summary(self))
        bad = [name for name in report.bad(self) if name not in self.known()]
        for name in bad:
            self.say(f"bad: {name}: {report.reason(self.found[name]['kept'])}")
        if not bad and not self.options.keep:
            shutil.rmtree(self.work, ignore_errors=True)
        return 1 if bad or not self.found else 0

    def known(self):
        file = self.options.known
        return file.read_text(encoding="utf-8").split() if file else []

    def one(self, test):
        if why := source.reason_to_skip(test, self.criu):
            self.skipped[test.name] = why
            self.say(f"{test.name:<40}SKIPPED: {why}")
            return
        folder = self.work / test.name
        folder.mkdir(parents=True)
        begun = time.monotonic()
        found = self.found[test.name] = self.ways(test, folder)
        plain, kept = found["plain"], found.get("kept", ("-", ""))
        text = [f"{test.name:<40}plain {plain[0]:<12}{kept[0]:<11}{time.monotonic() - begun:.0f} s"]
        text += [f"    {words[1][:300]}" for words in (plain, kept) if words[1]]
        self.say("\n".join(text))
        if not self.options.keep and kept[0] in (trial.EQUAL, trial.REFUSED, "-"):
            shutil.rmtree(folder, ignore_errors=True)

    def ways(self, test, folder):
        """Returns the results by CRIU alone and, if the test starts here, under ckpt-run."""
        found = {"plain": self.isolated(test, "plain", folder)}
        if found["plain"][0] == trial.NOT_STARTED:
            return found
        kept = self.kept(test, folder, "kept", "untouched")
        if kept[0] == trial.NOT_STARTED:
            # Not as another user.
            kept = self.kept(test, folder, *trial.AS_ROOT)
        return found | {"kept": kept}

    def kept(self, test, folder, way, alone):
        """The result under ckpt-run; a test that fails as a job that is left alone says nothing about snapshots."""
        result, why = self.isolated(test, way, folder)
        if result not in (trial.HARMED, trial.WRONG, trial.HANGS):
            return result, why
        if self.isolated(test, alone, folder)[0] == trial.PASSES:
            return trial.WRONG if result == trial.HARMED else result, why
        if result == trial.HARMED:
            return trial.REFUSED, why
        return trial.NOT_STARTED, f"fails as a job that is left alone: {why}"

    def isolated(self, test, way, folder):
        """Runs this script in separate namespaces, which end with it."""
        options = self.options
        words = ["unshare", *NAMESPACES.split(), sys.executable, ZDTM / "run"]
        words += ["--criu-source", options.criu_source, "--bin", options.bin]
        words += ["--criu", options.criu, "--one", way, folder / way, test.program]
        try:
            done = subprocess.run(
                [*(str(word) for word in words), json.dumps(test.arguments)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TRIAL_SECONDS_MAX,
                check=False,
            )
            return json.loads(done.stdout.strip().splitlines()[-1])
        except subprocess.TimeoutExpired:
            return trial.HANGS, "the suite's limit"
        except (ValueError, IndexError):
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            return trial.WRONG, f"the suite failed: {said}"

    def say(self, text):
        with self.output:
            print(text, flush=True)
