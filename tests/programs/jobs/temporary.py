"""Temporary files: mkstemp, unnamed files, a spool of files that are made, read once and removed."""

import os
import pathlib
import random
import tempfile

from common import main, no_check


def run(steps):
    # The same names in every run.
    tempfile._name_sequence = Names()
    spool = pathlib.Path("spool")
    spool.mkdir()
    unnamed = tempfile.TemporaryFile(dir=".")
    total = 0
    for number in steps:
        handle, name = tempfile.mkstemp(dir=".", prefix="work.")
        with open(handle, "w+b") as file:
            file.write(steps.random.randbytes(steps.random.randrange(100_000)))
            steps.rest()
            file.seek(0)
            size = len(file.read())
        if number % 3:
            os.unlink(name)
        else:
            os.rename(name, spool / f"{number}")
        steps.rest()
        total += size
        for old in sorted(spool.iterdir(), key=lambda path: int(path.name))[:-6]:
            total = total * 3 % 1000003 + len(old.read_bytes())
            old.unlink()
        unnamed.write(f"{number} {total}\n".encode())
        unnamed.flush()
        steps.tell(number, size, total)
    unnamed.seek(0)
    pathlib.Path("kept").write_bytes(unnamed.read())


class Names:
    """Stands in for tempfile's random names."""

    def __init__(self):
        self.random = random.Random(2)

    def __iter__(self):
        return self

    def __next__(self):
        return f"{self.random.randrange(1 << 32):08x}"


main(run, no_check, 300)
