"""Running test: its folder, its process and its verdict."""

import os
import pathlib
import shutil
import signal
import subprocess
import time

START_SECONDS_MAX = 30
POLL_SECONDS = 0.05
# Ids that zdtm gives a test without the flag suid.
USER = {"ZDTM_UID": "18943", "ZDTM_GID": "58467", "ZDTM_GROUPS": "27495 48244"}
NOTIFY = {"ZDTM_NOTIFY_FDIN": "100", "ZDTM_NOTIFY_FDOUT": "101"}
PASS, FAIL, HANGING, ABSENT = "PASS", "FAIL", "HANGING", "ABSENT"


class Started:
    """A test in `folder`, where it starts and writes its verdict."""

    def __init__(self, test, folder):
        self.test, self.folder = test, folder
        self.name = test.program.name
        folder.mkdir(parents=True)
        # Its user writes here.
        folder.chmod(0o777)
        shutil.copy2(test.program, folder)
        self.words = [f"./{self.name}", *test.arguments]

    def environment(self, as_user):
        mine = dict(os.environ, TMPDIR=str(self.folder), ZDTM_THREAD_BOMB="5")
        if as_user and not self.test.has("suid"):
            mine |= USER
        if self.test.has("pre-dump-notify"):
            mine |= NOTIFY
        return mine

    def start(self, as_user):
        """Starts it by itself; returns whether it is ready."""
        with self.file(".start").open("wb") as log:
            subprocess.run(
                self.words,
                cwd=self.folder,
                env=self.environment(as_user),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=START_SECONDS_MAX,
                check=False,
            )
        return self.is_ready()

    def file(self, suffix):
        return self.folder / f"{self.name}{suffix}"

    def text(self, suffix):
        try:
            return self.file(suffix).read_text(errors="replace")
        except OSError:
            return ""

    def pid(self):
        """Returns the test's pid in its own namespace; nothing before it is ready."""
        return int(self.text(".pid").strip() or 0)

    def said_last(self):
        """Returns the last line that it wrote."""
        texts = (self.text(suffix).strip() for suffix in (".out", ".out.inprogress", ".start"))
        return next((text.splitlines()[-1] for text in texts if text), "")

    def is_ready(self):
        return self.pid() > 0

    def verdict(self, pid, seconds_max):
        """Tells the test to check itself; `pid` is its pid on the host."""
        if not pid:
            return ABSENT
        # It is as the test's own process left it: stopped, for example.
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            return ABSENT
        wait_for(lambda: self.file(".out").exists() or is_dead(pid), seconds_max)
        if not self.file(".out").exists():
            return FAIL if is_dead(pid) else HANGING
        # As zdtm: one word of the last line.
        return PASS if "PASS" in self.said_last().split() else FAIL

    def notify(self, pid):
        """Tells a test that wants to know that a dump begins."""
        if not self.test.has("pre-dump-notify"):
            return
        folder = pathlib.Path(f"/proc/{pid}/fd")
        with (folder / "101").open("rb") as answer, (folder / "100").open("wb") as told:
            told.write(bytes(4))
            told.flush()
            answer.read(4)

    def clean(self):
        hook = self.test.folder / f"{self.name}.hook"
        if os.access(hook, os.X_OK):
            words = [hook, "--clean"]
            subprocess.run(words, cwd=self.folder, capture_output=True, timeout=30, check=False)


def wait_for(holds, seconds_max):
    """Waits for a condition; returns whether it holds."""
    end = time.monotonic() + seconds_max
    while not (held := holds()) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    return held or holds()


def is_dead(pid):
    """Returns true if a process has exited, or is a zombie."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return True
    return stat.rpartition(") ")[2][:1] in "ZX"


def status(pid):
    """Returns /proc/PID/status as a dictionary; empty if there is no such process."""
    try:
        text = pathlib.Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return {}
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def processes():
    """Returns all processes as (pid, parent, pid in its own namespace, depth of that)."""
    for name in os.listdir("/proc"):
        if name.isdecimal() and (about := status(name)):
            inner = about["NSpid"].split()
            yield int(name), int(about["PPid"]), int(inner[-1]), len(inner)


def below(root):
    """Returns a process and all its descendants, parents first, as in `processes`."""
    everything = list(processes())
    found = [one for one in everything if one[0] == root]
    for pid, *_ in found:
        found += [one for one in everything if one[1] == pid]
    return found
