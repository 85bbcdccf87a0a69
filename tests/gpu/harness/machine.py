"""Description of the machine and the tools."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess

PACKAGES = ("torch", "transformers", "accelerate", "cupy-cuda13x", "jax")


def said(*words):
    """Returns the first line that a program prints, or nothing."""
    try:
        words = [str(word) for word in words]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout.strip().splitlines() or [""])[0].strip()


def gpu_query(what):
    """Returns one value per GPU from nvidia-smi."""
    return smi(f"--query-gpu={what}")


def gpus_of(pids):
    """Returns the UUIDs of the GPUs that any of these processes computes on."""
    apps = [line.split(", ") for line in smi("--query-compute-apps=pid,gpu_uuid")]
    return sorted({gpu for pid, gpu in apps if int(pid) in pids})


def free_mib(gpu):
    """Returns the free memory of a GPU, by its UUID; None if it is not reported."""
    told = [line.split(", ") for line in smi("--query-gpu=uuid,memory.free")]
    return next((int(free) for uuid, free in told if uuid == gpu and free.isdigit()), None)


def smi(query):
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines()]


def criu_version(prefix):
    libraries = prefix / "usr/lib" / f"{platform.machine()}-linux-gnu"
    loader = next(iter(sorted(libraries.glob("ld-linux-*.so.*"))), None)
    if loader is None:
        return "unknown"
    return said(
        loader, "--library-path", libraries, prefix / "usr/sbin/criu", "--version"
    ).removeprefix("Version: ")


def memory_gib():
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def facts(tools):
    """Returns (name, value) pairs."""
    gpus = gpu_query("name") if tools.device == "cuda" else []
    driver = pathlib.Path("/sys/module/nvidia/version")
    versions = [f"{name} {found}" for name in PACKAGES if (found := version(name))]
    return [
        ("date", datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")),
        ("GPU", ", ".join(gpus) or "none"),
        ("driver", driver.read_text().strip() if gpus and driver.exists() else "none"),
        ("kernel", platform.release()),
        ("CPUs", f"{os.cpu_count()}, {memory_gib()} GiB"),
        ("CRIU", criu_version(tools.criu)),
        ("ckpt-run", said(tools.bin, "--version").removeprefix("ckpt-run ")),
        ("user", "an ordinary user" if os.getuid() else "root"),
        *([("cuda.memory", tools.memory)] if tools.memory else []),
        ("Python", ", ".join([platform.python_version(), *versions])),
    ]
