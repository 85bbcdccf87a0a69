"""Ways to freeze a program, measured one after the other: bare, and ckpt-run with GPU memory on the host or the GPU."""

import contextlib
import dataclasses
import json
import pathlib
import shutil
import statistics
import subprocess

from . import meter, processes, sessions, supervised
from .budget import OutOfTime
from .trials import Failure

BARE = pathlib.Path(__file__).resolve().parents[3] / "benches/bare_freeze.py"
# A bare round: the driver moves a GiB each way, CRIU writes it, and the program prints its next lines.
BARE_SECONDS_PER_GIB, BARE_SECONDS = 1.2, 4
# Host memory beyond the copies of the GPU's.
SPARE_GIB = 6
# Left for ending programs, and for the uninterrupted run, before another round is started.
END_SECONDS = 30
# A way with less time left than this is not started: its program starts, too.
START_SECONDS = 45

COLUMNS = (
    ("program", 16),
    ("way", 20),
    ("rounds", 6),
    ("freeze", 18),
    ("durable", 8),
    ("stored", 10),
    ("host GiB", 8),
    ("own MiB", 8),
    ("back", 6),
    ("restore", 7),
    ("result", 24),
    ("phases", 0),
)
LEGEND = """bare: driver and CRIU with nothing around them, the image on a tmpfs (`benches/bare_freeze.py`); driver,
resident: ckpt-run with that `cuda.memory`. Medians; seconds. freeze: the program stands still, in brackets the least
and the most; phases: of the freeze and around it, and of the restore. durable: from the start of the snapshot until
it is on the disk. stored: the last image's bytes on the disk. host: by how much the machine's available memory sank
at the most, own: resident memory of all processes of ckpt-run's at its most. back: from a SIGKILL until the program
has computed a step again, the image in the page cache, no pause before the restart; restore: ckpt-run's own figure
for it. result: every line of the run, snapshots and crashes included, against an uninterrupted one."""


@dataclasses.dataclass
class Measured:
    """A row of the table."""

    program: str
    way: str
    freezes: list = dataclasses.field(default_factory=list)
    backs: list = dataclasses.field(default_factory=list)
    host: meter.Meter | None = None
    stdout: pathlib.Path | None = None
    # The reason for an early end, or for not starting.
    why: str = ""
    result: str = ""

    def cells(self):
        def mid(numbers):
            numbers = [number for number in numbers if number is not None]
            return f"{statistics.median(numbers):.2f}" if numbers else "-"

        times = [freeze.seconds for freeze in self.freezes]
        span = f" ({min(times):.2f}-{max(times):.2f})" if len(times) > 1 else ""

        def phases(events):
            names = dict.fromkeys(name for event in events for name in event.phases)
            return ", ".join(f"{name} {mid(e.phases.get(name) for e in events)}" for name in names)

        told = filter(None, (phases(self.freezes), phases(self.backs)))
        own = self.host.own_mib if self.host else 0
        return (
            self.program,
            self.way,
            len(times),
            mid(times) + span,
            mid(freeze.durable for freeze in self.freezes),
            (self.freezes[-1].stored if self.freezes else "") or "-",
            f"{self.host.host_gib:.1f}" if self.host else "-",
            f"{own:.0f}" if own else "-",
            mid(back.computing for back in self.backs),
            mid(back.took for back in self.backs),
            self.result or "-",
            "; back: ".join(told),
        )

    @contextlib.contextmanager
    def guard(self):
        """An error ends only this row, which keeps its earlier measurements."""
        try:
            yield
        except OutOfTime as late:
            self.result = str(late)
        except (Failure, OSError, ValueError, subprocess.SubprocessError) as error:
            self.why = str(error) or type(error).__name__
            self.result = f"FAILED: {self.why}"


def nothing(_session):
    """Does nothing."""


def expect_shadow(context, measured, gib):
    """Memory that fits the GPU twice must not pass through host memory of that size."""
    own = measured.host.own_mib if measured.host else 0
    whole = measured.way == "resident" and context.tools.device == "cuda"
    if whole and own > gib * 1024 / 2 and not measured.result.startswith("FAILED"):
        measured.result = f"FAILED: no shadow on the GPU, {own:.0f} MiB of host memory"


def brief(measured):
    """Returns a row as text, before the comparison."""
    cells = dict(zip([name for name, _ in COLUMNS], measured.cells()))
    told = (f"{name} {cells[name]}" for name in ("rounds", "freeze", "durable", "back"))
    return f"{' '.join(told)} {measured.result}".rstrip()


