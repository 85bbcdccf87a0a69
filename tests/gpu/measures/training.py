"""Part b: a PyTorch training of many GiB: freeze, restore, and the agent's effect on the speed of its steps.

The step rate is taken under ckpt-run without snapshots, with the agent loaded (resident) and without (driver), in
turns, each time in a new process: the median step of each.
"""

import statistics

from harness import catalog, sessions, subjects, supervised, ways
from harness.trials import Failure

TITLE = "b. PyTorch training"
COLUMNS = ways.COLUMNS
LEGEND = f"""{ways.LEGEND} The uninterrupted run is compared in every loss, and in checksums of all weights and
optimizer state every 50 steps."""
PACE_MS = 50
CRASHES_MAX = 2
# Enough for a median; each also starts a new process.
RATE_STEPS, RATE_ROUNDS_MAX = 200, 3
# Lines after the last event that certainly contain a checksum of the state.
LINES_TO_CHECKSUM = 52
# Time of a round of the step rate on the slowest machine, start included.
RATE_SECONDS = 45


def run(context, section):
    subject = subjects.big(context, context.options.training_gib)
    rounds = context.options.rounds
    words = subject.endless(PACE_MS)
    found = []
    wanted = context.options.ways
    for memory in (memory for memory in ("resident", "driver") if memory in wanted):
        measured = ways.supervised_way(
            context,
            subject.name,
            memory,
            words,
            memory,
            rounds,
            min(rounds, CRASHES_MAX),
            at_end=lambda session: session.computes(LINES_TO_CHECKSUM),
        )
        found.append(measured)
        print(f"    {memory}: {ways.brief(measured)}", flush=True)
    ways.compare(context, found, subject.name, lambda steps: subject.words(steps, 0))
    for measured in found:
        ways.expect_shadow(context, measured, subject.gib)
        section.row(*measured.cells())
        context.judge(measured.result)
    try:
        rates(context, section, subject)
    except Failure as failure:
        section.remark(f"median step: {failure}")
    if "bare" in wanted:
        measured = ways.bare_way(context, subject.name, words, subject.gib, rounds)
        section.row(*measured.cells())
        context.judge(measured.result)


def rates(context, section, subject):
    """A remark on the median step with the agent and without."""
    times = {"driver": [], "resident": []}
    for number in range(min(context.options.rounds, RATE_ROUNDS_MAX)):
        for memory, medians in times.items():
            if context.budget.left() < RATE_SECONDS:
                break
            medians.append(rate(context, subject, memory, number))
    if not all(times.values()):
        section.remark("median step: no time left")
        return
    said = (
        f"{memory} {statistics.median(medians):.2f} ms ({', '.join(f'{m:.2f}' for m in medians)})"
        for memory, medians in times.items()
    )
    section.remark(f"median step of {RATE_STEPS}, rounds in turns: {'; '.join(said)}")


def rate(context, subject, memory, number):
    folder = context.folder(subject.name, f"rate {memory} {number}")
    words = [*subject.words(RATE_STEPS, 0), "--times", catalog.TIMES]
    settings = supervised.Settings(keep=1, memory=memory)
    with sessions.Session(context, folder, words, settings) as session:
        run = session.run
        context.budget.until(lambda: run.code() is not None, "the end of a step rate")
        if run.code() != 0:
            raise Failure(f"the run for the step rate ended with {run.code()}")
        lines = (folder / catalog.TIMES).read_text().split()
    # The first steps allocate.
    return statistics.median(float(line) for line in lines[len(lines) // 10 :])
