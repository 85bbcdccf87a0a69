"""Part d: a job whose cgroup has less host memory than the job has GPU memory.

The driver's own way needs a copy of all GPU memory in the job's host memory, so it cannot do that. In one run the
job alone is in the group (a launcher moves itself there and becomes the job), in the other ckpt-run and all that
it starts, as in a container.
"""

from harness import cgroup, subjects, ways

TITLE = "d. A limit of host memory below the GPU memory"
LEGEND = """Under ckpt-run with `cuda.memory = "resident"`, in a cgroup. who: what was in it from the start. peak: of
the group's memory, page cache included; OOM: processes that the kernel killed in it. freeze: median (least-most); back: from a
SIGKILL until the program has computed a step again; seconds. after: where the restored job is."""
COLUMNS = (
    ("program", 16),
    ("who", 10),
    ("limit GiB", 9),
    ("peak GiB", 8),
    ("OOM", 4),
    ("snapshots", 9),
    ("freeze", 18),
    ("back", 6),
    ("after", 10),
    ("result", 0),
)
GIB, LIMIT_GIB = 8, 4
ROUNDS, PACE_MS = 2, 100
# Time of a run of this part, start and reference included.
SECONDS_MIN = 60


def run(context, section):
    subject = subjects.counter(context, GIB)
    for who in ("the job", "all"):
        if context.budget.left() < SECONDS_MIN:
            section.remark(f"{who}: no time left")
            break
        limited(context, section, subject, who)


def limited(context, section, subject, who):
    """Runs with `who` in the group."""
    group = cgroup.Group(LIMIT_GIB << 30)
    words, inside, after = subject.endless(PACE_MS), group.launcher(), []
    job, own = ((*inside, *words), ()) if who == "the job" else (words, inside)
    try:
        measured = ways.supervised_way(
            context,
            subject.name,
            f"limited {who}",
            job,
            "resident",
            ROUNDS,
            launcher=own,
            at_end=lambda session: after.append(place(group, session.run.job())),
        )
        peak, kills = group.peak_bytes(), group.oom_kills()
    finally:
        gone = group.remove()
    ways.compare(context, [measured], f"reference {who}", lambda steps: subject.words(steps, 0))
    cells = dict(zip([name for name, _ in ways.COLUMNS], measured.cells()))
    section.row(
        subject.name,
        who,
        LIMIT_GIB,
        "-" if peak is None else f"{peak / 2**30:.1f}",
        kills,
        *(cells[name] for name in ("rounds", "freeze", "back")),
        after[0] if after else "-",
        cells["result"],
    )
    if not gone:
        section.remark(f"{who}: the cgroup {group.path} could not be removed")
    context.judge(measured.result)


def place(group, job):
    return "inside" if set(job) <= set(group.pids()) else "outside"
