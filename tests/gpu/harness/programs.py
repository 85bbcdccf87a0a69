"""CUDA programs of this repository, compiled on the machine where they are used."""

import os
import pathlib
import shutil
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[3]
PATH = f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin"
# For this machine's GPU; if the compiler does not see one, for those it knows.
TARGETS = (("-arch=native",), ())
BUILD_SECONDS_MAX = 120
TAIL = 300


def missing(device):
    """Returns a missing requirement, or None."""
    if device == "cpu":
        return "GPU"
    return None if shutil.which("nvcc", path=PATH) else "nvcc"


def build(source, folder, name=None, flags=()):
    """Compiles a source, named from the repository's root, with the CUDA runtime; returns the program."""
    source = ROOT / source
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / (name or source.stem)
    for target in TARGETS:
        done = subprocess.run(
            ["nvcc", "-O2", "-std=c++17", *target, *flags, "-o", str(program), str(source)],
            env=os.environ | {"PATH": PATH},
            capture_output=True,
            text=True,
            timeout=BUILD_SECONDS_MAX,
            check=False,
        )
        if done.returncode == 0:
            return program
    raise RuntimeError(f"nvcc failed on {source.name}: {done.stderr.strip()[-TAIL:]}")
