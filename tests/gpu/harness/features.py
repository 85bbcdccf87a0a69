"""The features of CUDA that jobs/features uses, and what becomes of each."""

import functools
import subprocess

from . import catalog, programs, trials

FOLDER = catalog.JOBS / "features"
STEPS, PACE_MS = 240, 40
# Steps before the first snapshot, and between a restore and the next one.
STEPS_BETWEEN = 45
SNAPSHOTS = 2
# The driver keeps gigabytes for stacks of this size: the job has to compute until an image of them is stored.
LONGER = {"limits": 3 * STEPS}
# By name, a part of the reason for which a snapshot is refused.
MAPPED = "maps GPU memory in a way that cannot be restored"
SHARED = "shares GPU memory with other processes"
REFUSED = {
    "array-mapped": MAPPED,
    "mapped-host": MAPPED,
    "mapped-external": SHARED,
    "mapped-imported": SHARED,
    "pool-exported": SHARED,
    "torch-profiler": "operation not supported",
}


LIBRARIES = (
    *("fourier", "algebra", "sparse", "randomness", "recurrent", "attention", "narrow"),
    *("alone_in_nccl", "profiler", "pools"),
)
ALLOCATORS = {
    "torch-malloc-async": ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync"),
    "torch-uncached": ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),
    "torch-blocking": ("CUDA_LAUNCH_BLOCKING", "1"),
    "torch-eager-loading": ("CUDA_MODULE_LOADING", "EAGER"),
}


def jobs(folder):
    """Compiles the program into the folder, and returns a job for each feature that this machine has."""
    parts = (str(part) for part in FOLDER.glob("*.cu") if part.stem != "main")
    flags = ("-rdc=true", "--threads=0", *parts)
    program = programs.build(FOLDER / "main.cu", folder, "features", flags)
    listed = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    used = "JOBS/libraries.py --use"
    return [
        *(job(name, f"exec {program} {name} STEPS PACE {catalog.RESULT}", shell=True) for name in listed),
        *(job(f"torch-{name}", f"{used} {name}", needs=("torch",)) for name in LIBRARIES),
        job("triton", f"{used} kernel", needs=("torch", "triton")),
        job("cupy", f"{used} cupy_libraries", needs=("torch", "cupy")),
        *(
            job(name, "JOBS/amp.py", needs=("torch",), more=(variable,))
            for name, variable in ALLOCATORS.items()
        ),
    ]


def job(name, line, **more):
    trial = functools.partial(compared, refusal=REFUSED.get(name))
    steps = LONGER.get(name, STEPS)
    return catalog.Job(name, line, **({"needs": ()} | more), trial=trial, steps=steps, ms_per_step=PACE_MS)


def compared(trial, refusal):
    """Snapshots of it are restored after kills or refused, and in each case its result is the uninterrupted run's."""
    reference = trial.reference()
    run = trial.supervise("never")
    refused = []
    for _ in range(SNAPSHOTS):
        trial.computes(run, run.lines() + STEPS_BETWEEN)
        code, words = trial.ask(run, "snapshot")
        if code:
            refused.append(words)
        else:
            trial.wait(trial.random.uniform(0, 0.5), run)
            trial.crash(run)
    trial.finish(run, "the job")
    trial.finish(reference, "the uninterrupted run")
    trial.same(reference, run)
    trial.outcome.notes += dict.fromkeys(refused)
    wanted = SNAPSHOTS if refusal else 0
    if len(refused) != wanted or not all(refusal in words for words in refused):
        raise trials.Failure(f"{len(refused)} of {SNAPSHOTS} snapshots were refused, not {wanted} (equal)")
    return "refused, continues, equal" if refused else "equal"
