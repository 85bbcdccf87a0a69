"""Part f: freeze of a program if the agent covers half of its memory, compared to all of it and to none.

The program is the counter, and so are its lines: one uninterrupted counter judges all runs.
"""

from harness import subjects, ways

TITLE = "f. Half covered"
COLUMNS = ways.COLUMNS
LEGEND = f"""{ways.LEGEND} halves: one half of the memory is from `cudaMalloc`, the other from `cudaMallocAsync` (pool) or
`cudaMallocPitch` (pitched), which the agent does not cover: the driver copies it through host memory in the same snapshot
(`tests/gpu/jobs/halves.cu`). counter: all is from `cudaMalloc`. All print the same lines, which must equal those of an
uninterrupted counter. The program with a pool is snapshotted and killed once more after its first kill; the times are
without that."""
GIB, PACE_MS = 8, 100
ROUNDS_MAX = 2


def run(context, section):
    """Measures the half-covered program first, in case the time does not suffice."""
    halves, pitched = (subjects.halves(context, GIB, kind) for kind in ("pool", "pitched"))
    whole = subjects.counter(context, GIB)
    found = [
        measure(context, halves, "resident", "resident", once_more),
        measure(context, pitched, "resident", "resident", ways.nothing),
        # Part a has a run of that name and way.
        measure(context, whole, "resident, all", "resident", ways.nothing),
        measure(context, halves, "driver", "driver", ways.nothing),
    ]
    ways.compare(context, found, halves.name, lambda steps: whole.words(steps, 0))
    for measured in found:
        section.row(*measured.cells())
        context.judge(measured.result)


def measure(context, subject, way, memory, at_end):
    rounds, words = min(context.options.rounds, ROUNDS_MAX), subject.endless(PACE_MS)
    measured = ways.supervised_way(context, subject.name, way, words, memory, rounds, at_end=at_end)
    print(f"    {subject.name}: {way}: {ways.brief(measured)}", flush=True)
    return measured


def once_more(session):
    """The restored program is snapshotted and restored again, too."""
    session.snapshot()
    session.crash()
