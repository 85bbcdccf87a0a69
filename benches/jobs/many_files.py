#!/usr/bin/env python3
"""A job with many files, for benches/files_cost.py.

    many_files.py FOLDER GO OPEN CLOSED

Creates CLOSED files of 4 KiB in FOLDER and keeps OPEN others open, half of them for appending. Each round begins when the
file GO/ROUND exists and changes 100 of each kind. When GO/end exists, prints a digest of everything.
"""

import hashlib
import os
import pathlib
import random
import resource
import sys
import time

CHANGED = 100
FOLDER_FILES = 1000
SIZE = 4096
POLL_SECONDS = 0.01


def content(seed):
    return random.Random(seed).randbytes(SIZE)


def main():
    folder, go = map(pathlib.Path, sys.argv[1:3])
    opened, closed = map(int, sys.argv[3:])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    paths = [folder / f"closed-{i // FOLDER_FILES}" / str(i) for i in range(closed)]
    for i, path in enumerate(paths):
        if i % FOLDER_FILES == 0:
            path.parent.mkdir(parents=True)
        path.write_bytes(content(i))
    (folder / "open").mkdir(parents=True)
    files = [
        open(folder / "open" / str(i), "ab" if i % 2 else "w+b", buffering=0) for i in range(opened)
    ]
    for i, file in enumerate(files):
        file.write(content(-i))
    print("ready", flush=True)
    number = 0
    while True:
        number += 1
        while not (go / str(number)).exists():
            if (go / "end").exists():
                digest(folder)
                return
            time.sleep(POLL_SECONDS)
        chosen = random.Random(number)
        for path in chosen.sample(paths, min(CHANGED, closed)):
            with path.open("r+b") as file:
                file.write(content(f"{number} {path.name}"))
        for file in chosen.sample(files, min(CHANGED, opened)):
            if "w" in file.mode or "+" in file.mode:
                file.seek(0)
            file.write(content(f"{number} {pathlib.Path(file.name).name}"))
        print(f"round {number}", flush=True)


def digest(folder):
    total = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        total.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    print(total.hexdigest(), flush=True)


main()
