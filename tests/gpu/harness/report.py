"""The table: a line for each job when it ends, and the same as Markdown for the records."""

import pathlib
import statistics

from . import supervised

COLUMNS = (
    ("job", 16),
    ("images", 6),
    ("refused", 7),
    ("crashes", 7),
    ("restores", 8),
    ("freeze", 6),
    ("lock", 6),
    ("suspend", 7),
    ("dump", 6),
    ("resume", 6),
    ("back", 5),
    ("result", 0),
)
LEGEND = (
    "freeze and its phases: medians in seconds; back: from the kill until ckpt-run has restored, the "
    "pause before a restart included, median in seconds. refused: snapshots that were not taken."
)
TAIL_LINES = 6
LINE_WIDTH_MAX = 160
RESULTS = pathlib.Path(__file__).resolve().parents[3] / "benches/results"


def median(numbers):
    numbers = list(numbers)
    return f"{statistics.median(numbers):.2f}" if numbers else "-"


def cells(outcome):
    def phase(name):
        return median(snapshot[name] for snapshot in outcome.snapshots if name in snapshot)

    return (
        outcome.name,
        str(len(outcome.snapshots)),
        str(len(outcome.failures)),
        str(outcome.crashes),
        str(outcome.restores),
        median(map(supervised.freeze, outcome.snapshots)),
        *(phase(name) for name in ("lock", "suspend", "dump", "resume")),
        median(outcome.back),
        f"{outcome.verdict} ({outcome.seconds:.0f} s)",
    )


def line(values):
    return "  ".join(f"{value:<{width}}" for value, (_, width) in zip(values, COLUMNS)).rstrip()


def header():
    return line([name for name, _ in COLUMNS])


def notes(outcome):
    found = list(outcome.notes)
    if outcome.called_off:
        found.append(f"{outcome.called_off} of the crashes fell into a snapshot")
    if outcome.failures and not outcome.good:
        found.append(outcome.failures[-1])
    # Logs are deleted after the run.
    return [note.partition(" (log: ")[0] for note in found]


def tails(trial):
    """Returns the ends of a failed trial's logs: ckpt-run's lines, and the job's output."""
    # Runs that continued others share a log.
    for program in {program.folder: program for program in trial.programs}.values():
        lines = program.stderr.read_text(errors="replace").splitlines()
        own = [text for text in lines if text.startswith("ckpt-run:")]
        others = [text for text in lines if not text.startswith("ckpt-run:")]
        # Repeated refusals are left out.
        own = [text for text, before in zip(own, [None, *own]) if not alike(text, before)]
        shown = [*own[-TAIL_LINES:], *others[-TAIL_LINES:]]
        # A progress bar is one long line.
        shown = [text.rpartition("\r")[2][:LINE_WIDTH_MAX] for text in shown]
        if shown:
            yield f"{program.folder.name}:"
            yield from (f"  {text}" for text in shown)


def alike(text, before):
    """Returns true if two lines are equal except for the names of logs."""
    return before is not None and text.partition(" (log: ")[0] == before.partition(" (log: ")[0]


def record(path, title, line_used, facts, outcomes, skipped):
    """Writes the table as Markdown."""
    rows = [[name for name, _ in COLUMNS], ["---"] * len(COLUMNS), *map(cells, outcomes)]
    text = [f"# {title}", "", f"`{line_used}`", ""]
    text += [f"- {name}: {value}" for name, value in facts]
    text += ["", LEGEND, "", *(f"| {' | '.join(row)} |" for row in rows)]
    remarks = [f"- {found.name}: {note}" for found in outcomes for note in notes(found)]
    remarks += [f"- {name}: {why}" for name, why in skipped.items()]
    text += ["", *remarks] if remarks else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
