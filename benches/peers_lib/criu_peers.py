"""Peers based on a plain CRIU: their procedures for a snapshot and for a restore.

They share one job: each takes its images of it in turn. `snapshot` ends when all is written,
`restore` begins with nothing but the peer's own files, in `store`, and ends with a process that is
about to run.
"""

import shutil
import subprocess
import time

import bare_freeze
from bare_freeze import FIRST_JOB_PID, Failure

from .meter import Meter, bash
from .process import OwnJob, Restored

SOCKET_SECONDS_MAX = 10
PASSWORD = "peers"
# More than the image of any of the workloads.
ROOM_BYTES = 1 << 30


class CriuPeer:
    """Common parts: `criu dump` of a job in separate namespaces."""

    group = "criu"
    needs = None  # the program that it requires
    keeps = True  # an image that can be restored
    rounds_max = None  # fewer rounds than the others, because it is slow or similar to another
    workloads = None  # only these

    def __init__(self, setting, work):
        self.setting = setting
        self.work = work
        self.store = work / "store"
        self.images = work / "images"
        self.newest = None
        self.store.mkdir(parents=True)
        self.prepare()

    def prepare(self):
        """Does the user's one-time preparation; not timed."""

    def start_job(self):
        return OwnJob(self.setting.job, self.setting.folder)

    def meter(self, _job):
        return Meter()

    def dump(self, job, *more):
        """Returns the command of a dump into a new folder."""
        self.forget_dump()
        self.images.mkdir()
        return [
            *("nsenter", "--target", job.init, "--pid", "--mount"),
            *(*self.setting.criu, "dump", "--tree", FIRST_JOB_PID, "--leave-running"),
            *("--images-dir", self.images, "--libdir", self.setting.plugins),
            *("--log-file", self.images / "dump.log", "-v1", *more),
        ]

    def start_restored(self, *more, server=None):
        command = [
            *(*self.setting.criu, "restore", "--restore-detached"),
            *("--images-dir", self.images, "--libdir", self.setting.plugins),
            *("--log-file", self.images / "restore.log", "-v1", *more),
        ]
        return Restored(command, self.images, server)

    def next_file(self, name):
        number = 1 + sum(1 for _ in self.store.iterdir())
        self.newest = self.store / f"{number}.{name}"
        return self.newest

    def forget_dump(self):
        """Removes the dump itself, which is not kept; not timed."""
        shutil.rmtree(self.images, ignore_errors=True)

    def details(self):
        """Returns the tool's own report about its newest image."""
        return {}


class Discard(CriuPeer):
    """Reference for the freeze: nothing is kept."""

    name = "criu --stream, thrown away"
    keeps = False

    def snapshot(self, meter, job):
        command = self.dump(job, "--stream")
        sink = self.sink()
        meter.run(command)
        sink.finish()

    def sink(self):
        return bare_freeze.Sink(self.images)


class Keep(Discard):
    """Second reference: the image stays in memory."""

    name = "criu --stream, kept in memory"

    def sink(self):
        return bare_freeze.Keeper(self.images, ROOM_BYTES)


class DumpAndPack(CriuPeer):
    """Runs `criu dump` to files, which another program then packs."""

    def snapshot(self, meter, job):
        meter.run(self.dump(job))
        self.pack(meter)

    def restore(self, meter):
        self.images.mkdir()
        self.unpack(meter)
        return self.start_restored()


class TarZstd(DumpAndPack):
    name = "criu, then tar and zstd -1"

    def pack(self, meter):
        packed = self.next_file("tar.zst")
        meter.shell(f"tar -C '{self.images}' -cf - . | zstd -T0 -1 -q -o '{packed}'")

    def unpack(self, meter):
        meter.shell(f"zstd -dcq '{self.newest}' | tar -C '{self.images}' -xf -")


class FilesZstd(DumpAndPack):
    name = "criu, then zstd -1 of each file"
    rounds_max = 1

    def pack(self, meter):
        folder = self.next_file("files")
        folder.mkdir()
        meter.shell(f"zstd -T0 -1 -q --output-dir-flat '{folder}' '{self.images}'/*.img")

    def unpack(self, meter):
        meter.shell(f"zstd -dq --output-dir-flat '{self.images}' '{self.newest}'/*.zst")


class Restic(DumpAndPack):
    name = "criu, then restic"
    rounds_max = 1
    needs = "restic"

    def prepare(self):
        password = self.work / "password"
        password.write_text(PASSWORD)
        self.restic = [
            *(self.setting.programs["restic"], "--quiet", "--repo", self.store),
            *("--password-file", password, "--cache-dir", self.work / "cache"),
        ]
        subprocess.run([*self.restic, "init"], check=True, stdout=subprocess.DEVNULL)

    def pack(self, meter):
        meter.run([*self.restic, "backup", self.images])

    def unpack(self, meter):
        meter.run([*self.restic, "restore", "latest", "--target", "/"])


class Streamer(CriuPeer):
    """Runs `criu dump --stream` through criu-image-streamer into a compressor."""

    needs = "criu-image-streamer"

    def snapshot(self, meter, job):
        command = self.dump(job, "--stream")
        packed = self.next_file(self.ending)
        capture = meter.start(bash(f"{self.streamer('capture')} | {self.pack} > '{packed}'"))
        try:
            await_socket(self.images / "streamer-capture.sock", capture)
            meter.run(command)
        finally:
            meter.finish(capture)

    def restore(self, meter):
        self.images.mkdir()
        server = meter.start(bash(f"{self.unpack} '{self.newest}' | {self.streamer('serve')}"))
        await_socket(self.images / "streamer-serve.sock", server)
        return self.start_restored("--stream", server=server)

    def streamer(self, verb):
        return (
            f"'{self.setting.programs['criu-image-streamer']}' --images-dir '{self.images}' {verb}"
        )


class StreamerZstd(Streamer):
    name, ending = "criu --stream, streamer, zstd -1", "zst"
    pack, unpack = "zstd -T0 -1 -q", "zstd -dcq"


class StreamerLz4(Streamer):
    name, ending = "criu --stream, streamer, lz4", "lz4"
    pack, unpack = "lz4 -1 -q", "lz4 -dcq"


def await_socket(path, process):
    deadline = time.monotonic() + SOCKET_SECONDS_MAX
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise Failure(f"{path.name} was not made")
        time.sleep(0.002)