def again(context, times):
    """Returns true if there is time for another round, judged by the longest so far."""
    return context.budget.left() > max(times, default=0) * 2 + END_SECONDS


def supervised_way(
    context,
    program,
    way,
    words,
    memory,
    rounds,
    crashes=1,
    launcher=(),
    after_start=nothing,
    at_end=nothing,
):
    """Takes `rounds` snapshots and then `crashes` under ckpt-run; the functions receive the session."""
    measured = Measured(program, way)
    if context.budget.left() < START_SECONDS:
        measured.result = "no time left"
        return measured
    folder = context.folder(program, way)
    settings = supervised.Settings(keep=1, memory=memory, backoff="0s")
    with (
        measured.guard(),
        sessions.Session(context, folder, words, settings, launcher=launcher) as session,
    ):
        measured.host, measured.stdout = session.meter, session.run.stdout
        session.computes()
        after_start(session)
        while len(measured.freezes) < rounds and again(
            context, [freeze.durable or freeze.seconds for freeze in measured.freezes]
        ):
            measured.freezes.append(session.snapshot())
        while len(measured.backs) < crashes and again(
            context, [back.computing for back in measured.backs]
        ):
            measured.backs.append(session.crash())
        at_end(session)
    return measured


def bare_way(context, program, words, gib, rounds):
    """Uses driver and CRIU alone; the image is on a tmpfs if host memory has room beside the driver's copy."""
    free = meter.available_kib() / meter.KIB_PER_GIB
    way = "bare" if free > 2 * gib + SPARE_GIB else "bare, thrown away"
    measured = Measured(program, way)
    possible = int(context.budget.left() / (gib * BARE_SECONDS_PER_GIB + BARE_SECONDS)) - 1
    rounds = min(rounds, possible)
    if free < gib + SPARE_GIB:
        measured.why = f"needs {gib + SPARE_GIB:.0f} GiB of host memory, {free:.0f} are free"
    elif rounds < 1 or context.budget.left() < START_SECONDS:
        measured.why = "no time left"
    if measured.why:
        measured.result = f"n/a: {measured.why}"
        return measured
    folder = context.folder(program, "bare")
    with measured.guard(), contextlib.ExitStack() as stack:
        flags = ["--rounds", str(rounds), *(["--cpu"] if context.tools.device == "cpu" else [])]
        if way == "bare":
            flags += ["--images", stack.enter_context(tmpfs(folder / "tmpfs", gib + SPARE_GIB))]
        measured.host = meter.Meter()
        stack.callback(measured.host.end)
        run = run_bare(context, folder, [*flags, "--json", "--", *words], stack)
        for entry in json.loads(run.stdout.read_text())["rounds"]:
            total = entry.pop("total")
            stored = f"{entry.pop('bytes') / 2**30:.1f} GiB"
            measured.freezes.append(sessions.Freeze(total, entry, stored=stored))
    return measured


def run_bare(context, folder, arguments, stack):
    command = [context.tools.python, BARE, "--criu", context.tools.criu, *arguments]
    run = processes.Program(command, folder, context.variables())
    stack.callback(run.end)
    context.budget.until(lambda: run.code() is not None, "the end of the bare freezes")
    if run.code() != 0:
        said = run.stderr.read_text(errors="replace").strip().splitlines()
        raise Failure(f"bare: {' '.join(said[:3]) or run.code()}")
    return run


@contextlib.contextmanager
def tmpfs(folder, gib):
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={gib:.0f}g", "none", str(folder)]
    subprocess.run(mount, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def compare(context, all_measured, name, words_of):
    """Runs the program uninterrupted, as far as the longest of them, and compares them all."""
    compared = [measured for measured in all_measured if measured.stdout and not measured.why]
    steps = max((sessions.steps_done(measured.stdout) for measured in compared), default=0)
    if not steps:
        return
    run = processes.Program(
        words_of(steps),
        context.folder(name, "uninterrupted"),
        context.variables(),
    )
    try:
        context.budget.until(lambda: run.code() is not None, "the uninterrupted run")
        if run.code() != 0:
            raise Failure(f"the uninterrupted run ended with {run.code()}")
        for measured in compared:
            verdict = sessions.verdict(run.stdout, measured.stdout)
            measured.result = ", ".join(filter(None, (verdict, measured.result)))
    except Failure as failure:
        for measured in compared:
            measured.result = measured.result or f"not compared: {failure}"
    finally:
        run.end()


def free_gib(folder):
    """Returns the free disk space."""
    return shutil.disk_usage(folder).free / 2**30
