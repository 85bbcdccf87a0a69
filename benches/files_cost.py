#!/usr/bin/env python3
"""Cost of saving a job's files: freeze and restore with many files, and the tracking of writers.

    benches/files_cost.py --bin PATH --criu PREFIX [--source TAR [--make "ARGUMENTS"]] [--rounds N] [--record]

- many files: a job has 5,000 files open and 100,000 closed ones, of which 100 of each kind change between two snapshots; the
  second snapshot and a restore of it are compared with those of the same job without files. The digest of all files at the end
  has to be that of a run that was never interrupted. `criu dump` alone, which is a part of the freeze, is measured as well.
- build: `make` of the C project in --source, with `files.watch` auto and off in turns.
- opens: a C program that opens, reads and closes as many random files as it can, in the same way: CPU time of the whole
  run, ckpt-run included, for each file. Other load on the machine affects it less than the number of files per second.
Needs root, cc, make, Python. Writes below the working folder. --record writes benches/results/files-cost.md.
"""

import argparse
import json
import os
import pathlib
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from bare_freeze import criu_command

HERE = pathlib.Path(__file__).resolve().parent
JOBS = HERE / "jobs"
RESULT = HERE / "results" / "files-cost.md"
OPEN, CLOSED = 5_000, 100_000
OPEN_SECONDS, OPEN_THREADS, OPEN_FILES = 10, 4, 20_000
# Files per second of the loader for which a part of a core is given.
LOADER_RATE = 10_000
WAIT_SECONDS_MAX = 300
POLL_SECONDS = 0.02


def wait_for(what, condition, run):
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not condition():
        if time.monotonic() > deadline or run.poll() is not None:
            sys.exit(f"waited in vain for {what}")
        time.sleep(POLL_SECONDS)


def command(options, store, *settings):
    return [options.bin, "--store", store, "--criu", options.criu, "--interval", "never", *settings]


def events(store, kind):
    lines = (store / "events.ndjson").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def many_files(options, folder, opened, closed):
    """Returns freezes of two snapshots, the part for files, the restore and its rewind, in seconds; and the digest."""
    store, go = folder / "store", folder / "go"
    out, err = folder / "out", folder / "err"
    go.mkdir()
    job = [sys.executable, JOBS / "many_files.py", folder / "files", go, str(opened), str(closed)]
    with out.open("w") as stdout, err.open("w") as stderr:
        run = subprocess.Popen(
            [*command(options, store), "--", *job],
            stdout=stdout, stderr=stderr, stdin=subprocess.DEVNULL, cwd=folder,
        )  # fmt: skip

    def snapshot():
        line = [options.bin, "snapshot", "--store", store]
        subprocess.run(line, stdout=subprocess.DEVNULL, check=True)

    def play(number):
        (go / str(number)).touch()
        wait_for(f"round {number}", lambda: f"round {number}\n" in out.read_text(), run)

    try:
        wait_for("the files", lambda: "ready" in out.read_text(), run)
        snapshot()
        play(1)
        snapshot()
        play(2)
        status = subprocess.run(
            [options.bin, "status", "--json", "--store", store], capture_output=True, check=True
        )
        subprocess.run(["kill", "-KILL", str(json.loads(status.stdout)["job_pid"])], check=True)
        wait_for("the restore", lambda: events(store, "restored"), run)
        (go / "end").touch()
        if run.wait(WAIT_SECONDS_MAX):
            sys.exit(f"the job ended with {run.returncode}: {err.read_text()}")
    finally:
        run.kill()
        run.wait()
    first, second = events(store, "snapshot")
    (restored,) = events(store, "restored")
    rewind = next(it["seconds"] for it in restored["phases"] if it["name"] == "rewind")
    figures = [first["freeze_seconds"], second["freeze_seconds"], restored["seconds"], rewind]
    return figures, out.read_text().splitlines()[-1], len(err.read_text().splitlines())


def criu_alone(options, folder, opened, closed):
    """Seconds of a `criu dump` to files, without ckpt-run."""
    out, images = folder / "out", folder / "images"
    images.mkdir()
    job = [sys.executable, JOBS / "many_files.py", folder / "files", folder, str(opened), str(closed)]
    with out.open("w") as stdout:
        run = subprocess.Popen(
            job, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stdout, start_new_session=True
        )
    try:
        wait_for("the files", lambda: "ready" in out.read_text(), run)
        begun = time.monotonic()
        subprocess.run(
            [*criu_command(options.criu), "dump", "--tree", str(run.pid), "--images-dir", images]
            + ["--leave-running", "--log-file", images / "log"],
            stdout=subprocess.DEVNULL, check=True,
        )  # fmt: skip
        return time.monotonic() - begun
    finally:
        run.kill()
        run.wait()


def expected(folder, opened, closed):
    go = folder / "go"
    go.mkdir(parents=True)
    job = [sys.executable, JOBS / "many_files.py", folder / "files", go, str(opened), str(closed)]
    for name in ["1", "2"]:
        (go / name).touch()
    run = subprocess.Popen(job, stdout=subprocess.PIPE, text=True)
    lines = []
    for line in run.stdout:
        lines.append(line)
        if line == "round 2\n":
            (go / "end").touch()
    return lines[-1].strip()


