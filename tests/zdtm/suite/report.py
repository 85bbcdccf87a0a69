"""The table of the results."""

import collections
import datetime
import pathlib
import platform
import re

from harness import report as programs

from . import trial

RESULTS = pathlib.Path(__file__).resolve().parents[3] / "benches/results/zdtm.md"
BAD = (trial.WRONG, trial.HANGS, trial.NO_RESTORE)
KEPT = (trial.EQUAL, trial.REFUSED, *BAD, trial.NOT_STARTED)
REASON_LENGTH_MAX = 220

TEXT = """\
Each of CRIU's own tests starts as a job, is snapshotted, killed with all its processes and restored by the supervisor,
twice in a row, and is then told to check itself. equal: it passes. refused: a snapshot was refused with a message, and
the test passes afterwards. no restore: the image was taken, its restore failed with a message. WRONG: the test fails
after a restore or after a refusal, or is gone. hanging: a wait went beyond its limit. plain: one `criu dump` and `criu
restore` with the options that the test names. Tests for namespaces (flavours ns, uns) run without those.
"""


def bad(runner):
    """Returns the names of the tests that pass with plain CRIU and fail under ckpt-run."""
    for name, found in sorted(runner.found.items()):
        if found["plain"][0] != trial.FAILS and found.get("kept", ("",))[0] in BAD:
            yield name


def counts(runner):
    """(plain, under ckpt-run) → tests."""
    return collections.Counter(
        (found["plain"][0], found["kept"][0])
        for found in runner.found.values()
        if "kept" in found
    )


def summary(runner):
    found = counts(runner)
    text = []
    for way in (trial.PASSES, trial.FAILS):
        told = ", ".join(f"{found[way, kept]} {kept}" for kept in KEPT if found[way, kept])
        total = sum(found[way, kept] for kept in KEPT)
        text.append(f"plain CRIU {way}: {total} ({told})" if told else f"plain CRIU {way}: 0")
    left = sum("kept" not in one for one in runner.found.values())
    text.append(f"not started: {left}; skipped: {len(runner.skipped)}; {runner.seconds:.0f} s")
    return "\n".join(text)


def reason(found):
    """Returns a message without its variable parts."""
    text = re.sub(r"\(log: [^)]*\)", "", found[1])
    text = re.sub(r"^ckpt-run: (error|warn|info): ", "", text)
    text = re.sub(r"/[^ ]*/zdtm\.[^/ ]*/[^ ]*/", "…/", text)
    return re.sub(r"\s+", " ", text).strip()[:REASON_LENGTH_MAX]


def grouped(tests):
    """Returns tests by their reasons, without the numbers in them; the most frequent first."""
    groups = collections.defaultdict(list)
    for name, found in sorted(tests):
        groups[re.sub(r"(0x)?[0-9a-f]*\d[0-9a-f]*", "N", reason(found))].append((name, found))
    for members in sorted(groups.values(), key=len, reverse=True):
        names = ", ".join(name.rpartition("/")[2] for name, _ in members)
        yield f"- {reason(members[0][1]) or 'without a message'}: {names}"


def section(title, tests):
    lines = list(grouped(tests))
    return ["", f"## {title}", "", *lines] if lines else []


def record(runner):
    """Writes the results as Markdown; returns the file."""
    options = runner.options
    line = "tests/zdtm/run --criu-source …"
    line += f" --filter '{options.filter}'" if options.filter else ""
    facts = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "kernel": platform.release(),
        "CRIU": runner.criu.version,
        "tests of CRIU": runner.revision,
        "ckpt-run": programs.first_line(options.bin, "--version").removeprefix("ckpt-run "),
        "tests without the flag suid": "as another user" if runner.as_user else "as another user, by plain CRIU as root",
        "duration": f"{runner.seconds:.0f} s, {options.parallel} at a time",
    }
    text = ["# zdtm", "", f"`{line}`", "", *(f"- {name}: {fact}" for name, fact in facts.items())]
    text += ["", TEXT, programs.row(["plain CRIU", *KEPT, "all"])]
    text.append(programs.row(["---"] * (len(KEPT) + 2)))
    found = counts(runner)
    for way in (trial.PASSES, trial.FAILS):
        numbers = [found[way, kept] for kept in KEPT]
        text.append(programs.row([way, *(str(one or "-") for one in numbers), str(sum(numbers))]))
    for way in (trial.PASSES, trial.FAILS):
        for kept in (*BAD, trial.REFUSED):
            tests = [
                (name, one["kept"])
                for name, one in runner.found.items()
                if one["plain"][0] == way and one.get("kept", ("",))[0] == kept
            ]
            text += section(f"plain CRIU {way}, ckpt-run: {kept}", tests)
    plain = [(n, one["plain"]) for n, one in runner.found.items() if one["plain"][0] == trial.FAILS]
    text += section("plain CRIU fails: why", plain)
    left = [(name, one["plain"]) for name, one in runner.found.items() if "kept" not in one]
    text += section("not started", left)
    text += section("skipped", [(name, ("", why)) for name, why in runner.skipped.items()])
    RESULTS.write_text("\n".join(text) + "\n", encoding="utf-8")
    return RESULTS
