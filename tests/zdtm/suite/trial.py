"""One test in separate namespaces: by CRIU alone, under ckpt-run, or undisturbed."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

from harness import supervised

from . import started
from .started import HANGING, PASS

CRIU_SECONDS_MAX = 60
RESTORE_SECONDS_MAX = 120
# zdtm's own limit, doubled for a loaded machine.
VERDICT_SECONDS_MAX = 60
CYCLES = 2
# A snapshot may meet a process that is just starting or ending.
SNAPSHOT_TRIES = 3

PASSES, FAILS, NOT_STARTED = "passes", "fails", "not started"
EQUAL, REFUSED, NO_RESTORE, WRONG = "equal", "refused", "no restore", "WRONG"
HANGS = "hanging"
# Refused, and the test fails afterwards: wrong, unless it fails untouched as well.
HARMED = "harmed"


def prepare():
    """Makes the namespaces usable: network, terminals, pseudo-terminals as zdtm makes them."""
    for line in (
        "ip link set lo up",
        "mount -t devpts -o newinstance,ptmxmode=0666 devpts /dev/pts",
        "mount --bind /dev/pts/ptmx /dev/ptmx",
    ):
        subprocess.run(line.split(), check=True)


def adopt(work):
    """Runs `work` in a child and reaps orphans; this process is pid 1."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    while True:
        pid, ended = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(ended)


def plain(test, criu, tools, folder, as_user):
    """Makes one dump and one restore by CRIU alone; returns (result, reason)."""
    one = started.Started(test, folder)
    images = folder.with_name(f"{folder.name}-images")
    images.mkdir()
    try:
        if not one.start(as_user):
            return NOT_STARTED, one.said_last()
        settle(test)
        one.notify(one.pid())
        pid_file = ["--pidfile", str(one.file(".pid"))]
        options = [*test.words("opts"), *pid_file]
        words = ["dump", "--tree", str(one.pid()), *options, *test.words("dopts")]
        if failed := run_criu(criu, images, words, folder):
            return FAILS, failed
        pid = one.pid()
        one.file(".pid").unlink()
        if not started.wait_for(lambda: started.is_dead(pid), started.START_SECONDS_MAX):
            return FAILS, "the dumped test does not end"
        words = ["restore", "--restore-detached", *options, *test.words("ropts")]
        if failed := run_criu(criu, images, words, folder):
            return FAILS, failed
        verdict = one.verdict(one.pid(), VERDICT_SECONDS_MAX)
        return (PASSES, "") if verdict == PASS else (FAILS, f"{verdict}: {one.said_last()}")
    except subprocess.TimeoutExpired as error:
        return FAILS, f"takes too long: {error.cmd[1:3]}"
    finally:
        one.clean()


def settle(test):
    """Lets a test that changes all the time make progress, as zdtm does."""
    if test.name.startswith("transition/"):
        time.sleep(random.random())


def run_criu(criu, images, words, folder):
    """Returns the reason of CRIU's failure, or nothing."""
    log = images / f"{words[0]}.log"
    done = subprocess.run(
        [*criu.words, *words, "--images-dir", images, "--log-file", log, "-v4"],
        cwd=folder,
        env=criu.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=CRIU_SECONDS_MAX,
        check=False,
    )
    if done.returncode == 0:
        return ""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    # Without CAP_SYS_RESOURCE it cannot raise this limit, reports that, and continues.
    errors = [line for line in lines if "Error" in line and "RLIMIT_NOFILE" not in line]
    return f"criu {words[0]}: {(errors or ['no message'])[0].partition('Error ')[2]}"


class Kept:
    """A test under ckpt-run."""

    def __init__(self, test, tools, folder, as_user):
        self.one = started.Started(test, folder / "work")
        words = [tools.starter, *self.one.words]
        environment = self.one.environment(as_user)
        if "seccomp" in test.name:
            environment["CKPT_RUN_SANDBOX_IO_URING"] = "allow"
        self.run = supervised.Supervised(tools, folder, words, environment)

    def starts(self):
        ready = self.run.wait_for(self.one.is_ready, started.START_SECONDS_MAX)
        self.pid = self.one.pid()
        settle(self.one.test)
        return ready

    def untouched(self):
        if not self.starts():
            return NOT_STARTED, self.one.said_last()
        verdict = self.one.verdict(self.outer_pid(), VERDICT_SECONDS_MAX)
        return PASSES if verdict == PASS else FAILS, self.one.said_last()

    def result(self):
        """Returns (result, reason)."""
        one, run = self.one, self.run
        if not self.starts():
            return NOT_STARTED, one.said_last() or " ".join(run.log()[-1:])
        for _ in range(CYCLES):
            one.notify(self.outer_pid())
            if refused := self.snapshot():
                return self.after_refusal(refused)
            restores, failures = run.restores(), run.count("restore failed")
            if not self.kill():
                return WRONG, "the job is gone after a snapshot"
            run.wait_for(
                lambda: run.restores() > restores or run.count("restore failed") > failures,
                RESTORE_SECONDS_MAX,
            )
            if run.restores() == restores:
                errors = [line for line in run.log() if "error: restore failed" in line][:1]
                errors = errors or run.log()[-1:]
                failed = run.has_ended() or run.count("restore failed") > failures
                return NO_RESTORE if failed else HANGS, " ".join(errors)
        verdict = one.verdict(self.outer_pid(), VERDICT_SECONDS_MAX)
        if verdict == PASS:
            return EQUAL, ""
        return HANGS if verdict == HANGING else WRONG, f"{verdict}: {one.said_last()}"

    def snapshot(self):
        """Returns the reason why no snapshot was taken, or nothing."""
        for _ in range(SNAPSHOT_TRIES):
            code, said = self.run.ask("snapshot")
            if code == 0:
                return ""
        return said

    def after_refusal(self, refused):
        if "does not answer" in refused:
            return HANGS, refused
        verdict = self.one.verdict(self.outer_pid(), VERDICT_SECONDS_MAX)
        if verdict == PASS:
            return REFUSED, refused
        return HARMED, f"{refused} (then {verdict}: {self.one.said_last()})"

    def kill(self):
        """Sends SIGKILL to all of the job; to its first process first, which would end by itself without the others."""
        code, said = self.run.ask("status", "--json")
        job = json.loads(said).get("job_pid") if code == 0 else None
        if not job:
            return False
        for pid, *_ in started.below(job):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        return True

    def outer_pid(self):
        """Returns the test's pid on the host."""
        own = len(started.status("self")["NSpid"].split())
        for pid, _, inner, depth in started.below(self.run.process.pid):
            if inner == self.pid and depth == own + 1:
                return pid
        return None


def kept(test, criu, tools, folder, as_user):
    """Kills and restores twice under ckpt-run; returns (result, reason)."""
    it = Kept(test, tools, folder, as_user)
    try:
        return it.result()
    finally:
        it.run.kill()
        it.one.clean()


def untouched(test, criu, tools, folder, as_user):
    """Without a snapshot: checks that the test passes as a job."""
    it = Kept(test, tools, folder, as_user)
    try:
        return it.untouched()
    finally:
        it.run.kill()
        it.one.clean()


# A test that does not start as another user.
AS_ROOT = ("kept-as-root", "untouched-as-root")
WAYS = {"plain": plain, "kept": kept, "untouched": untouched}
WAYS |= dict(zip(AS_ROOT, (kept, untouched)))


def one_way(way, *arguments):
    """Runs a test in one way and prints the result."""
    prepare()
    print(json.dumps(WAYS[way](*arguments)))
