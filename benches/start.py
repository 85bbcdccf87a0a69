#!/usr/bin/env python3
"""Time that ckpt-run takes to start and end, and the size of the program.

    benches/start.py --bin PATH --criu PREFIX [--rounds N] [--record]

Each round runs `true` and `ckpt-run -- true` in a new folder, in turns; as root, also those of the user `nobody`, who
must be able to read both paths. --record writes benches/results/start.md.
"""

import argparse
import datetime
import os
import pathlib
import platform
import pwd
import statistics
import subprocess
import tempfile
import time

RESULT = pathlib.Path(__file__).resolve().parent / "results" / "start.md"


def timed(line, folder, user):
    """Returns the time of a command in milliseconds."""
    begun = time.perf_counter()
    subprocess.run(
        line,
        cwd=folder,
        user=user,
        group=None if user is None else pwd.getpwuid(user).pw_gid,
        extra_groups=None if user is None else [],
        env={**os.environ, "HOME": folder},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    )
    return (time.perf_counter() - begun) * 1000


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", required=True, type=pathlib.Path)
    parser.add_argument("--criu", required=True, type=pathlib.Path)
    parser.add_argument("--rounds", default=21, type=int)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    supervised = [options.bin.resolve(), "--criu", options.criu.resolve(), "--interval", "never"]
    users = {"root": None, "a user": pwd.getpwnam("nobody").pw_uid}
    if os.geteuid() != 0:
        users = {"a user": None}
    lines = {("`true`", name): (["true"], user) for name, user in users.items()}
    lines |= {
        ("`ckpt-run -- true`", name): ([*supervised, "--", "true"], user)
        for name, user in users.items()
    }
    times = {what: [] for what in lines}
    for _ in range(options.rounds):
        for what, (line, user) in lines.items():
            with tempfile.TemporaryDirectory() as folder:
                if user is not None:
                    os.chown(folder, user, -1)
                times[what].append(timed(line, folder, user))
    rows = [
        f"| {command} | {name} | {statistics.median(all):.0f} | {min(all):.0f} to {max(all):.0f} |"
        for (command, name), all in times.items()
    ]
    text = "\n".join([
        "# start",
        "",
        f"`benches/start.py --rounds {options.rounds}`",
        "",
        f"- date: {datetime.date.today()}",
        f"- kernel: {platform.release()}, {os.cpu_count()} CPUs",
        f"- program: {options.bin.stat().st_size / 1e6:.1f} MB",
        "",
        "| command | as | median, ms | all, ms |",
        "|---|---|---:|---:|",
        *rows,
        "",
    ])
    print(text)
    if options.record:
        RESULT.write_text(text)


main()
