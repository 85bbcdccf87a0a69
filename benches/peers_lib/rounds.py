"""Procedure of the measurement: the operations on a job and its images, in order.

For each group of peers that share a job, a round is

    start -> some steps -> image by each peer -> steps -> second image by each peer -> kill
          -> for each peer: page cache dropped, restore, kill

with stores that are new in each round.
"""

import dataclasses
import pathlib
import shutil
import subprocess
import time

from bare_freeze import Failure

from .meter import Meter, disk_bytes, drop_page_cache, make_durable
from .pulse import Pulse

# Steps before the first image, so that buffers and caches are as in the middle of a run.
WARM_STEPS = 3
RESTORE_SECONDS_MAX = 60


@dataclasses.dataclass
class Workload:
    """Job of which images are taken. `steps` are taken between the first and the second one."""

    name: str
    script: str
    arguments: tuple
    steps: int


@dataclasses.dataclass
class Setting:
    """Setting of the peers: programs, folders, the job's command."""

    programs: dict
    criu_prefix: pathlib.Path
    criu: list
    folder: pathlib.Path
    job: list
    steps: int

    @property
    def heart(self):
        return self.folder / "heart"

    @property
    def plugins(self):
        return self.folder / "plugins"


def run_round(setting, group, number, report):
    """Runs one round of a group; `report(peer, kind, values)` receives each result."""
    shutil.rmtree(setting.folder, ignore_errors=True)
    setting.plugins.mkdir(parents=True)  # stays empty: no plugin of the system is used
    pulse = Pulse(setting.heart)
    peers = [peer(setting, setting.folder / f"peer{index}") for index, peer in enumerate(group)]
    # The order of the peers rotates.
    peers = peers[number % len(peers) :] + peers[: number % len(peers)]
    take_images(setting, peers, pulse, report)
    for peer in peers:
        wanted = peer.keeps and not peer.failed
        if wanted and (values := attempt(peer, report, lambda peer=peer: restore(peer, pulse))):
            report(peer, "restore", values)
        shutil.rmtree(peer.work, ignore_errors=True)


def take_images(setting, peers, pulse, report):
    for peer in peers:
        peer.failed = False
    job = peers[0].start_job()
    try:
        pulse.await_beat(0, job)
        for kind, steps in (("first", WARM_STEPS), ("second", setting.steps)):
            pulse.advance(steps, job)
            for peer in peers:
                if not peer.failed:
                    values = attempt(peer, report, lambda peer=peer: image(peer, job, pulse))
                    if values:
                        report(peer, kind, values)
    finally:
        job.kill()


def attempt(peer, report, action):
    """Returns the action's values. A peer that fails is reported and left out from then on; others continue."""
    try:
        return action()
    except (Failure, OSError, subprocess.SubprocessError) as failure:
        peer.failed = True
        report(peer, "error", str(failure))
        return None


def image(peer, job, pulse):
    before = disk_bytes(peer.store)
    with peer.meter(job) as meter:
        since, begun = time.time(), time.monotonic_ns()
        peer.snapshot(meter, job)
        make_durable(peer.store, since)
        durable = time.monotonic_ns()
    gaps = pulse.gaps(begun, job)
    peer.forget_dump()
    return {
        "freeze_seconds": max(gaps, default=0.0),
        "gaps_seconds": gaps,
        "durable_seconds": (durable - begun) / 1e9,
        "bytes_added": disk_bytes(peer.store) - before,
        "cpu_seconds": meter.cpu_seconds,
        "peak_bytes": meter.peak_bytes,
        "told": peer.details(),
    }


def restore(peer, pulse):
    drop_page_cache()
    with Meter() as meter:
        begun = time.monotonic_ns()
        job = peer.restore(meter)
        try:
            alive = pulse.await_life(job, RESTORE_SECONDS_MAX)
        finally:
            job.kill()
    return {"restore_seconds": (alive - begun) / 1e9}
