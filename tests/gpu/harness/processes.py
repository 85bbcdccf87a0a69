"""Processes of a job, and programs of the harness, which are ended in any case."""

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
        pass  # it has exited
    return [int(child) for child in found]


def descendants(pid):
    """Returns all processes below a process, parents first."""
    found = children(pid)
    for child in found:
        found += children(child)
    return found


def pid_inside(pid):
    """Returns its pid in its own namespace."""
    try:
        for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    except OSError:
        pass
    return None


def job_of(supervisor):
    """Returns the job's processes, the first one first: all below the root of its tree."""
    for init in descendants(supervisor):
        if pid_inside(init) == 1:
            inside = {pid: pid_inside(pid) or 0 for pid in children(init)}
            jobs = [pid for pid in inside if inside[pid] >= JOB_PID_MIN]
            return descendants(min(jobs, key=inside.get)) if jobs else []
    return []


def alive(pid):
    """Returns true if it exists and is no zombie."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(pids):
    """Sends SIGKILL to each; returns how many existed."""
    count = 0
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
            count += 1
        except ProcessLookupError:
            pass
    return count


class Program:
    """Program in a separate session, with its output in files, or with a terminal for all its streams."""

    def __init__(self, words, folder, environment, terminal=None):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.stdout, self.stderr = folder / "stdout", folder / "stderr"
        # Appended to, for a run that continues under a second supervisor.
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

    def move(self, folder):
        """Moves its folder with its output, after its end."""
        self.folder = self.folder.rename(folder)
        self.stdout, self.stderr = folder / "stdout", folder / "stderr"

    @property
    def pid(self):
        return self.process.pid

    def code(self):
        """Returns its exit code, or None while it runs."""
        return self.process.poll()

    def lines(self):
        """Returns the lines on stdout so far."""
        return self.stdout.read_bytes().count(b"\n")

    def kill(self):
        """Sends SIGKILL; an error if it is blocked in the kernel or the driver."""
        self.process.kill()
        self.process.wait(END_SECONDS_MAX)

    def end(self):
        """Ends it and all below it; harmless if it has exited."""
        if self.code() is not None:
            return
        # A request first: a kill during a call to the driver's checkpoint may affect others on the GPU.
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
        # A plain job's own children; those of a sandbox exit with it.
        kill(pid for pid in below if os.path.exists(f"/proc/{pid}") and session(pid) == self.pid)


def session(pid):
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
