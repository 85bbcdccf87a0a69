#!/usr/bin/env python3
"""Lower bound of a freeze: the driver and CRIU without ckpt-run.

    bare_freeze.py --criu PREFIX [--cpu] [--rounds N] [--images FOLDER] [--json] -- JOB ARGS...

Starts the job in a separate PID and mount namespace, waits until it has
printed its first lines (its memory is touched then), and stops it N times:

    lock -> driver checkpoint -> criu dump --stream --leave-running -> driver restore -> unlock

The image goes through 1 MiB pipes into readers of 1 MiB that discard it, or
with --images, which may be on a tmpfs, into files there until the round is over.
After each round the job must print further lines. This is the yardstick for
ckpt-run's own freeze on the same job; it makes no image that could be restored
and has none of the safeguards. --cpu leaves the driver out. Needs root.
"""

import argparse
import array
import ctypes
import fcntl
import json
import mmap
import os
import pathlib
import platform
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

PIPE_BYTES = 1 << 20
LINES_BEFORE_FREEZE = 3  # the job computes and has touched its memory
START_SECONDS_MAX = 120
LINES_SECONDS_MAX = 30
DUMP_SECONDS_MAX = 120
LOCK_ATTEMPT_MS = 400
LOCK_ATTEMPTS_MAX = 60
FIRST_JOB_PID = 300
CUDA_NOT_READY = 600
CUDA_NOT_INITIALIZED = 3
CUDA_CHECKPOINTED = 2


class Failure(Exception):
    """Error that ends the measurement, described for the user."""


class Driver:
    """Checkpoint calls of the CUDA driver."""

    def __init__(self):
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Failure(f"cannot load the CUDA driver: {error}") from error

    def call(self, name, pid, arguments=None):
        """Returns the driver's code; the 64 bytes of arguments are zero unless given."""
        buffer = ctypes.create_string_buffer(arguments or bytes(64), 64)
        return getattr(self.library, f"cuCheckpointProcess{name}")(pid, buffer)

    def must(self, name, pid):
        code = self.call(name, pid)
        if code != 0:
            raise Failure(f"{name} of process {pid} failed with CUDA error {code}")

    def uses_cuda(self, pid):
        state = ctypes.c_int(-1)
        code = self.library.cuCheckpointProcessGetState(pid, ctypes.byref(state))
        if code not in (0, CUDA_NOT_INITIALIZED):
            raise Failure(f"the state of process {pid} is not to be had: CUDA error {code}")
        return code == 0

    def lock(self, pid):
        arguments = struct.pack("<I60x", LOCK_ATTEMPT_MS)
        for _ in range(LOCK_ATTEMPTS_MAX):
            code = self.call("Lock", pid, arguments)
            if code == 0:
                return
            if code != CUDA_NOT_READY:
                break
        raise Failure(f"lock of process {pid} failed with CUDA error {code}")


class Sink:
    """Receiving end of `criu dump --stream`: reads every pipe to its end and keeps nothing."""

    def __init__(self, folder):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(folder / "streamer-capture.sock"))
        self.socket.listen(1)
        self.socket.settimeout(DUMP_SECONDS_MAX)
        self.bytes = 0
        self.error = None
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self.guard, args=(self.serve,), daemon=True)
        self.thread.start()

    def guard(self, function, *arguments):
        try:
            function(*arguments)
        except (OSError, ValueError) as error:
            self.error = error

    def serve(self):
        connection, _ = self.socket.accept()
        readers = []
        while header := receive(connection, 4):
            receive(connection, struct.unpack("<I", header)[0])  # name of the image
            _, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_LEN(4))
            fds = array.array("i")
            for _, _, data in ancillary:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
            if len(fds) != 1:
                raise ValueError("criu sent a request without its pipe")
            reader = threading.Thread(target=self.guard, args=(self.drain, fds[0]), daemon=True)
            reader.start()
            readers.append(reader)
        for reader in readers:
            reader.join()

    def drain(self, fd):
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        buffer = self.room()
        with os.fdopen(fd, "rb", buffering=0) as pipe:
            while count := pipe.readinto(buffer):
                buffer = self.next(buffer, count)
                with self.lock:
                    self.bytes += count

    def room(self):
        """Returns a buffer for the first bytes of a file."""
        return bytearray(PIPE_BYTES)

    def next(self, buffer, _count):
        """Returns a buffer for the bytes after those in the buffer."""
        return buffer

    def finish(self):
        self.thread.join(DUMP_SECONDS_MAX)
        self.socket.close()
        if self.thread.is_alive() or self.error:
            raise Failure(f"the image stream did not end well: {self.error or 'still open'}")
        return self.bytes


