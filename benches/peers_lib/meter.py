"""Cost of a tool: CPU seconds, memory, and disk usage."""

import os
import pathlib
import subprocess
import threading

from bare_freeze import Failure

SAMPLE_SECONDS = 0.05
COMMAND_SECONDS_MAX = 300
SAID_MAX = 2000  # characters of a tool's output in a failure
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
SECTOR_BYTES = 512


class Meter:
    """Runs a tool's commands and adds up what they use.

    `residents` are processes of the tool that were there before, such as a supervisor. A job's
    processes do not count: not those in `jobs` nor any below them. A tool that works inside the
    job's process has that in `hosts` instead: its CPU time counts, and that of processes which the
    tool makes of it and leaves to end alone; their memory, most of which is the job's, does not.
    """

    def __init__(self, residents=(), jobs=(), hosts=()):
        self.hosts = list(hosts)
        self.residents = [*residents, *hosts]
        self.jobs = set(jobs)
        self.copies = {}  # CPU seconds by pid, at the last query
        self.roots = set(self.residents)
        self.cpu_seconds = 0.0
        self.peak_bytes = 0
        self.stopping = threading.Event()
        self.sampler = threading.Thread(target=self.sample, daemon=True)

    def __enter__(self):
        self.cpu_seconds -= self.resident_cpu()
        self.sampler.start()
        return self

    def __exit__(self, *_):
        self.stopping.set()
        self.sampler.join()
        self.cpu_seconds += self.resident_cpu() + sum(self.copies.values())

    def start(self, command):
        """Starts a command, to be ended by `finish`."""
        process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.roots.add(process.pid)
        return process

    def finish(self, process):
        """Waits for its end; returns its output."""
        timer = threading.Timer(COMMAND_SECONDS_MAX, process.kill)
        timer.start()
        with process.stdout:
            said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        self.roots.discard(process.pid)
        self.cpu_seconds += usage.ru_utime + usage.ru_stime
        if process.returncode != 0:
            command = " ".join(process.args)
            raise Failure(f"exit code {process.returncode}: {command}\n{said[-SAID_MAX:]}")
        return said

    def run(self, command):
        return self.finish(self.start(command))

    def shell(self, script):
        return self.run(bash(script))

    def resident_cpu(self):
        return sum(cpu_seconds(pid) for pid in self.tree(self.residents))

    def sample(self):
        while not self.stopping.wait(SAMPLE_SECONDS):
            for host in self.hosts:
                self.copies |= {pid: cpu_seconds(pid) for pid in session(host) if pid != host}
            pids = [pid for pid in self.tree(list(self.roots)) if pid not in self.hosts]
            self.peak_bytes = max(self.peak_bytes, sum(map(resident_bytes, pids)))

    def tree(self, roots):
        """Returns the processes and all below them, without the jobs."""
        found, waiting = [], list(roots)
        while waiting:
            pid = waiting.pop()
            if pid not in self.jobs and pid not in found:
                found.append(pid)
                waiting += children(pid)
        return found


def bash(script):
    """Returns a pipeline that fails if any part of it does."""
    return ["bash", "-c", f"set -o pipefail; {script}"]


def children(pid):
    found = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += pathlib.Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
    except OSError:
        pass  # it exited meanwhile
    return [int(child) for child in found]


def session(leader):
    """Returns the processes of a session."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if stat(pid)[3:4] == [str(leader)]]


def cpu_seconds(pid):
    """Returns the CPU time of a process and of its children that were waited for."""
    return sum(map(int, stat(pid)[11:15])) / TICKS_A_SECOND


def stat(pid):
    """Returns the fields of /proc/PID/stat from the third on; none for an exited process."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def resident_bytes(pid):
    try:
        return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError):
        return 0


def pid_inside(pid):
    """Returns the pid of a process in the innermost namespace, or None."""
    try:
        for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    except OSError:
        pass
    return None


def disk_bytes(folder):
    """Returns the disk usage of the files; hard links count once."""
    found = [path.lstat() for path in folder.rglob("*") if not path.is_dir()]
    return sum({status.st_ino: status.st_blocks for status in found}.values()) * SECTOR_BYTES


def make_durable(folder, since):
    """Syncs everything in a folder that changed, for all tools alike: cheap if it was done already."""
    for path in [folder, *folder.rglob("*")]:
        if not (path.is_file() or path.is_dir()) or path.stat().st_ctime < since:
            continue
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def drop_page_cache():
    """Drops the page cache, so that later reads come from the disk."""
    os.sync()
    pathlib.Path("/proc/sys/vm/drop_caches").write_text("3")
