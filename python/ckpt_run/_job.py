"""The job's side of the control socket, the event log and the lock that postpones snapshots.

A job must not keep a connection to its supervisor or a file of the store open, because a snapshot would find it. Requests
are sent and the connection is closed; answers are read from the event log, which is open for the time of a read.
"""

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import time
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional

_LOG = logging.getLogger("ckpt_run")
_EVENTS = "events.ndjson"
_OLD_EVENTS = "events.1.ndjson"
_POLL_SECONDS = 0.1
# Time after which a callback learns of a restore, at most.
_WATCH_SECONDS = 0.5


class SnapshotError(RuntimeError):
    """A snapshot was not taken; the job continues, and older images are unchanged."""


class Restored(NamedTuple):
    """Restores of this run so far, and the image of the last one."""

    count: int
    image: Optional[str]


def is_supervised() -> bool:
    """Returns True if this process belongs to a job of ckpt-run."""
    return "CKPT_RUN_JOB" in os.environ


def snapshot(wait: bool = False, timeout: float = 600.0) -> Optional[str]:
    """Requests a snapshot of the whole job.

    With ``wait``, returns the image's id once the image is on the disk. After a restore from that image, the call returns
    as well. Without ``wait``, returns None at once; the snapshot begins some milliseconds later.

    Raises SnapshotError if the snapshot fails, or has not ended after ``timeout`` seconds. Raises PermissionError if the
    job may not request snapshots (settings ``user``).
    """
    if not is_supervised():
        return None
    path = os.environ.get("CKPT_RUN_SOCKET")
    if path is None:
        raise PermissionError("this job may not request snapshots: it runs as another user than ckpt-run")
    log = _EventLog()
    log.skip()
    _send(path, b'"snapshot"\n')
    return _outcome(log, timeout) if wait else None


def restored() -> Restored:
    """Returns the number of restores of this run so far, and the image of the last one."""
    return _Restores().update()


def on_restore(callback: Callable[[Restored], None]) -> None:
    """Calls ``callback`` after each restore, in a thread of its own, within a second.

    Threads and their memory are as they were at the snapshot; a callback is for what lies outside of the job: a lease, a
    connection, a line in a log. An exception in a callback is logged and does not end the job.
    """
    if is_supervised():
        _WATCHER.add(callback)


@contextlib.contextmanager
def postpone() -> Iterator[None]:
    """Postpones snapshots: none begins inside ``with postpone():``.

    A snapshot waits for 30 s at most, one before the end of the run for 5 s; then it is taken. If a snapshot is under way
    on entry, the call returns when it has released the job. Several threads and processes may postpone at a time.
    """
    store = os.environ.get("CKPT_RUN_STORE", "")
    if not is_supervised() or not os.access(store, os.R_OK):
        yield
        return
    folder = os.open(store, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_SH)
        yield
    finally:
        # Before the descriptor is closed: a child that was forked meanwhile may have it, too.
        fcntl.flock(folder, fcntl.LOCK_UN)
        os.close(folder)


def _send(path: str, request: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        # A socket's path has at most 107 bytes, a store's may be longer.
        folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            connection.connect("/proc/self/fd/{}/{}".format(folder, os.path.basename(path)))
        finally:
            os.close(folder)
        connection.sendall(request)


def _outcome(log: "_EventLog", timeout: float) -> str:
    """The image of the next snapshot that begins on request."""
    end, began = time.monotonic() + timeout, False
    while True:
        for event in log.new():
            kind = event["event"]
            if kind == "snapshot-began":
                began = event.get("trigger") == "request"
            elif began and kind == "snapshot":
                return str(event["image"])
            elif began and kind == "snapshot-failed":
                raise SnapshotError(str(event.get("reason")))
        if time.monotonic() > end:
            raise SnapshotError("no snapshot within {:.0f} s; see ckpt-run's messages".format(timeout))
        time.sleep(_POLL_SECONDS)


class _EventLog:
    """The run's events since the last look."""

    def __init__(self) -> None:
        self._path = os.path.join(os.environ.get("CKPT_RUN_STORE", ""), _EVENTS)
        self._inode, self._offset = 0, 0

    def grew(self) -> bool:
        """Returns True if there may be new events. Opens nothing."""
        try:
            about = os.stat(self._path)
        except OSError:
            return False
        return (about.st_ino, about.st_size) != (self._inode, self._offset)

    def skip(self) -> None:
        """Passes over the events so far."""
        with contextlib.suppress(OSError):
            about = os.stat(self._path)
            self._inode, self._offset = about.st_ino, about.st_size

    def new(self) -> List[Dict[str, Any]]:
        """The events since the last call; those of a renamed file first."""
        if not self.grew():
            return []
        lines = b""
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                about = os.fstat(descriptor)
                if about.st_ino != self._inode:
                    lines += self._rest_of_renamed()
                    self._inode, self._offset = about.st_ino, 0
                part = os.pread(descriptor, max(about.st_size - self._offset, 0), self._offset)
            finally:
                os.close(descriptor)
            # The last line may still be incomplete.
            part = part[: part.rfind(b"\n") + 1]
            self._offset += len(part)
            lines += part
        return [event for event in map(_parsed, lines.splitlines()) if "event" in event]

    def _rest_of_renamed(self) -> bytes:
        old = os.path.join(os.path.dirname(self._path), _OLD_EVENTS)
        with contextlib.suppress(OSError), open(old, "rb", buffering=0) as file:
            same = os.fstat(file.fileno()).st_ino == self._inode
            return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, self._offset) if same else b""
        return b""


def _parsed(line: bytes) -> Dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


class _Restores:
    """Counts the restores of the run."""

    def __init__(self) -> None:
        self._log, self._now = _EventLog(), Restored(0, None)
        # The state before a restore that began and has not ended.
        self._before, self._pending = self._now, False

    def grew(self) -> bool:
        return self._log.grew()

    def update(self) -> Restored:
        for event in self._log.new() if is_supervised() else []:
            if event["event"] == "started":
                self._now = Restored(0, None)
            elif event["event"] == "restore-began":
                # Logged before the job's processes run, so that they find it.
                self._before, self._now = self._now, Restored(self._now.count + 1, event.get("image"))
                self._pending = True
            elif event["event"] == "restore-failed" and self._pending:
                self._now, self._pending = self._before, False
            elif event["event"] == "restored":
                self._pending = False
        return self._now


class _Watcher:
    """The thread that calls callbacks after restores."""

    def __init__(self) -> None:
        self._lock, self._callbacks = threading.Lock(), []  # type: ignore[var-annotated]

    def add(self, callback: Callable[[Restored], None]) -> None:
        with self._lock:
            self._callbacks.append(callback)
            first = len(self._callbacks) == 1
        if first:
            restores = _Restores()
            restores.update()
            threading.Thread(target=self._watch, args=[restores], name="ckpt_run", daemon=True).start()

    def _watch(self, restores: _Restores) -> None:
        known = restores.update()
        while True:
            time.sleep(_WATCH_SECONDS)
            now = restores.update() if restores.grew() else known
            if now.count > known.count:
                with self._lock:
                    callbacks = list(self._callbacks)
                for callback in callbacks:
                    try:
                        callback(now)
                    except Exception:
                        _LOG.exception("a callback for restores failed")
            known = now


_WATCHER = _Watcher()
