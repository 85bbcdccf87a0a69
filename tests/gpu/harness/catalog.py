"""The jobs by name, with their command lines."""

import collections.abc
import dataclasses
import importlib.util
import os
import pathlib
import shlex

from . import neighbours, programs, switching, takeover, trials

JOBS = pathlib.Path(__file__).resolve().parent.parent / "jobs"
RESULT, TIMES = "result.txt", "times.txt"
# Settings that keep runs equal and on this machine, with NVLink's multicast off.
ENVIRONMENT = {
    "PYTHONPATH": str(JOBS),
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "2",
    "HF_HUB_OFFLINE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def environment():
    """Returns the environment of every job."""
    return os.environ | ENVIRONMENT | {"PATH": programs.PATH}


@dataclasses.dataclass(frozen=True)
class Job:
    """A job and what is done with it.

    `line` holds Python's arguments, or for `shell` a line for `sh -c`; JOBS is the jobs' folder, PYTHON
    the interpreter, OPTIONS the options of all jobs. With `program`, a CUDA source that is compiled into
    the folder above the job's, it is a command; STEPS and PACE are what OPTIONS would have said.
    """

    name: str
    line: str
    needs: tuple = ("torch",)
    shell: bool = False
    program: str = ""
    trial: collections.abc.Callable = trials.restored
    interval: int = 4
    crashes: int = 2
    steps: int = 250
    ms_per_step: int = 100
    more: tuple = ()
    result: str = RESULT
    times: str = TIMES
    # Runs alone: it takes a whole GPU, or is measured.
    alone: bool = False
    # Runs only when named: it answers a question and is not part of the table.
    on_request: bool = False

    def words(self, tools, pace_ms):
        options = {
            "--device": tools.device,
            "--steps": str(self.steps),
            "--ms-per-step": str(pace_ms),
            "--result": RESULT,
            "--times": self.times,
        }
        options = [word for pair in options.items() for word in pair]
        parts = {
            "JOBS": str(JOBS),
            "PYTHON": tools.python,
            "OPTIONS": shlex.join(options),
            "STEPS": str(self.steps),
            "PACE": str(pace_ms),
        }
        whole = self.shell or self.program
        line = self.line if whole else f"PYTHON {self.line} OPTIONS"
        for name, value in parts.items():
            line = line.replace(name, value)
        return ["sh", "-c", line] if self.shell else shlex.split(line)

    def environment(self):
        return environment() | dict(self.more)

    def missing(self, device):
        """Returns a missing requirement: a module, a GPU or a compiler; NumPy replaces CuPy without a GPU."""
        if self.program:
            return programs.missing(device)
        needs = [name for name in self.needs if device == "cuda" or name != "cupy"]
        return next((name for name in needs if importlib.util.find_spec(name) is None), None)


# The longest first; the least important last, in case the time does not suffice.
ONE_GPU = (
    Job("hf-trainer", "JOBS/hf_trainer.py", ("torch", "transformers", "accelerate")),
    Job("compile", "JOBS/compile.py", steps=500),
    Job("jax", "JOBS/jax_job.py", ("jax", "numpy"), steps=500),
    Job("managed", "JOBS/managed.py", (), trial=trials.refused),
    Job("ipc", "JOBS/ipc.py", steps=400),
    Job(
        "ipc-small",
        f"../lend 64 STEPS PACE {RESULT} {TIMES}",
        (),
        program="tests/gpu/jobs/lend.cu",
        trial=trials.refused,
    ),
    Job("dataloader", "JOBS/dataloader.py", steps=400),
    Job("dataloader-keep", "JOBS/dataloader.py --persistent --pin", steps=400),
    Job("dataloader-spawn", "JOBS/dataloader.py --persistent --start spawn"),
    Job("hf-accelerate", "JOBS/hf_accelerate.py", ("torch", "accelerate")),
    Job("cupy", "JOBS/cupy_job.py", ("cupy", "numpy")),
    Job("remote", "JOBS/big.py --gib 2", trial=takeover.continued),
    Job("amp", "JOBS/amp.py"),
    Job("graphs", "JOBS/graphs.py"),
    Job("cudnn", "JOBS/cudnn.py"),
    Job("nvml", "JOBS/nvml.py"),
    Job("lightning", "JOBS/lightning_fit.py", ("torch", "lightning", "mpi4py")),
    Job("bystander-nvml", "JOBS/bystander.py --through nvml"),
    Job("bystander-hwloc", "JOBS/bystander.py --through opencl --hwloc"),
    Job("bystander-opencl", "JOBS/bystander.py --through opencl", trial=trials.refused),
    Job("progress", "JOBS/progress.py"),
    Job("saves", "JOBS/saves.py", steps=400),
    Job(
        "counter",
        f"../counter 1 STEPS PACE {RESULT}",
        (),
        program="examples/counter.cu",
        steps=400,
    ),
    Job(
        "heap",
        f"../heap 512 STEPS PACE {RESULT}",
        (),
        program="tests/gpu/jobs/heap.cu",
        steps=400,
        more=(("MALLOC_ARENA_MAX", "1"),),
    ),
    Job(
        "maps",
        f"../maps 64 STEPS PACE {RESULT}",
        (),
        program="tests/gpu/jobs/maps.cu",
    ),
    Job(
        "expandable",
        "JOBS/big.py --gib 2",
        steps=400,
        more=(("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),),
    ),
    Job("module", "-m pkg.train"),
    Job("pause", "-m pkg.train", trial=trials.paused),
    Job(
        "shell",
        "mkdir -p sub; cd sub; PYTHON -m pkg.train OPTIONS; echo done",
        shell=True,
        result=f"sub/{RESULT}",
    ),
    Job("tee", "PYTHON -m pkg.train OPTIONS 2>&1 | tee train.log", shell=True),
    Job("serve-pipe", "PYTHON -m pkg.ask 250 50 | PYTHON JOBS/inference.py OPTIONS", shell=True),
    Job(
        "serve-file",
        "PYTHON -m pkg.ask 250 0 > requests; PYTHON JOBS/inference.py OPTIONS < requests",
        shell=True,
    ),
    Job("cupy-managed", "JOBS/cupy_job.py --managed", ("cupy", "numpy"), trial=trials.refused),
    Job(
        "full",
        f"../counter 2 STEPS PACE {RESULT}",
        (),
        program="examples/counter.cu",
        trial=neighbours.full,
        steps=150,
        alone=True,
    ),
    Job("mps", "-m pkg.train", trial=neighbours.mps, alone=True),
    Job("long-kernel", "", (), trial=switching.long_kernel, alone=True, on_request=True),
)
