"""Other programs on the GPU: one that occupies all its memory, and an MPS daemon. These trials run alone."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import time

from . import machine, processes, programs, trials
from .trials import Failure, Skipped

HOG = "tests/gpu/jobs/hog.cu"
# Left free by the hog: less than the job needs, and enough for the context of a second hog.
HOG_LEAVES_GIB = 0.5
# One may start before all of the killed job's memory is free.
HOGS_MAX = 3
MIB = 1 << 20
LINES = 5

CONTROL, SERVER = "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"
CONTROL_SECONDS_MAX = 30
MPS_END_SECONDS_MAX = 15
LOG_LINES = 4
# Part of a program's name that the kernel keeps.
COMM_MAX = 15
# Tells if any CUDA program starts.
PROBE = """
import ctypes
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
codes = [
    cuda.cuInit(0),
    cuda.cuDeviceGet(ctypes.byref(device), 0),
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
]
raise SystemExit(f"CUDA errors {codes}" if any(codes) else 0)
"""


def full(trial):
    """While another program has the GPU's memory, the run is refused without changes; afterwards it continues."""
    hog = programs.build(HOG, trial.folder)
    reference = trial.reference()
    trial.finish(reference, "the uninterrupted run")
    run = trial.supervise("never")
    trial.computes(run, LINES)
    gpu = only(machine.gpus_of(run.job()), "GPUs that the job computes on")
    trial.demand(run, "snapshot")
    lines = run.lines()
    trial.computes(run, lines + LINES)
    facts = shown(trial, run)
    needed = next((one["used_bytes"] for one in facts["cuda"]["gpus"] if one["uuid"] == gpu), None)
    if not needed:
        raise Failure("the image does not tell what the job had on the GPU")
    job = run.job()
    trial.kill_all(run)
    # The remains of a killed process may hold its memory for a moment longer.
    trial.until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in job), "its last bit")
    before = listed(trial, run)
    hogs = []
    try:
        fill(trial, hog, hogs, gpu, needed)
        refused_to_go_on(trial, gpu, len(run.log().own))
    finally:
        for one in hogs:
            one.kill()
    if listed(trial, run) != before:
        raise Failure("the refusal changed the image")
    trial.demand(run, "verify")
    run = trial.supervise("never")
    trial.finish(run, "the job")
    if not run.log().restores:
        raise Failure("it began anew")
    trial.same(reference, run)
    return "refused, then equal"


def fill(trial, program, hogs, gpu, needed):
    """Occupies memory until less is free than the job needs."""
    for number in range(HOGS_MAX):
        words, folder = [program, HOG_LEAVES_GIB], trial.folder / f"hog{number}"
        hogs.append(processes.Program(words, folder, trial.environment))
        trial.programs.append(hogs[-1])
        trial.until(hogs[-1].lines, "a full GPU", hogs[-1])
        free = machine.free_mib(gpu)
        if free is not None and free * MIB < needed:
            trial.outcome.notes.append(
                f"the job had {needed // MIB} MiB on the GPU, {free} MiB were left"
            )
            return
    raise Failure(f"the GPU did not fill: the job needs {needed // MIB} MiB, {free} MiB are free")


def refused_to_go_on(trial, gpu, known):
    """A start that must be refused with the reason, before CRIU is started; `known` lines are older."""
    begun = time.monotonic()
    run = trial.supervise("never")
    trial.until(lambda: run.code() is not None, "the refusal")
    took, said = time.monotonic() - begun, run.log().own[known:]
    why = next((line for line in said if "restore failed" in line), "")
    trial.outcome.notes.append(f"exit code {run.code()} after {took:.1f} s: {why or said[-1:]}")
    wanted = (gpu, "free", "the job needs")
    if run.code() == 0 or not all(word in why for word in wanted):
        raise Failure("it did not refuse in words about the GPU's memory")
    if logs := [path.name for path in (run.store / "logs").glob("restore-*")]:
        raise Failure(f"CRIU was started: {' '.join(logs)}")


def only(things, what):
    if len(things) != 1:
        raise Failure(f"{what}: {len(things)}, not one")
    return things[0]


def shown(trial, run):
    """Returns the newest image, as in `show --json`."""
    return json.loads(trial.demand(run, "show --json"))