def scale(options, folder):
    rows = {"none": [], "many": []}
    digest = expected(folder / "expected", OPEN, CLOSED)
    shutil.rmtree(folder / "expected")
    for number in range(options.rounds):
        for name, opened, closed in [("none", 0, 0), ("many", OPEN, CLOSED)]:
            place = folder / f"{name}-{number}"
            place.mkdir()
            figures, found, lines = many_files(options, place, opened, closed)
            if name == "many" and found != digest:
                sys.exit(f"the files are not those of an uninterrupted run: see {place}")
            shutil.rmtree(place)
            place.mkdir()
            figures.append(criu_alone(options, place, opened, 0))
            rows[name].append(figures)
            print(name, figures, f"{lines} lines on stderr", flush=True)
            shutil.rmtree(place)
    names = [
        "first snapshot, freeze", "second snapshot, freeze", "restore", "of it, rewind of files",
        "`criu dump` alone",
    ]  # fmt: skip
    text = [
        f"{OPEN} open files, {CLOSED} closed ones of 4 KiB; 100 of each kind changed before the second snapshot, and again "
        "before the kill. Seconds, medians. Content equal to that of an uninterrupted run.",
        "",
        "| | no files | many files | more |",
        "|---|---:|---:|---:|",
    ]
    for index, name in enumerate(names):
        none, many = (
            statistics.median(row[index] for row in rows[kind]) for kind in ("none", "many")
        )
        text.append(f"| {name} | {none:.2f} | {many:.2f} | {many - none:+.2f} |")
    return text


def alternating(options, folder, name, unit, measure):
    """Measures with and without tracking in turns; the first pair only warms up. Returns the row and both medians."""
    rows = {"auto": [], "off": []}
    for number in range(options.rounds + 1):
        for watch in rows if number % 2 else reversed(rows):
            store = folder / f"store-{name}-{number}-{watch}"
            os.environ["CKPT_RUN_FILES_WATCH"] = watch
            figure = measure(command(options, store))
            shutil.rmtree(store)
            print(name, watch, figure, flush=True)
            if number:
                rows[watch].append(figure)
    del os.environ["CKPT_RUN_FILES_WATCH"]
    on, off = (statistics.median(rows[watch]) for watch in rows)
    spread = max(max(values) - min(values) for values in rows.values()) / off
    more = (on / off - 1) * 100
    return f"| {name} | {unit} | {off:.2f} | {on:.2f} | {more:+.1f} % | {spread * 100:.1f} % |", on, off


def build(options, folder):
    tree = folder / "source"
    tree.mkdir()
    subprocess.run(["tar", "xf", options.source, "-C", tree, "--strip-components=1"], check=True)
    make = ["make", f"-j{os.cpu_count()}", *options.make.split()]

    def measure(line):
        subprocess.run(["make", "clean"], cwd=tree, capture_output=True, check=True)
        begun = time.monotonic()
        subprocess.run([*line, "--", *make], cwd=tree, capture_output=True, check=True)
        return time.monotonic() - begun

    row, _, _ = alternating(options, folder, f"C build ({options.source.name})", "s", measure)
    return row


def opens(options, folder):
    program, tree = folder / "open_files", folder / "tree"
    subprocess.run(["cc", "-O2", "-pthread", JOBS / "open_files.c", "-o", program], check=True)
    tree.mkdir()
    for i in range(OPEN_FILES):
        (tree / str(i)).write_bytes(os.urandom(4096))
    names = folder / "names"
    names.write_text("".join(f"{tree}/{i}\n" for i in range(OPEN_FILES)))

    def measure(line):
        job = [program, str(OPEN_SECONDS), str(OPEN_THREADS)]
        before = cpu_of_children()
        with names.open() as stdin:
            done = subprocess.run([*line, "--", *job], stdin=stdin, capture_output=True, check=True)
        opened = float(done.stdout) * OPEN_SECONDS
        return (cpu_of_children() - before) / opened * 1e6

    row, on, off = alternating(options, folder, "opens", "µs of CPU for each", measure)
    share = (on - off) / 1e6 * LOADER_RATE * 100
    return f"{row}\n\nFor a loader that opens {LOADER_RATE} files a second: {share:.2f} % of a core."


def cpu_of_children():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bin", type=pathlib.Path, required=True)
    parser.add_argument("--criu", type=pathlib.Path, required=True, help="prefix of a CRIU")
    parser.add_argument("--source", type=pathlib.Path, help="tar of a C project with a Makefile")
    parser.add_argument("--make", default="", help="arguments of make")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["scale", "tracking"], help="one part")
    parser.add_argument("--record", action="store_true", help=f"writes {RESULT.name}")
    options = parser.parse_args()
    options.bin, options.criu = options.bin.resolve(), options.criu.resolve()
    text = [
        "# files-cost",
        "",
        f"`benches/files_cost.py --rounds {options.rounds}`",
        "",
        f"- date: {time.strftime('%Y-%m-%d')}",
        f"- machine: {os.cpu_count()} cores, Linux {platform.release()}",
        "",
    ]
    with tempfile.TemporaryDirectory(prefix="files-cost.", dir=".") as folder:
        folder = pathlib.Path(folder).resolve()
        if options.only != "tracking":
            text += [*scale(options, folder), ""]
        if options.only != "scale":
            text += [
                "Tracking: `files.watch` off and auto in turns, medians; the last column is the largest spread.",
                "",
                "| | unit | off | auto | more | spread |",
                "|---|---|---:|---:|---:|---:|",
            ]
            if options.source:
                text.append(build(options, folder))
            text += [opens(options, folder), ""]
    text = "\n".join(text)
    print(text)
    if options.record:
        RESULT.write_text(text)


if __name__ == "__main__":
    main()
