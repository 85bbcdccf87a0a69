"""Job under ckpt-run, and the contents of ckpt-run's log. Its command line and log format are known only here."""

import dataclasses
import re
import shutil
import subprocess

from . import processes

SNAPSHOT = re.compile(r'^ckpt-run: snapshot image=(\d+) .*phases="([^"]*)"')
FIELDS = re.compile(r'\b(freeze|durable|raw|stored)=("[^"]*"|\S+)')
RESTORED = re.compile(r'^ckpt-run: restored image=(\d+) took=([\d.]+)s phases="([^"]*)"')
FAILED = re.compile(r"^ckpt-run: (?:warning|error): (snapshot failed.*)")
UPLOADED = re.compile(r"^ckpt-run: the image is in the remote store .*seconds=([\d.]+)")
HUNG = re.compile(r"^ckpt-run: error: the job hangs, (.*?): it is killed and restored.* log=(\S+)")
# Ends of the job and of attempts to restore it.
ENDED = re.compile(r"^ckpt-run: (?:warning|error): ((?:the job crashed|restore failed).*)")
CALLED_OFF = re.compile(r"^ckpt-run: snapshot cancelled")
# Duration of the freeze.
FREEZE_PHASES = ("lock", "suspend", "dump", "resume", "unlock")
# Settings for the place of GPU memory during a snapshot.
MEMORY = ("auto", "resident", "driver")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Content of a run's ckpt-run.toml; empty settings keep their defaults."""

    keep: int = 3
    memory: str = ""
    backoff: str = ""
    # A sign of `[hang]` and its limit.
    hang: tuple = ()

    def text(self, cpus):
        sections = {
            "snapshot": ['timeout = "2m"', *([f"cpus = {cpus}"] if cpus else [])],
            "retention": [f"keep_last = {self.keep}"],
            "cuda": [f'memory = "{self.memory}"'] if self.memory else [],
            "restart": [f'backoff = "{self.backoff}"'] if self.backoff else [],
            "hang": ['{} = "{}"'.format(*self.hang)] if self.hang else [],
        }
        return "".join(
            "\n".join([f"[{name}]", *lines, ""]) for name, lines in sections.items() if lines
        )


class Log:
    """Events so far."""

    def __init__(self, text):
        self.own = [line for line in text.splitlines() if line.startswith("ckpt-run:")]
        snapshots = self._all(SNAPSHOT)
        self.snapshots = [phases(found[2]) for found in snapshots]
        # The same events: the rest of their lines.
        self.reports = [fields(found[0]) for found in snapshots]
        self.images = [found[1] for found in snapshots]
        restores = self._all(RESTORED)
        self.restored = [found[1] for found in restores]
        # The same events: their durations, in total and by phase.
        self.restores = [float(found[2]) for found in restores]
        self.ways_back = [phases(found[3]) for found in restores]
        # The durations of the uploads.
        self.uploads = [float(found[1]) for found in self._all(UPLOADED)]
        # The signs, and the places that report the job's activity.
        self.hangs = [(found[1], found[2]) for found in self._all(HUNG)]
        self.failures = [found[1] for found in self._all(FAILED)]
        self.called_off = len(self._all(CALLED_OFF))
        self.ends = [found[1] for found in self._all(ENDED)]

    def _all(self, pattern):
        return [found for line in self.own if (found := pattern.search(line))]


def fields(line):
    """Parses `freeze=5.60s stored="1.5 GiB"` into words."""
    return {name: value.strip('"') for name, value in FIELDS.findall(line)}


def phases(text):
    """Parses `lock 0.001, dump 0.247` into numbers."""
    return {name: float(time) for name, time in (part.split() for part in text.split(", "))}


def freeze(snapshot):
    return sum(snapshot.get(phase, 0) for phase in FREEZE_PHASES)


class Supervised(processes.Program):
    """Runs `ckpt-run … -- JOB` in a folder; `launcher` is a command that becomes ckpt-run."""

    def __init__(
        self,
        tools,
        folder,
        words,
        environment,
        interval,
        options=(),
        settings=None,
        launcher=(),
        terminal=None,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.tools, self.store = tools, folder / "store"
        text = (settings or Settings(memory=tools.memory)).text(tools.cpus)
        (folder / "ckpt-run.toml").write_text(text, encoding="ascii")
        own = [tools.bin, "--store", self.store, "--criu", tools.criu, "--interval", interval]
        super().__init__([*launcher, *own, *options, "--", *words], folder, environment, terminal)

    def log(self):
        return Log(self.stderr.read_text(encoding="utf-8", errors="replace"))

    def job(self):
        """Returns the pids of the job, its first process first."""
        return processes.job_of(self.pid)

    def ask(self, verb, seconds_max):
        """Sends a request to the supervisor; returns (exit code, output)."""
        words = [self.tools.bin, *verb.split(), "--store", self.store]
        done = subprocess.run(
            [str(word) for word in words],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=seconds_max,
            check=False,
        )
        return done.returncode, (done.stderr or done.stdout).strip()

    def move(self, folder):
        super().move(folder)
        self.store = folder / "store"

    def clear(self):
        """Removes images, which are large; keeps logs."""
        shutil.rmtree(self.store, ignore_errors=True)
