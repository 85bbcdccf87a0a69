"""Part g: images of memory of which little changes, as of a model that is served.

The first image of a run has all memory, later ones what has changed. The first program writes one in a hundred of its blocks
of 256 KiB in each step, spread over all memory. The second one trains adapters beside frozen weights.
"""

import statistics

from harness import sessions, subjects, supervised, ways

TITLE = "g. Little changes"
COLUMNS = (
    ("program", 16),
    ("images", 8),
    ("rounds", 6),
    ("freeze", 8),
    ("durable", 8),
    ("stored", 10),
    ("cpu", 6),
    ("result", 20),
    ("phases", 0),
)
LEGEND = """first: the image after the start, which copies all memory; later: those after it, which copy the blocks whose
fingerprints differ. Medians; seconds. durable: from the start of the snapshot until it is on the disk. stored: new bytes
on the disk, the most. cpu: processor time of ckpt-run's processes for a snapshot. result: every line of the run, snapshots
and a crash included, against an uninterrupted one."""
PACE_MS = 100
# Lines after the last event that certainly contain a checksum of all memory.
LINES_TO_CHECKSUM = 102


def run(context, section):
    for subject in (
        subjects.served(context, context.options.served_gib),
        subjects.lora(context, context.options.lora_gib),
    ):
        measure(context, section, subject)


def measure(context, section, subject):
    rounds = context.options.rounds
    measured = ways.Measured(subject.name, "resident")
    folder = context.folder(subject.name, "resident")
    settings = supervised.Settings(keep=3, memory="resident", backoff="0s")
    costs = []
    with (
        measured.guard(),
        sessions.Session(context, folder, subject.endless(PACE_MS), settings) as session,
    ):
        measured.host, measured.stdout = session.meter, session.run.stdout
        session.computes()
        for _ in range(rounds + 1):
            before = session.meter.cpu_seconds()
            measured.freezes.append(session.snapshot())
            costs.append(session.meter.cpu_seconds() - before)
        measured.backs.append(session.crash())
        session.computes(LINES_TO_CHECKSUM)
    ways.compare(context, [measured], subject.name, lambda steps: subject.words(steps, 0))
    for name, these in (("first", slice(0, 1)), ("later", slice(1, None))):
        freezes = measured.freezes[these]
        if not freezes:
            continue
        middle = statistics.median
        section.row(
            subject.name,
            name,
            len(freezes),
            f"{middle(freeze.seconds for freeze in freezes):.2f}",
            f"{middle(freeze.durable for freeze in freezes):.2f}",
            max((freeze.stored for freeze in freezes), key=size),
            f"{middle(costs[these]):.1f}",
            measured.result,
            phases(freezes),
        )
    context.judge(measured.result)


def phases(freezes):
    """Returns the median of each phase."""
    names = dict.fromkeys(name for freeze in freezes for name in freeze.phases)
    taken = ((name, [freeze.phases.get(name, 0) for freeze in freezes]) for name in names)
    return ", ".join(f"{name} {statistics.median(seconds):.2f}" for name, seconds in taken)


def size(text):
    """Returns `1.5 GiB` as a number of bytes."""
    number, _, unit = text.partition(" ")
    return float(number) * 1024 ** ("B", "KiB", "MiB", "GiB").index(unit)
