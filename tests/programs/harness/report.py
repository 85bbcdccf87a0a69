"""The table of the results."""

import datetime
import pathlib
import platform
import subprocess
import sys

from . import rounds

RESULTS = pathlib.Path(__file__).resolve().parents[3] / "benches/results/programs.md"
VERDICTS = (rounds.EQUAL, rounds.REFUSED, rounds.WRONG)
NOTE_LENGTH_MAX = 200


def counts(found):
    """Rounds by verdict."""
    found = list(found)
    return {verdict: sum(one.verdict == verdict for one in found) for verdict in VERDICTS}


def first_line(*words):
    try:
        done = subprocess.run(
            [str(word) for word in words], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (done.stdout.strip().splitlines() or ["unknown"])[0].strip()


def criu_words(prefix):
    """How the CRIU of a prefix is started: through its own loader, where it has one."""
    libraries = prefix / "usr/lib" / f"{platform.machine()}-linux-gnu"
    loader = next(iter(sorted(libraries.glob("ld-linux-*.so.*"))), None)
    program = prefix / "usr/sbin/criu"
    return [loader, "--library-path", libraries, program] if loader else [program]


def criu_version(prefix):
    return first_line(*criu_words(prefix), "--version").removeprefix("Version: ")


def record(runner):
    """Writes the table as Markdown; returns the file."""
    options = runner.options
    line = f"tests/programs/run --rounds {options.rounds} --watch {options.watch} --seed {options.seed}"
    line += f" --kills {options.kills}" if options.kills else ""
    line += f" --programs {options.programs}" if options.programs else ""
    facts = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "kernel": platform.release(),
        "CRIU": criu_version(options.criu),
        "ckpt-run": first_line(options.bin, "--version").removeprefix("ckpt-run "),
        "Python": sys.version.split()[0],
    }
    text = [
        "# programs",
        "",
        f"`{line}`",
        "",
        *(f"- {name}: {value}" for name, value in facts.items()),
    ]
    text += ["", LEGEND]
    head = ["program"]
    for watch in options.watches:
        head += [f"{watch}: {word}" for word in ("rounds", *VERDICTS, "kills")]
    text += [row(head), row(["---"] * len(head))]
    notes = []
    for program in options.chosen:
        if program.name in runner.skipped:
            notes.append(f"- {program.name}: SKIPPED: {runner.skipped[program.name]}")
            continue
        text.append(row([program.name, *cells(program, runner)]))
        notes += [f"- {note}" for note in remarks(program, runner)]
    text += ["", *notes] if notes else []
    RESULTS.write_text("\n".join(text) + "\n", encoding="utf-8")
    return RESULTS


LEGEND = """\
Each round kills the job several times and compares output, names, contents and the program's own check with an
uninterrupted run. fanotify: ckpt-run watches the job's files, as by default. none: it scans folders (files.watch is
off) and does not know who changes a closed file. included: as none, and files.include names the whole working folder.
refused: ckpt-run names the files and does not continue the job.
"""


def row(values):
    return f"| {' | '.join(values)} |"


def cells(program, runner):
    for watch in runner.options.watches:
        played = runner.played.get((program.name, watch), [])
        yield str(len(played))
        yield from (str(count or "-") for count in counts(played).values())
        yield str(sum(found.kills for found in played))


def remarks(program, runner):
    """The reason of the first round that was refused and of the first that was wrong, in each way of watching."""
    for watch in runner.options.watches:
        played = runner.played.get((program.name, watch), [])
        for verdict in (rounds.REFUSED, rounds.WRONG):
            found = next((one for one in played if one.verdict == verdict and one.notes), None)
            if found:
                note = found.notes[-1].replace(f"{runner.work}/{program.name}/", "")
                note = note.removeprefix("ckpt-run: error: restore failed: ")[:NOTE_LENGTH_MAX]
                yield f"{program.name}, {watch}, {verdict}: {note}"
