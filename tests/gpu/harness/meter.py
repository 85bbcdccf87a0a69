"""Peak host memory: of the whole machine, and of ckpt-run's own processes."""

import mmap
import multiprocessing
import os
import pathlib
import threading
import time
from multiprocessing import connection

from . import processes

POLL_SECONDS = 0.05
KIB_PER_MIB, KIB_PER_GIB = 1 << 10, 1 << 20
# Populated at a time: the kernel may refuse a mapping larger than the memory it knows of so far.
TOUCH_BYTES = 1 << 30
TOUCH_SECONDS_MAX = 180
TOUCH_POLL_SECONDS = 1


class Meter:
    """Watches from its creation until `end`.

    The machine's value is the decrease of MemAvailable: it includes pinned memory and tmpfs, not page cache.
    Of ckpt-run it is the resident memory of all processes with the program of `pid` under it, its helpers and copiers
    included.
    """

    def __init__(self, pid=None):
        self.pid = pid
        self.before, self.lowest, self.own = available_kib(), available_kib(), 0
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self):
        while not self.over.wait(POLL_SECONDS):
            self.lowest = min(self.lowest, available_kib())
            if self.pid:
                pids = [self.pid, *processes.descendants(self.pid)]
                self.own = max(self.own, sum(map(resident_kib, filter(self._is_own, pids))))

    def _is_own(self, pid):
        try:
            return os.path.samefile(f"/proc/{pid}/exe", f"/proc/{self.pid}/exe")
        except OSError:
            return False

    def cpu_seconds(self):
        """Returns the processor time of ckpt-run's processes so far, those included that have ended."""
        pids = [self.pid, *processes.descendants(self.pid)]
        ticks = sum(cpu_ticks(pid, pid == self.pid) for pid in filter(self._is_own, pids))
        return ticks / os.sysconf("SC_CLK_TCK")

    def end(self):
        self.over.set()
        self.thread.join()

    @property
    def host_gib(self):
        return (self.before - self.lowest) / KIB_PER_GIB

    @property
    def own_mib(self):
        return self.own / KIB_PER_MIB


def available_kib():
    return kib("/proc/meminfo", "MemAvailable:")


def resident_kib(pid):
    return kib(f"/proc/{pid}/status", "VmRSS:")


def cpu_ticks(pid, with_children):
    """Returns the time of a process, with that of its awaited children."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0  # it has exited
    return sum(map(int, fields[11 : 15 if with_children else 13]))


def kib(path, name):
    try:
        for line in pathlib.Path(path).read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    except OSError:
        pass  # it has exited
    return 0


def touch(gib):
    """Populates host memory from many processes at once, and holds all of it until the last has its share.

    Some machines hand out memory slowly when it is touched for the first time; the measurements are not about that.
    """
    count = max(1, min(os.cpu_count(), gib))
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(count)
    shares = [gib // count + (number < gib % count) for number in range(count)]
    workers = [
        context.Process(target=_touch, args=(share, barrier), daemon=True) for share in shares
    ]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + TOUCH_SECONDS_MAX
    running = {worker.sentinel: worker for worker in workers}
    # If the kernel kills one for lack of memory, all end.
    while running and time.monotonic() < deadline:
        ended = [running.pop(end) for end in connection.wait(running, TOUCH_POLL_SECONDS)]
        if any(worker.exitcode != 0 for worker in ended):
            break
    for worker in running.values():
        worker.terminate()
    return not running


def _touch(gib, barrier):
    # The first to be killed when there is less memory than that.
    pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    held = [mmap.mmap(-1, TOUCH_BYTES, flags=flags) for _ in range(gib)]
    barrier.wait(TOUCH_SECONDS_MAX)
    for block in held:
        block.close()
