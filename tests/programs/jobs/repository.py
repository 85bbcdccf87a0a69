"""git: commits with fixed dates, branches, merges, and garbage collections."""

import os
import pathlib
import subprocess

from common import main

FIXED = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@b",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@b",
}


def git(*words, number=0):
    date = f"{1_700_000_000 + number} +0000"
    dates = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    done = subprocess.run(
        ["git", *words], env=os.environ | FIXED | dates, capture_output=True, text=True, check=False
    )
    return done.returncode, (done.stdout + done.stderr).strip()


def must(*words, number=0):
    code, said = git(*words, number=number)
    if code:
        raise SystemExit(f"git {' '.join(words)}: {said}")
    return said


def run(steps):
    must("init", "-q", "-b", "main", ".")
    settings = {
        "gc.auto": "0",
        "pack.threads": "1",
        "core.fsync": "none",
        # A restore in the middle of a checkout changes the ctime of files (docs/guide/limits.md).
        "core.trustctime": "false",
        "core.checkStat": "minimal",
    }
    for name, value in settings.items():
        must("config", name, value)
    for number in steps:
        for _ in range(3):
            path = pathlib.Path(f"d{steps.random.randrange(5)}/f{steps.random.randrange(20)}")
            path.parent.mkdir(exist_ok=True)
            path.write_text(
                "".join(f"{steps.random.random()}\n" for _ in range(50)), encoding="ascii"
            )
        must("add", "-A")
        steps.rest()
        must("commit", "-q", "-m", f"commit {number}", number=number)
        if number % 9 == 4:
            must("branch", "-f", "side")
        if number % 9 == 8:
            must("checkout", "-q", "side")
            pathlib.Path(f"side{number}").write_text(f"{number}\n", encoding="ascii")
            must("add", "-A")
            must("commit", "-q", "-m", "side", number=number)
            must("checkout", "-q", "main")
            must("merge", "-q", "--no-ff", "-m", "merge", "side", number=number)
        if number % 25 == 20:
            must("gc", "-q", "--no-detach", "--prune=now")
        steps.tell(number, must("rev-parse", "HEAD"), must("status", "--porcelain"))


def check():
    code, said = git("fsck", "--full", "--strict")
    yield f"BAD fsck: {said[:300]}" if code or "missing" in said or "error" in said else "fsck ok"
    yield must("rev-parse", "HEAD", "main", "side")
    yield must("status", "--porcelain") or "clean"
    yield must("log", "--all", "--oneline", "--graph")
    yield must("reflog", "--all")


main(run, check, 60, rests=1)
