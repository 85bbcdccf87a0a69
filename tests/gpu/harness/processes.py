"""The processes of a job, and programs of ours that are ended whatever happens."""

import os
import pathlib
import signal
import subprocess

# A sandbox leaves lower pids to CRIU. The root of the job's tree has the lowest of the others, before any later tool.
JOB_PID_MIN = 300
END_SECONDS_MAX = 10


def children(pid):
    found = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += pathlib.Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
    except OSError:
        pass  # it has ended
    return [int(child) for child in found]


def descendants(pid):
    """All below a process, parents first."""
    found = children(pid)
    for child in found:
        found += children(child)
    return found


def pid_inside(pid):
    """Its pid in its own namespace."""
    try:
        for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    except OSError:
        pass
    return None


def job_of(supervisor):
    """The job's processes, its first one first: all below the root of its tree."""
    for init in descendants(supervisor):
        if pid_inside(init) == 1:
            inside = {pid: pid_inside(pid) or 0 for pid in children(init)}
            jobs = [pid for pid in inside if inside[pid] >= JOB_PID_MIN]
            return descendants(min(jobs, key=inside.get)) if jobs else []
    return []


def alive(pid):
    """Whether it is there and no zombie."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(pids):
    """SIGKILL to each; returns how many were there."""
    count = 0
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
            count += 1
        except ProcessLookupError:
            pass
    return count


class Program:
    """A program in a session of its own, with its output in files, or with a terminal for all its streams."""

    def __init__(self, words, folder, environment, terminal=None):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.stdout, self.stderr = folder / "stdout", folder / "stderr"
        # Appended to, for a run that goes on under a second supervisor.
        with self.stdout.open("ab") as stdout, self.stderr.open("ab") as stderr:
            self.process = subprocess.Popen(
                [str(word) for word in words],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL if terminal is None else terminal,
                stdout=stdout if terminal is None else terminal,
                stderr=stderr if terminal is None else terminal,
                start_new_session=True,
            )

    @property
    def pid(self):
        return self.process.pid

    def code(self):
        """Its exit code, or None while it runs."""
        return self.process.poll()

    def lines(self):
        """Lines on stdout so far."""
        return self.stdout.read_bytes().count(b"\n")

    def kill(self):
        """SIGKILL; an error when it is stuck in the kernel or the driver."""
        self.process.kill()
        self.process.wait(END_SECONDS_MAX)

    def end(self):
        """Ends it and all below it; harmless when it has ended."""
        if self.code() is not None:
            return
        # Asked first: who is killed within a call to the driver's checkpoint may hurt others on the GPU.
        below = descendants(self.pid)
        for ask in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
            try:
                self.process.send_signal(ask)
                self.process.wait(END_SECONDS_MAX)
                break
            except subprocess.TimeoutExpired:
                pass
        else:
            self.kill()
        # A plain job's own children; those of a sandbox die with it.
        kill(pid for pid in below if os.path.exists(f"/proc/{pid}") and session(pid) == self.pid)


def session(pid):
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