class Keeper(Sink):
    """Keeps the bytes in memory that was populated before."""

    def __init__(self, folder, room_bytes):
        self.left = memoryview(mmap.mmap(-1, room_bytes, mmap.MAP_PRIVATE | mmap.MAP_POPULATE))
        super().__init__(folder)

    def room(self):
        with self.lock:
            room, self.left = self.left[:PIPE_BYTES], self.left[PIPE_BYTES:]
        if not room:
            raise ValueError("the image is larger than the room for it")
        return room

    def next(self, buffer, count):
        return buffer[count:] or self.room()


def receive(connection, count):
    """Returns exactly `count` bytes, or None at the end of the connection."""
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            return None
        data += part
    return data


class Job:
    """Job in its namespaces. `close` ends it and all processes that it started."""

    def __init__(self, command, work):
        self.output = work / "job.out"
        self.output.touch()
        self.errors = work / "unshare.err"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
                + [sys.executable, os.path.abspath(__file__), "--init", str(self.output), *command],
                stdin=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        try:
            self.init = self.wait_for("its namespaces", lambda: only_child(self.process.pid))
            self.pid = self.wait_for("the job to start", lambda: only_child(self.init))
        except Failure:
            self.process.kill()  # --kill-child ends the namespace, too
            raise

    def wait_for(self, what, condition, limit=START_SECONDS_MAX):
        deadline = time.monotonic() + limit
        while True:
            if result := condition():
                return result
            if self.process.poll() is not None:
                raise Failure(f"the job ended while waiting for {what}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise Failure(f"{what} did not happen within {limit} s:\n{self.tail()}")
            time.sleep(0.02)

    def tail(self):
        said = self.errors.read_text(errors="replace") + self.output.read_text(errors="replace")
        return said[-2000:]

    def lines(self):
        return self.output.read_bytes().count(b"\n")

    def advance(self, limit):
        goal = self.lines() + LINES_BEFORE_FREEZE
        self.wait_for("the job to compute", lambda: self.lines() >= goal, limit)

    def close(self):
        try:
            os.kill(self.init, signal.SIGKILL)  # pid 1 of the namespace: its end ends all others
        except ProcessLookupError:
            self.process.kill()
        self.process.wait()


def only_child(pid):
    """Returns the first child of a process, or None."""
    try:
        children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return None
    return int(children[0]) if children else None


def init(output, command):
    """Body of pid 1 of the namespace: starts the job on files opened here, and reaps until it ends."""
    os.closerange(3, 1024)
    for fd, path, flags in (
        (0, "/dev/null", os.O_RDONLY),
        (1, output, os.O_WRONLY | os.O_APPEND),
        (2, output, os.O_WRONLY | os.O_APPEND),
    ):
        opened = os.open(path, flags)
        os.dup2(opened, fd)
        os.close(opened)
    pathlib.Path("/proc/sys/kernel/ns_last_pid").write_text(str(FIRST_JOB_PID - 1))
    job = subprocess.Popen(command, start_new_session=True)
    while True:
        pid, status = os.wait()
        if pid == job.pid:
            return os.waitstatus_to_exitcode(status)


def criu_command(prefix):
    libraries = prefix / "usr/lib" / f"{platform.machine()}-linux-gnu"
    loader = next(iter(sorted(libraries.glob("ld-linux-*.so.*"))), None)
    if loader is None:
        raise Failure(f"no CRIU in {prefix}: {libraries} has no dynamic loader")
    return [str(loader), "--library-path", str(libraries), str(prefix / "usr/sbin/criu")]


class Files:
    """Stores the image as files in a folder, instead of a Sink; `finish` removes them."""

    def __init__(self, folder):
        self.folder = folder

    def finish(self):
        size = sum(path.stat().st_size for path in self.folder.iterdir())
        shutil.rmtree(self.folder)
        return size


def dump(job, criu, work, into):
    """Makes one dump; the tasks continue afterwards. Returns the sink, which may still be reading."""
    images = (into or work) / "images"
    plugins = work / "plugins"  # empty: no plugin of the system is used
    shutil.rmtree(images, ignore_errors=True)
    images.mkdir()
    plugins.mkdir(exist_ok=True)
    sink = Files(images) if into else Sink(images)
    command = [
        *("nsenter", "--target", str(job.init), "--pid", "--mount"),
        *(*criu, "dump", "--tree", str(FIRST_JOB_PID), "--images-dir", str(images)),
        *([] if into else ["--stream"]),
        *("--leave-running", "--libdir", str(plugins)),
        *("--log-file", str(images / "dump.log"), "-v1"),
    ]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=DUMP_SECONDS_MAX, check=False
    )
    if result.returncode != 0:
        log = images / "dump.log"
        detail = log.read_text(errors="replace")[-2000:] if log.exists() else result.stderr
        raise Failure(f"criu dump failed with {result.returncode}:\n{detail}")
    return sink


