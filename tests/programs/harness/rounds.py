"""One round: a run under ckpt-run with snapshots and kills at random moments, and the comparison."""

import dataclasses
import os
import random
import shutil
import subprocess
import time

from . import compare, supervised

# Limits on the waits for the end of a run, beyond what the job takes, and for a restore.
SECONDS_MAX = 180
RESTORE_SECONDS_MAX = 120
# A part of the kills falls into a snapshot, and a part of the images is followed by another.
IN_SNAPSHOT = 0.15
SECOND_IMAGE = 0.3

EQUAL, REFUSED, WRONG = "equal", "refused", "WRONG"


@dataclasses.dataclass
class Round:
    """The actions of a round and its end."""

    seed: str
    verdict: str = WRONG
    images: int = 0
    failed_images: int = 0
    kills: int = 0
    restores: int = 0
    seconds: float = 0
    notes: list = dataclasses.field(default_factory=list)

    def line(self):
        done = f"{self.images} images, {self.kills} kills, {self.restores} restores"
        return f"{self.verdict:<8}{done}, {self.seconds:.0f} s, seed {self.seed}"


def environment(tools):
    """Settings that keep runs equal and on this machine."""
    fixed = {
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        # Open MPI as one process: no daemon, no connection.
        "OMPI_MCA_ess_singleton_isolated": "1",
        "OMPI_MCA_btl": "self",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "TZ": "UTC",
        "TARGET_PROGRAMS": str(tools.folder),
        "XDG_CONFIG_HOME": str(tools.folder / "none"),
    }
    return os.environ | fixed


def reference(program, tools, place):
    """Runs the job uninterrupted; returns (state, seconds), or raises with its output."""
    (place / "work").mkdir(parents=True)
    begun = time.monotonic()
    with (place / "out").open("wb") as out, (place / "err").open("wb") as err:
        done = subprocess.run(
            program.words(tools.python, tools.seconds or program.seconds),
            cwd=place / "work",
            env=environment(tools),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            timeout=SECONDS_MAX,
            check=False,
        )
    seconds = time.monotonic() - begun
    state = compare.look(program, place, tools.python)
    if done.returncode or not state.sane:
        said = (place / "err").read_text(errors="replace").strip().splitlines()
        raise RuntimeError(
            f"the reference ends with {done.returncode}: {(said or state.check)[-1:]}"
        )
    return state, seconds


def play(program, tools, place, seed, expected, seconds):
    """Plays a round; the job takes `seconds` by itself."""
    outcome, chance = Round(seed), random.Random(seed)
    begun = time.monotonic()
    words = program.words(tools.python, tools.seconds or program.seconds)
    run = supervised.Supervised(tools, place, words, environment(tools))
    try:
        goes_on = crash(run, chance, program.kills, seconds, outcome)
        ended = run.wait_for(run.has_ended, seconds + SECONDS_MAX if goes_on else 0)
    finally:
        run.kill()
    outcome.seconds = time.monotonic() - begun
    outcome.restores = run.restores()
    judge(program, tools, place, run, outcome, expected, ended)
    if outcome.verdict == EQUAL and not tools.keep:
        shutil.rmtree(place)
    return outcome


def crash(run, chance, kills, seconds, outcome):
    """Takes snapshots and kills the job, several times; returns false if the job was killed and is not restored."""
    share = seconds / (kills + 1)
    run.wait_for(lambda: run.count("job started"), RESTORE_SECONDS_MAX)
    for _ in range(kills):
        if not run.sleep(chance.uniform(0.02, 1.4) * share) or not snapshot(run, outcome):
            return True
        if chance.random() < SECOND_IMAGE:
            if not run.sleep(chance.uniform(0.02, 0.8) * share):
                return True
            snapshot(run, outcome)
        in_snapshot = chance.random() < IN_SNAPSHOT
        if not run.sleep(chance.uniform(0.0, 1.2) * share):
            return True
        asked = None
        if in_snapshot:
            asked = run.ask_later("snapshot")
            run.sleep(chance.uniform(0, 0.3))
        if not kill(run, outcome):
            return False
        if asked:
            asked.kill()
            asked.wait()
    return True


def kill(run, outcome):
    """Kills the job and waits until it is restored; returns false if that does not happen and the run does not end."""
    before = run.restores()
    if not run.kill_job():
        return True
    outcome.kills += 1
    run.wait_for(lambda: run.restores() > before, RESTORE_SECONDS_MAX)
    return run.restores() > before or run.has_ended()


def snapshot(run, outcome):
    """Takes a snapshot; returns whether there is an image to restore from."""
    code, said = run.ask("snapshot")
    if code == 0:
        outcome.images += 1
        return True
    if not run.has_ended():
        outcome.failed_images += 1
        outcome.notes.append(f"snapshot: {said.splitlines()[-1] if said else code}")
    return outcome.images > 0


def judge(program, tools, place, run, outcome, expected, ended):
    code = run.process.returncode
    if not ended:
        outcome.notes.append("the run did not end")
        return
    # No job fails by itself, unless its files are wrong.
    if failed := run.failures():
        outcome.notes += failed[:1] + run.said_last()
        return
    refusals = run.refusals()
    if code != 0:
        outcome.notes.append(f"exit code {code}")
        outcome.notes += refusals[-1:] or run.log()[-2:]
        # The message is the verdict's reason: without one, the run has failed.
        outcome.verdict = REFUSED if refusals else WRONG
        return
    differences = compare.look(program, place, tools.python).differences(expected)
    outcome.notes += differences
    outcome.verdict = WRONG if differences else EQUAL
    if refusals and not differences:
        outcome.notes.append(f"an older image was restored: {refusals[-1]}")
