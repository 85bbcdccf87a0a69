"""Folders that are created, filled, renamed, exchanged and removed; links, modes and times of their contents."""

import os
import pathlib
import shutil

from common import main, no_check


def fill(folder, number, steps):
    folder.mkdir()
    (folder / "deep/er").mkdir(parents=True)
    (folder / "deep/er/data").write_bytes(steps.random.randbytes(3000))
    (folder / "number").write_text(str(number), encoding="ascii")
    os.link(folder / "number", folder / "deep/same")
    (folder / "link").symlink_to("deep/er/data")
    (folder / "number").chmod(0o600 | number % 8)


def contents(folder):
    found = []
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        is_file = path.is_file()
        found.append((str(path), about.st_mode, about.st_nlink, is_file and path.read_bytes()))
    return found


def run(steps):
    current, old = pathlib.Path("current"), pathlib.Path("old")
    fill(current, -1, steps)
    for number in steps:
        new = pathlib.Path(f"new.{number}")
        fill(new, number, steps)
        steps.rest()
        # The generations rotate: current becomes old, new becomes current.
        if old.exists():
            shutil.rmtree(old)
        os.rename(current, old)
        steps.rest()
        os.rename(new, current)
        # A file of the renamed folder is changed in place.
        with open(current / "number", "a", encoding="ascii") as file:
            file.write(f" {number}")
        os.rename(current / "deep/er", current / "deeper")
        if number % 10 == 0:
            shutil.copytree(old, f"kept.{number}", symlinks=True)
        if number % 30 == 20:
            shutil.rmtree(f"kept.{number - 20}")
            os.rename(f"kept.{number - 10}", f"kept.{number - 20}")
        steps.tell(number, contents(current), contents(old))


main(run, no_check, 200)