def freeze(job, criu, work, driver, into=None):
    """Runs one round; returns seconds by phase, in order, and the image's bytes."""
    pids = [job.pid] if driver and driver.uses_cuda(job.pid) else []
    phases = {}
    sinks = []

    def timed(phase, action):
        begun = time.monotonic()
        action()
        phases[phase] = time.monotonic() - begun

    def each(name):
        with ThreadPoolExecutor(max(1, len(pids))) as pool:
            list(pool.map(lambda pid: driver.must(name, pid), pids))

    if driver and not pids:
        raise Failure(f"process {job.pid} does not use CUDA (without a GPU: --cpu)")
    begun = time.monotonic()
    if pids:
        timed("lock", lambda: [driver.lock(pid) for pid in pids])
        timed("checkpoint", lambda: each("Checkpoint"))
    timed("dump", lambda: sinks.append(dump(job, criu, work, into)))
    if pids:
        timed("restore", lambda: each("Restore"))
        timed("unlock", lambda: each("Unlock"))
    phases["total"] = time.monotonic() - begun
    return phases, sinks[0].finish()


def measure(arguments, work):
    criu = criu_command(arguments.criu)
    driver = None if arguments.cpu else Driver()
    job = Job(arguments.job, work)
    rounds = []
    try:
        job.advance(START_SECONDS_MAX)
        for _ in range(arguments.rounds):
            phases, size = freeze(job, criu, work, driver, arguments.images)
            rounds.append({**phases, "bytes": size})
            job.advance(LINES_SECONDS_MAX)
    finally:
        job.close()
    return {
        "freeze_seconds_median": statistics.median(entry["total"] for entry in rounds),
        "rounds": rounds,
    }


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--criu", type=pathlib.Path, required=True, help="prefix that holds CRIU")
    parser.add_argument("--cpu", action="store_true", help="the job uses no GPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--images", type=pathlib.Path, metavar="FOLDER", help="keeps each image there for its round"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("job", nargs="+", help="the command, after --")
    return parser.parse_args()


def main():
    if sys.argv[1:2] == ["--init"]:
        return init(sys.argv[2], sys.argv[3:])
    arguments = parse()
    work = pathlib.Path(tempfile.mkdtemp(prefix="bare-freeze-"))
    try:
        result = measure(arguments, work)
    except (Failure, subprocess.TimeoutExpired) as failure:
        print(f"bare_freeze: {failure}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if arguments.json:
        print(json.dumps(result))
        return 0
    for entry in result["rounds"]:
        phases = "  ".join(
            f"{name} {value:.3f}" for name, value in entry.items() if name != "bytes"
        )
        print(f"{phases}  ({entry['bytes'] / 2**20:.0f} MiB)")
    print(f"median {result['freeze_seconds_median']:.3f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
