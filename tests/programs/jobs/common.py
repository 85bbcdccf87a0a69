"""The frame of the jobs: numbered steps at an even pace, each of which prints the hash of all steps before.

A job is started as `JOB SECONDS` in its folder. `JOB check` prints what the folder's files contain; a line that
begins with BAD reports an inconsistency.
"""

import hashlib
import pathlib
import random
import sys
import time


class Steps:
    """Iterates over the numbers of the steps. Pauses are spread over each step, so that kills hit all parts of it."""

    def __init__(self, count, seconds, rests=2):
        self.count, self.pause = count, seconds / count / (rests + 1)
        self.hash = hashlib.sha256()
        self.random = random.Random(1)

    def __iter__(self):
        for number in range(self.count):
            yield number
            self.rest()

    def rest(self):
        """Pauses within a step."""
        time.sleep(self.pause)

    def tell(self, number, *values):
        """Adds values to the hash, and prints it."""
        self.hash.update(repr((number, values)).encode())
        print(number, self.hash.hexdigest()[:16], flush=True)


def main(run, check, count, rests=2):
    """Runs or checks, as the command line says."""
    if sys.argv[1] == "check":
        for line in check():
            print(line)
    else:
        steps = Steps(count, float(sys.argv[1]), rests)
        run(steps)
        print("end", steps.hash.hexdigest())


def digest(data):
    """A short hash of bytes or of anything's text."""
    data = data if isinstance(data, (bytes, memoryview)) else repr(data).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def no_check():
    """For jobs whose files are compared to the byte."""
    return []


def text(path):
    return pathlib.Path(path).read_text(encoding="utf-8")
