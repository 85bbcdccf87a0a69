"""Part e: cost of the agent for allocations.

A program that allocates and frees runs under ckpt-run without snapshots, with the agent loaded (resident) and without
(driver), alternately, each time in a new process.
"""

import dataclasses
import statistics

from harness import sessions, subjects, supervised
from harness.trials import Failure

TITLE = "e. Allocation"
MORE_US_MAX = 100
LEGEND = f"""Microseconds that `cudaMalloc` and `cudaFree` take in a program (`tests/gpu/jobs/allocate.cu`) under ckpt-run,
without snapshots, with the agent loaded (resident) and without (driver), in turns: the median of each run, and of all
runs' the median (least-most). pairs: freed at once, after a warm-up; kept: freed when all are there. more: resident less
driver. target: with the agent `cudaMalloc` takes less than {MORE_US_MAX} us more."""
COLUMNS = (
    ("allocations", 20),
    ("malloc: resident", 24),
    ("malloc: driver", 24),
    ("malloc: more", 12),
    ("free: resident", 24),
    ("free: driver", 24),
    ("free: more", 10),
    ("target", 0),
)
ROUNDS_MAX = 3
# Time of a run on the slowest machine, start included.
RUN_SECONDS = 45
# Description of the memory of each way.
KINDS = {"resident": "covered", "driver": "plain"}


@dataclasses.dataclass(frozen=True)
class Timed:
    """A line of the program: microseconds."""

    malloc: float
    free: float
    kind: str


def run(context, section):
    words, runs = subjects.allocate(context), {"driver": [], "resident": []}
    try:
        in_turns(context, section, words, runs)
    finally:
        if all(runs.values()):
            for name in runs["driver"][0]:
                section.row(name, *cells({way: [run[name] for run in runs[way]] for way in runs}))


def in_turns(context, section, words, runs):
    for number in range(min(context.options.rounds, ROUNDS_MAX)):
        for memory, done in runs.items():
            if context.budget.left() < RUN_SECONDS:
                section.remark(f"no time left for round {number + 1}, {memory}")
                return
            done.append(timed(context, words, memory, number))


def timed(context, words, memory, number):
    """Runs the program once; returns its lines by the kind of allocation."""
    folder = context.folder("allocate", memory, number)
    settings = supervised.Settings(keep=1, memory=memory)
    with sessions.Session(context, folder, words, settings) as session:
        run = session.run
        context.budget.until(lambda: run.code() is not None, "the end of the allocations")
        lines = [line.split() for line in run.stdout.read_text().splitlines()]
        if run.code() != 0 or not lines:
            said = run.stderr.read_text(errors="replace").splitlines()
            own = [line for line in said if not line.startswith("ckpt-run:")]
            raise Failure(f"{memory}: ended with {run.code()}: {' '.join((own or said)[-1:])}")
    return {
        f"{mib} MiB, {count} {how}": Timed(float(malloc), float(free), kind)
        for how, mib, count, malloc, free, kind in lines
    }


def cells(ways):
    """Returns a row without its name; `ways` has the same line of all runs of each way."""
    malloc = {way: [line.malloc for line in lines] for way, lines in ways.items()}
    free = {way: [line.free for line in lines] for way, lines in ways.items()}
    verdict = "met" if more(malloc) < MORE_US_MAX else "missed"
    kinds = {way: {line.kind for line in lines} for way, lines in ways.items()}
    strange = [way for way in ways if kinds[way] != {KINDS[way]}]
    told = (f"{way}: {'/'.join(sorted(kinds[way]))} memory" for way in strange)
    return (
        *(span(malloc["resident"]), span(malloc["driver"]), f"{more(malloc):+.1f}"),
        *(span(free["resident"]), span(free["driver"]), f"{more(free):+.1f}"),
        ", ".join(["not compared" if strange else verdict, *told]),
    )


def more(ways):
    return statistics.median(ways["resident"]) - statistics.median(ways["driver"])


def span(numbers):
    return f"{statistics.median(numbers):.1f} ({min(numbers):.1f}-{max(numbers):.1f})"
