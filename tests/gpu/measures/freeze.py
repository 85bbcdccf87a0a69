"""Part a: freeze and restore times of a CUDA program, by its memory size.

Its memory is random bytes. Where the disk has no room for two such images only 16 bits of each word are ("packs").
For "little room", a second process takes GPU memory until the half of the program's size is free, too little for a
copy on the GPU.
"""

import contextlib

from harness import processes, subjects, ways

# The last two: resident with little room, and bare.
WAYS = ("resident", "driver", "little", "bare")
TITLE = "a. Freeze of a CUDA program"
COLUMNS = ways.COLUMNS
LEGEND = f"""{ways.LEGEND} (packs): only 16 bits of each word are used, so that two images fit on the disk.
little room: another process has taken GPU memory until half of the program's size was free."""
# Number of images on the disk at a time, and its other uses.
IMAGES, DISK_SPARE_GIB = 2.2, 4
# Smaller programs do not justify the time of another row.
CRAMPED_GIB_MIN = 64
# Pause after a step: an uninterrupted run, which has none, must be much faster.
PACE_MS_MIN, PACE_MS_PER_GIB = 100, 4
# Bare and by the driver, larger programs take minutes per round, so there are fewer rounds.
FULL_ROUNDS_GIB = 16


def run(context, section):
    for gib in context.options.sizes:
        size(context, section, gib)


def size(context, section, gib):
    """Measures all ways for one size."""
    narrow = ways.free_gib(context.work) < gib * IMAGES + DISK_SPARE_GIB
    subject = subjects.counter(context, gib, narrow)
    found = []
    for measured in measure(context, subject):
        found.append(measured)
        print(f"    {subject.name}: {measured.way}: {ways.brief(measured)}", flush=True)
    ways.compare(context, found, subject.name, lambda steps: subject.words(steps, 0))
    for measured in found:
        ways.expect_shadow(context, measured, subject.gib)
        section.row(*measured.cells())
        context.judge(measured.result)


def measure(context, subject):
    """Measures the most important way first, in case the time does not suffice."""
    pace = max(PACE_MS_MIN, int(PACE_MS_PER_GIB * subject.gib))
    words = subject.endless(pace)
    wanted, rounds = context.options.ways, context.options.rounds
    fewer = max(1, int(rounds * min(1, FULL_ROUNDS_GIB / subject.gib)))
    for memory in (memory for memory in ("resident", "driver") if memory in wanted):
        times = rounds if memory == "resident" else fewer
        yield ways.supervised_way(context, subject.name, memory, words, memory, times)
    if "little" in wanted and subject.gib >= CRAMPED_GIB_MIN and context.tools.device == "cuda":
        way = "resident, little room"
        with crowded(context, subject.gib) as fill:
            yield ways.supervised_way(
                context, subject.name, way, words, "resident", rounds, after_start=fill
            )
    if "bare" in wanted:
        yield ways.bare_way(context, subject.name, words, subject.gib, fewer)


@contextlib.contextmanager
def crowded(context, gib):
    """Returns a function that lets another process occupy GPU memory, which ends with the context."""
    program = subjects.build(context, subjects.HOG, "hog")
    hogs = []

    def fill(_session):
        hog = processes.Program([program, gib / 2], context.folder("hog", gib), context.variables())
        hogs.append(hog)
        context.budget.until(hog.lines, "a full GPU", hog)

    try:
        yield fill
    finally:
        for hog in hogs:
            hog.kill()
