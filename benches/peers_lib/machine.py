"""Environment of the measurement: programs, their versions, the workloads' Python."""

import os
import pathlib
import platform
import shutil
import subprocess
import sys

import bare_freeze


def find_programs(arguments):
    """Returns the available peers by name: a program, or for DMTCP the folder of its programs."""
    given = {
        "ckpt-run": arguments.bin,
        "restic": shutil.which("restic"),
        "criu-image-streamer": arguments.streamer or shutil.which("criu-image-streamer"),
        "dmtcp": arguments.dmtcp and arguments.dmtcp / "bin",
    }
    if given["dmtcp"] is None and (launch := shutil.which("dmtcp_launch")):
        given["dmtcp"] = pathlib.Path(launch).parent
    return {name: pathlib.Path(path).resolve(strict=True) for name, path in given.items() if path}


def make_python(cache):
    """Creates a virtual environment with numpy once; returns its interpreter."""
    python = cache / "venv/bin/python"
    if not python.exists():
        shutil.rmtree(cache, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", cache / "venv"], check=True)
    has_numpy = subprocess.run([python, "-c", "import numpy"], capture_output=True, check=False)
    if has_numpy.returncode != 0:
        subprocess.run([python, "-m", "pip", "install", "--quiet", "numpy"], check=True)
    return python


def describe(programs, criu_prefix, python):
    """Describes the machine and versions for the results."""
    told = {
        "processors": f"{os.cpu_count()} of {processor()}",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') >> 30} GiB",
        "kernel": platform.release(),
        "criu": version([*bare_freeze.criu_command(criu_prefix), "--version"]),
        "python": version([python, "--version"]),
        "numpy": version([python, "-c", "import numpy; print(numpy.__version__)"]),
        "zstd": version(["zstd", "--version"]),
        "lz4": version(["lz4", "--version"]),
        "tar": version(["tar", "--version"]),
    }
    # criu-image-streamer does not report it.
    for name, command in (
        ("ckpt-run", ["--version"]),
        ("restic", ["version"]),
        ("dmtcp", ["--version"]),
    ):
        if path := programs.get(name):
            told[name] = version([path / "dmtcp_launch" if name == "dmtcp" else path, *command])
    return told


def processor():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def version(command):
    """Returns the first line of a program's version output."""
    words = [str(word) for word in command]
    said = subprocess.run(words, capture_output=True, text=True, check=False)
    line = ((said.stdout or said.stderr).strip().splitlines() or ["unknown"])[0]
    return line.strip("* ")
