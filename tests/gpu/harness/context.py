"""Shared parts of a measurement: tools, time, folders, and the overall result."""

import pathlib
import re
import shutil
import tempfile

from . import catalog

# Part of a program's name that is kept in a folder's name.
UNSAFE = re.compile(r"[^a-z0-9]+")


class Context:
    def __init__(self, options, tools, budget):
        self.options, self.tools, self.budget = options, tools, budget
        self.work = pathlib.Path(
            tempfile.mkdtemp(prefix="gpu-resident.", dir=options.work)
        ).resolve()
        self.bad = []

    def folder(self, *names):
        """Returns the folder of a run; the same names give the same folder."""
        return self.work / UNSAFE.sub("-", " ".join(map(str, names)).lower())

    def variables(self):
        """Returns the environment of every program."""
        return catalog.environment()

    def judge(self, result):
        """Records a failure."""
        if result.startswith(("FAILED", "DIFFERS")):
            self.bad.append(result)

    def close(self):
        if self.bad or self.options.keep:
            print(f"kept for a look: {self.work}")
        else:
            shutil.rmtree(self.work, ignore_errors=True)
