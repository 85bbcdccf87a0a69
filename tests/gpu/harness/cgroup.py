"""Cgroup with a memory limit, of either version, for processes that move into it themselves."""

import os
import pathlib
import time

from .trials import Failure

REMOVE_SECONDS_MAX = 10
POLL_SECONDS = 0.1
# Moves itself into the group and becomes the program.
LAUNCH = 'echo 0 > "$0/cgroup.procs" && exec "$@"'


class Group:
    """Created where the memory controller is; `remove` removes it."""

    def __init__(self, limit_bytes):
        root, self.version = hierarchy()
        self.path = root / f"ckpt-run-test-{os.getpid()}-{time.monotonic_ns()}"
        try:
            if self.version == 2:
                (root / "cgroup.subtree_control").write_text("+memory")
            self.path.mkdir()
            limit = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
            (self.path / limit).write_text(str(limit_bytes))
        except OSError as error:
            self.remove()
            raise Failure(f"cannot make a cgroup with a limit in {root}: {error}") from error

    def launcher(self):
        """Returns a prefix that makes a command and all its children run in the group."""
        return ("sh", "-c", LAUNCH, str(self.path))

    def pids(self):
        """Returns the pids of the processes in the group."""
        try:
            return [int(pid) for pid in (self.path / "cgroup.procs").read_text().split()]
        except OSError:
            return []

    def peak_bytes(self):
        name = "memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"
        try:
            return int((self.path / name).read_text())
        except (OSError, ValueError):
            return None  # a kernel before 5.19

    def oom_kills(self):
        """Returns the number of processes in the group that the kernel has killed for lack of memory."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        lines = map(str.split, (self.path / name).read_text().splitlines())
        return next((int(count) for key, count in lines if key == "oom_kill"), 0)

    def remove(self):
        """Returns true if the group was removed; processes that do not exit keep it."""
        deadline = time.monotonic() + REMOVE_SECONDS_MAX
        while self.path.exists():
            try:
                self.path.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(POLL_SECONDS)
        return True


def hierarchy():
    """Returns the folder for a group with a memory limit, and the version of its hierarchy.

    Version 1: our own group. Version 2: the root, since a group with processes has none with limits in it.
    """
    for line in pathlib.Path("/proc/self/mounts").read_text().splitlines():
        _, folder, kind, options, *_ = line.split()
        folder = pathlib.Path(folder)
        if kind == "cgroup" and "memory" in options.split(","):
            return folder / own_group("memory"), 1
        if kind == "cgroup2":
            controllers = folder / "cgroup.controllers"
            if controllers.exists() and "memory" in controllers.read_text().split():
                return folder, 2
    raise Failure("there is no cgroup hierarchy with the memory controller")


def own_group(controller):
    """Returns this process's group in a hierarchy of version 1, relative to its root."""
    for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.lstrip("/")
    return ""
