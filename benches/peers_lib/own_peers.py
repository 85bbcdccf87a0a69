"""Peers under which a job must be started: ckpt-run and DMTCP. The interface is that of criu_peers."""

import json
import os
import signal
import subprocess
import time

from bare_freeze import Failure

from .meter import Meter
from .process import Process, Supervised

START_SECONDS_MAX = 30


class OwnPeer:
    """Common parts of peers that have the job to themselves."""

    keeps = True
    rounds_max = None
    workloads = None

    def __init__(self, setting, work):
        self.setting = setting
        self.work = work
        self.store = work / "store"
        self.store.mkdir(parents=True, mode=0o700)

    def forget_dump(self):
        """Does nothing: there is no separate dump."""

    def details(self):
        """Returns the tool's own report about its newest image."""
        return {}


class CkptRun(OwnPeer):
    name = "ckpt-run"
    group = "ckpt-run"
    needs = "ckpt-run"

    def command(self, *verb):
        settings = self.work / "none.toml"
        settings.touch()
        return [
            *("env", f"CKPT_RUN_CONFIG={settings}", self.setting.programs["ckpt-run"], *verb),
            *("--store", self.store, "--criu", self.setting.criu_prefix),
        ]

    def start_job(self):
        supervise = [*self.command(), "--interval", "never", "--", *self.setting.job]
        # One log per start: ckpt-run truncates the job's earlier output.
        number = sum(1 for _ in self.work.glob("supervisor.*"))
        return Supervised(supervise, self.work / f"supervisor.{number}.log")

    def meter(self, job):
        return Meter(residents=[job.pid], jobs=[job.job()])

    def snapshot(self, meter, _job):
        meter.run(self.command("snapshot"))

    def restore(self, _meter):
        return self.start_job()

    def details(self):
        shown = subprocess.run(
            [str(word) for word in [*self.command("show"), "latest", "--json"]],
            capture_output=True,
            check=True,
        )
        image = json.loads(shown.stdout)
        phases = {phase["name"]: phase["seconds"] for phase in image["phases"]}
        names = ("freeze_seconds", "raw_bytes", "stored_bytes")
        return {**{name: image[name] for name in names}, "phases": phases}


class Dmtcp(OwnPeer):
    name = "DMTCP"
    group = "dmtcp"
    needs = "dmtcp"
    compression = "--no-gzip"

    def start_job(self):
        return self.under_coordinator(
            "dmtcp_launch", self.compression, "--ckptdir", self.store, *self.setting.job
        )

    def under_coordinator(self, program, *arguments):
        """Runs a coordinator and the job that joins it, for restores and launches."""
        port = self.work / "port"
        port.unlink(missing_ok=True)
        coordinator = Process(
            [self.program("dmtcp_coordinator"), "--quiet", "--port", 0, "--port-file", port]
            + ["--ckptdir", self.store],
            self.work / "coordinator.log",
        )
        deadline = time.monotonic() + START_SECONDS_MAX
        while not (port.exists() and port.read_text()):
            if not coordinator.alive() or time.monotonic() > deadline:
                coordinator.kill()
                raise Failure(f"no coordinator: {coordinator.tail()}")
            time.sleep(0.001)
        self.port = port.read_text().strip()
        join = [self.program(program), "--join-coordinator", "--coord-port", self.port]
        return DmtcpJob([*join, *arguments], self.work / "job.log", coordinator)

    def program(self, name):
        return self.setting.programs["dmtcp"] / name

    def meter(self, job):
        return Meter(residents=[job.coordinator.pid], hosts=[job.pid])

    def snapshot(self, meter, _job):
        meter.run([self.program("dmtcp_command"), "--coord-port", self.port, "--bcheckpoint"])
        self.newest = next(self.store.glob("ckpt_*.dmtcp"))
        # A second name, because the next image takes the first one.
        number = len(list(self.store.glob("*.kept")))
        (self.store / f"{number}.kept").hardlink_to(self.newest)

    def restore(self, _meter):
        return self.under_coordinator("dmtcp_restart", self.newest)


class DmtcpGzip(Dmtcp):
    name = "DMTCP, gzip"
    group = "dmtcp gzip"
    compression = "--gzip"
    # An image takes half a minute and more, with the job frozen.
    rounds_max = 1
    workloads = ("inference",)


class DmtcpJob(Process):
    """Job, in whose process DMTCP works, and the coordinator beside it."""

    def __init__(self, command, log, coordinator):
        super().__init__(command, log)
        self.coordinator = coordinator

    def kill(self):
        # Processes started by the tool, such as gzip, are in its session.
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.coordinator.kill()
