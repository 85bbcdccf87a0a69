"""Results of a job: output, names, contents, and the program's own check of its files."""

import dataclasses
import fnmatch
import hashlib
import os
import re
import stat
import subprocess

CHECK_SECONDS_MAX = 120
DIFFERENCES_MAX = 6
WIDTH_MAX = 200


@dataclasses.dataclass
class State:
    """The state of a folder after its job; `names` has mode, links and content of each path."""

    output: list
    names: dict
    check: list
    sane: bool

    def differences(self, reference):
        """Returns the differences from the reference as text; empty if there are none."""
        found = lines("output", self.output, reference.output)
        for path in sorted(self.names.keys() | reference.names.keys()):
            here, there = self.names.get(path), reference.names.get(path)
            if here is None or there is None:
                found.append(f"{path}: {'missing' if here is None else 'not in the reference'}")
            elif here != there:
                found.append(f"{path}: {here}, reference {there}")
        found += lines("check", self.check, reference.check)
        if not self.sane and not found:
            found.append("check: reports a fault")
        left = len(found) - DIFFERENCES_MAX
        more = [f"and {left} more differences"] if left > 0 else []
        return [text[:WIDTH_MAX] for text in found[:DIFFERENCES_MAX]] + more


def lines(what, here, there):
    """The first lines that differ."""
    if here == there:
        return []
    number = next(
        (n for n, (one, other) in enumerate(zip(here, there)) if one != other),
        min(len(here), len(there)),
    )
    shown = [(text[number] if number < len(text) else "nothing")[:70] for text in (here, there)]
    counts = f"{len(here)} lines of {len(there)}"
    return [f"{what}: line {number + 1} is {shown[0]!r}, reference {shown[1]!r}; {counts}"]


def look(program, place, python):
    """Returns the state of a folder whose job has ended."""
    dropped = re.compile(program.lines) if program.lines else None
    output = (place / "out").read_text(encoding="utf-8", errors="replace").splitlines()
    output = [line for line in output if not (dropped and dropped.search(line))]
    # The check may write, as SQLite does with a journal that is left.
    names = listing(program, place / "work")
    check, sane = checked(program, place / "work", python)
    return State(output, names, check, sane)


def listing(program, folder):
    found = {}
    for above, folders, files in os.walk(folder):
        for name in folders + files:
            path = os.path.join(above, name)
            relative = os.path.relpath(path, folder)
            if not any(fnmatch.fnmatch(relative, pattern) for pattern in program.names):
                found[relative] = describe(path, relative, program)
    return found


def describe(path, relative, program):
    about = os.lstat(path)
    mode = stat.filemode(about.st_mode)
    if stat.S_ISLNK(about.st_mode):
        return f"{mode} -> {os.readlink(path)}"
    if not stat.S_ISREG(about.st_mode):
        return mode
    if any(fnmatch.fnmatch(relative, pattern) for pattern in program.contents):
        return f"{mode} {about.st_nlink}"
    with open(path, "rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return f"{mode} {about.st_nlink} {about.st_size} {content}"


def checked(program, folder, python):
    """Returns (lines, true if the check found no fault)."""
    try:
        done = subprocess.run(
            program.check_words(python),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=CHECK_SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ["the check takes too long"], False
    found = done.stdout.splitlines()
    if done.returncode:
        found.append(f"BAD check: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return found, not any(line.startswith("BAD") for line in found)
