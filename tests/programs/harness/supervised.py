"""Job under ckpt-run. Its command line and its log format are known only here."""

import json
import os
import re
import signal
import subprocess
import time

SETTINGS = """\
[snapshot]
timeout = "2m"
[restart]
backoff = "200ms"
"""
# What `--watch` adds to them.
WATCH = {
    "fanotify": "",
    "failing": "",
    "reports": "",
    "none": '[files]\nwatch = "off"\n',
    "included": '[files]\nwatch = "off"\ninclude = ["*"]\n',
}
# Refusals that name files and a remedy; all other failures of a restore are faults.
REFUSED = re.compile(r"\b(put (it|them|the old one|the old content) back|restore its owner)")
POLL_SECONDS = 0.02
VERB_SECONDS_MAX = 90


class Supervised:
    """`ckpt-run … -- JOB` in `place`, whose folder `work` is the job's."""

    # All that run, for the end of the suite by a signal.
    running = set()

    def __init__(self, tools, place, words, environment):
        self.tools, self.place, self.store = tools, place, place / "store"
        work = place / "work"
        work.mkdir(parents=True, exist_ok=True)
        isolation = 'isolation = "user"\n' if tools.watch == "reports" else ""
        settings = isolation + SETTINGS + WATCH[tools.watch]
        (place / "ckpt-run.toml").write_text(settings, encoding="ascii")
        own = [tools.bin, *self._options()]
        own += ["--criu", tools.criu] if tools.criu.exists() else []
        own += ["--interval", "never", "--max-restarts", "-1", "--", *words]
        with (place / "out").open("ab") as out, (place / "err").open("ab") as err:
            self.process = subprocess.Popen(
                [str(word) for word in own],
                cwd=work,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        Supervised.running.add(self)

    def _options(self):
        return ["--store", self.store, "--config", self.place / "ckpt-run.toml"]

    def ask(self, *words):
        """Runs a verb; returns (exit code, output)."""
        line = [self.tools.bin, *words, *self._options()]
        try:
            done = subprocess.run(
                [str(word) for word in line],
                cwd=self.place,
                capture_output=True,
                text=True,
                timeout=VERB_SECONDS_MAX,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 1, f"{words[0]} does not answer within {VERB_SECONDS_MAX} s"
        return done.returncode, done.stdout.strip() or done.stderr.strip()

    def ask_later(self, *words):
        """Starts a verb and does not wait for it."""
        line = [self.tools.bin, *words, *self._options()]
        return subprocess.Popen(
            [str(word) for word in line],
            cwd=self.place,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill_job(self):
        """Sends SIGKILL to the job's first process; returns false if there is none."""
        code, said = self.ask("status", "--json")
        pid = json.loads(said).get("job_pid") if code == 0 else None
        if not pid:
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def has_ended(self):
        return self.process.poll() is not None

    def sleep(self, seconds):
        """Waits, but not longer than the run takes; returns false if it has ended."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self.has_ended():
            time.sleep(min(left, POLL_SECONDS))
        return not self.has_ended()

    def wait_for(self, holds, seconds_max):
        """Waits for a condition or for the end of the run; returns whether the condition holds."""
        end = time.monotonic() + seconds_max
        while not (held := holds()) and not self.has_ended() and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        return held or holds()

    def log(self):
        text = (self.place / "err").read_text(encoding="utf-8", errors="replace")
        return [line for line in text.splitlines() if line.startswith("ckpt-run:")]

    def count(self, text):
        return sum(text in line for line in self.log())

    def restores(self):
        return self.count("ckpt-run: restored image=")

    def refusals(self):
        """The lines that refuse by name."""
        bad = [line for line in self.log() if line.startswith(("ckpt-run: warn", "ckpt-run: err"))]
        return [line for line in bad if REFUSED.search(line)]

    def failures(self):
        """The lines about ends of the job that no signal caused."""
        return [line for line in self.log() if 'the job crashed end="exit code' in line]

    def said_last(self):
        """The last line that the job itself wrote to stderr."""
        text = (self.place / "err").read_text(encoding="utf-8", errors="replace")
        return [line for line in text.splitlines() if not line.startswith("ckpt-run:")][-1:]

    def kill(self):
        """Ends whatever is left; the sandbox ends with its supervisor."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        Supervised.running.discard(self)
