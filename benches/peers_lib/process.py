"""Programs that run while others measure: jobs, supervisors, coordinators. All are ended by their pid."""

import os
import select
import signal
import subprocess

import bare_freeze
from bare_freeze import FIRST_JOB_PID, Failure, only_child

from . import meter
from .meter import SAID_MAX

END_SECONDS_MAX = 30


class Process:
    """Program in a separate session; its output goes to `log`."""

    def __init__(self, command, log):
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self.process.pid

    def alive(self):
        return self.process.poll() is None

    def tail(self):
        return self.log.read_text(errors="replace")[-SAID_MAX:]

    def kill(self):
        self.process.kill()
        self.process.wait()


class OwnJob(bare_freeze.Job):
    """Job without a tool, in a separate PID and mount namespace."""

    def alive(self):
        return self.process.poll() is None

    def kill(self):
        self.close()


class Restored(Process):
    """Job that CRIU restores in fresh namespaces. `server` streams the image to it."""

    def __init__(self, command, images, server=None):
        self.images = images
        self.server = server
        words = " ".join(f"'{word}'" for word in command)
        command = [
            *("unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"),
            # pid 1 stays as the job's parent.
            *("sh", "-c", f"{words} && exec sleep infinity"),
        ]
        super().__init__(command, images.parent / "restored.log")

    def tail(self):
        log = self.images / "restore.log"
        return super().tail() + (
            log.read_text(errors="replace")[-SAID_MAX:] if log.exists() else ""
        )

    def kill(self):
        init = only_child(self.pid)
        if init is None:
            self.process.kill()
        else:
            os.kill(init, signal.SIGKILL)  # and all in its namespace; unshare ends after them
        self.process.wait()
        if self.server:
            self.server.kill()
            self.server.wait()
            self.server.stdout.close()


class Supervised(Process):
    """Supervisor; in its sandbox the root of the job's tree has the lowest pid of those not left to CRIU."""

    def job(self):
        found = self.root()
        if found is None:
            raise Failure(f"the supervisor has no job: {self.tail()}")
        return found

    def kill(self):
        job = self.root()
        super().kill()
        if job:
            await_end(job)

    def root(self):
        init = below(self.pid, 1)
        inside = {pid: meter.pid_inside(pid) or 0 for pid in (meter.children(init) if init else [])}
        jobs = [pid for pid in inside if inside[pid] >= FIRST_JOB_PID]
        return min(jobs, key=inside.get, default=None)


def below(pid, inside):
    """Returns the first descendant that has this pid in its own namespace."""
    for child in meter.children(pid):
        if meter.pid_inside(child) == inside:
            return child
        if found := below(child, inside):
            return found
    return None


def await_end(pid):
    """Waits until a process that is not our child has exited."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended, _, _ = select.select([fd], [], [], END_SECONDS_MAX)
    os.close(fd)
    if not ended:
        raise Failure(f"process {pid} does not end")
