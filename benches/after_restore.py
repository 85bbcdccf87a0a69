#!/usr/bin/env python3
"""Speed of a job after its restore, compared to its speed before the snapshot.

    benches/after_restore.py --bin PATH --criu PREFIX [--python PYTHON] [--rounds N] [--record]

CRIU fills memory by small pages. A job that had huge pages (NumPy asks for them) computes more slowly until it has them
again; the kernel alone restores 16 MiB in 10 s. Each round: 30 steps of `benches/jobs/strides.py`, a snapshot, a
kill, the restore; 3 s later 30 steps more. Needs root, a kernel with transparent huge pages and Python with NumPy.
--record writes benches/results/after-restore.md.
"""

import argparse
import json
import pathlib
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
JOB = HERE / "jobs" / "strides.py"
RESULT = HERE / "results" / "after-restore.md"
STEPS = 30
SETTLE_SECONDS = 3
WAIT_SECONDS_MAX = 120
POLL_SECONDS = 0.05


def wait_for(what, condition):
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"waited too long for {what}")
        time.sleep(POLL_SECONDS)


def steps_of(path):
    # The last line may be incomplete.
    return [
        json.loads(line) for line in path.read_text().splitlines(keepends=True) if line[-1:] == "\n"
    ]


def job_pid(program, store):
    status = subprocess.run(
        [program, "status", "--json", "--store", store], capture_output=True, check=True
    )
    return json.loads(status.stdout)["job_pid"]


def measure(options, folder):
    """Measures the steps before the snapshot and after the restore."""
    store, out, err = folder / "store", folder / "out", folder / "err"
    line = [options.bin, "--store", store, "--criu", options.criu, "--interval", "never"]
    with out.open("w") as stdout, err.open("w") as stderr:
        run = subprocess.Popen(
            [*line, "--", options.python, JOB],
            stdout=stdout,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
        )
    try:
        wait_for("the first steps", lambda: len(steps_of(out)) >= STEPS)
        before = steps_of(out)[-STEPS:]
        subprocess.run(
            [options.bin, "snapshot", "--store", store], stdout=subprocess.DEVNULL, check=True
        )
        subprocess.run(["kill", "-KILL", str(job_pid(options.bin, store))], check=True)
        wait_for("the restore", lambda: "restored image=" in err.read_text())
        time.sleep(SETTLE_SECONDS)
        known = len(steps_of(out))
        wait_for("the steps after it", lambda: len(steps_of(out)) >= known + STEPS)
        return before, steps_of(out)[known : known + STEPS]
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()


def row(name, steps):
    def milliseconds(key):
        return f"{statistics.median(step[key] for step in steps) * 1e3:.1f}"

    huge = statistics.median(step["huge_mib"] for step in steps)
    return f"| {name} | {milliseconds('gather')} | {milliseconds('stream')} | {huge:.0f} |"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bin", type=pathlib.Path, required=True)
    parser.add_argument("--criu", type=pathlib.Path, required=True, help="prefix of a CRIU")
    parser.add_argument("--python", default=sys.executable, help="has NumPy")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true", help=f"writes {RESULT.name}")
    options = parser.parse_args()
    options.bin, options.criu = options.bin.resolve(), options.criu.resolve()
    befores, afters = [], []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(prefix="after-restore.") as folder:
            before, after = measure(options, pathlib.Path(folder))
            befores += before
            afters += after
    text = "\n".join(
        [
            "# after-restore",
            "",
            f"`benches/after_restore.py --rounds {options.rounds}`",
            "",
            f"- date: {time.strftime('%Y-%m-%d')}",
            f"- kernel: {platform.release()}",
            "",
            f"Medians of {options.rounds} x {STEPS} steps.",
            "",
            "| | gather, ms | stream, ms | huge pages, MiB |",
            "|---|---:|---:|---:|",
            row("before the snapshot", befores),
            row(f"{SETTLE_SECONDS} s after the restore", afters),
            "",
        ]
    )
    print(text)
    if options.record:
        RESULT.write_text(text)


if __name__ == "__main__":
    main()