def listed(trial, run):
    return json.loads(trial.demand(run, "list --json"))


def mps(trial):
    """A job that computes through an MPS server is refused snapshots with a message about MPS, and continues."""
    if trial.tools.device != "cuda":
        raise Skipped("no GPU here")
    for program in (CONTROL, SERVER):
        if not shutil.which(program, path=programs.PATH):
            raise Skipped(f"no {program} on PATH")
    daemon = Daemon(trial)
    try:
        daemon.begin()
        daemon.probe()
        verdict = trials.refused(trial)
        if "MPS" not in trial.outcome.notes[0]:
            raise Failure("the refusal does not name MPS")
        return verdict
    except (Failure, subprocess.SubprocessError):
        trial.outcome.notes += daemon.account()
        raise
    finally:
        for program in trial.programs:
            trial.guard(program.end)
        daemon.end()


class Daemon:
    """MPS of this trial: all programs of the trial have its folder in their environment."""

    def __init__(self, trial):
        self.trial = trial
        self.pipes, self.logs = trial.folder / "mps", trial.folder / "mps-log"
        trial.environment |= {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipes),
            "CUDA_MPS_LOG_DIRECTORY": str(self.logs),
        }

    def begin(self):
        for folder in (self.pipes, self.logs):
            folder.mkdir(parents=True)
        code, said = self.control("-d")
        if code != 0:
            raise Skipped(f"{CONTROL} -d ended with {code}: {said}")

    def control(self, *options, command=None):
        """Returns its exit code and output, through files, because the daemon keeps its descriptors."""
        answer = self.trial.folder / "mps-answer"
        question = self.trial.folder / "mps-question"
        question.write_text(f"{command}\n" if command else "", encoding="ascii")
        with question.open("rb") as stdin, answer.open("wb") as stdout:
            done = subprocess.run(
                [CONTROL, *options],
                env=self.trial.environment,
                stdin=stdin,
                stdout=stdout,
                stderr=stdout,
                timeout=CONTROL_SECONDS_MAX,
                start_new_session=True,
                check=False,
            )
        return done.returncode, " ".join(answer.read_text(errors="replace").split())

    def probe(self):
        """Skips the trial if not even a program outside of ckpt-run starts."""
        words = [self.trial.tools.python, "-c", PROBE]
        probe = processes.Program(words, self.trial.folder / "probe", self.trial.environment)
        self.trial.programs.append(probe)
        self.trial.until(lambda: probe.code() is not None, "a CUDA program under MPS")
        if probe.code() != 0:
            why = " ".join(probe.stderr.read_text(errors="replace").split()[-LOG_LINES:])
            log = " / ".join(self.account())
            raise Skipped(f"no CUDA program starts under MPS here: {why}; {log}")

    def account(self):
        """Returns the processes that compute through it, and the ends of its logs."""
        notes = []
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            servers = self.control(command="get_server_list")[1]
            notes.append(f"MPS servers: {servers or 'none'}")
            for server in (word for word in servers.split() if word.isdigit()):
                clients = self.control(command=f"get_client_list {server}")[1]
                notes.append(f"clients of {server}: {clients or 'none'}")
        for path in sorted(self.logs.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-LOG_LINES:]
            notes += [f"{path.name}: {line}" for line in lines]
        return notes

    def end(self):
        """Requests its end; kills the remaining processes."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self.control(command="quit")
        deadline = time.monotonic() + MPS_END_SECONDS_MAX
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(trials.POLL_SECONDS)
        if processes.kill(left):
            self.trial.outcome.notes.append(f"MPS did not quit: {len(left)} processes were killed")

    def processes(self):
        """Returns its existing processes: they have its folder in their environment."""
        own = f"CUDA_MPS_PIPE_DIRECTORY={self.pipes}".encode()
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if has(pid, own)]


def has(pid, variable):
    """Returns true for a program of MPS with this in its environment."""
    try:
        name = pathlib.Path(f"/proc/{pid}/comm").read_text()
        environment = pathlib.Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return name.strip() in (
        CONTROL[:COMM_MAX],
        SERVER[:COMM_MAX],
    ) and variable in environment.split(b"\0")
