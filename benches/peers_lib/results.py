"""Measurements as data and as a table."""

import json
import statistics

MIB = 1 << 20
# Title of the column, the value for both images, the format.
COLUMNS = (
    ("freeze, s", "freeze_seconds", 1, "{:.2f}"),
    ("durable, s", "durable_seconds", 1, "{:.2f}"),
    ("bytes added, MiB", "bytes_added", MIB, "{:.0f}"),
    ("CPU, s", "cpu_seconds", 1, "{:.2f}"),
    ("peak memory, MiB", "peak_bytes", MIB, "{:.0f}"),
)


class Results:
    """All measured values, by workload and peer, in order of arrival."""

    def __init__(self, machine):
        self.machine = machine
        self.workloads = {}

    def peer(self, workload, peer):
        peers = self.workloads.setdefault(workload, {})
        return peers.setdefault(peer, {"first": [], "second": [], "restore": [], "errors": []})

    def add(self, workload, peer, kind, values):
        entry = self.peer(workload, peer)
        entry["errors" if kind == "error" else kind].append(values)

    def median(self, workload, peer, kind, name):
        """Returns the median of a value over the rounds; None without values."""
        values = [entry[name] for entry in self.workloads[workload][peer][kind]]
        return statistics.median(values) if values else None

    def json(self):
        medians = {
            workload: {peer: self.medians(workload, peer) for peer in peers}
            for workload, peers in self.workloads.items()
        }
        return json.dumps(
            {"machine": self.machine, "medians": medians, "rounds": self.workloads}, indent=1
        )

    def medians(self, workload, peer):
        entry = self.workloads[workload][peer]
        return {
            kind: {
                name: self.median(workload, peer, kind, name)
                for name, value in entry[kind][0].items()
                if isinstance(value, (int, float))
            }
            for kind in ("first", "second", "restore")
            if entry[kind]
        }

    def markdown(self):
        machine = "\n".join(f"- {name}: {value}" for name, value in self.machine.items())
        tables = "\n\n".join(self.table(workload) for workload in self.workloads)
        return (
            f"{machine}\n\nMedians over the rounds; first image / second image, some steps "
            f"later. In brackets: how many rounds, where not all.\n\n{tables}\n"
        )

    def table(self, workload):
        heads = ["peer", *(column[0] for column in COLUMNS), "restore, s"]
        lines = [f"### {workload}", "", "| " + " | ".join(heads) + " |"]
        lines.append("|---" + "|---:" * (len(heads) - 1) + "|")
        peers = self.workloads[workload]
        rounds = max(len(entry["first"]) for entry in peers.values())
        for peer, entry in peers.items():
            cells = [name_with_rounds(peer, len(entry["first"]), rounds)]
            for _, name, unit, form in COLUMNS:
                values = (self.median(workload, peer, kind, name) for kind in ("first", "second"))
                cells.append(" / ".join(told(value, unit, form) for value in values))
            restore = self.median(workload, peer, "restore", "restore_seconds")
            cells.append(told(restore, 1, "{:.2f}"))
            lines.append("| " + " | ".join(cells) + " |")
        for peer, entry in peers.items():
            for error in entry["errors"][:1]:
                lines += ["", f"{peer}: `{first_lines(error)}`"]
        return "\n".join(lines)


def name_with_rounds(peer, rounds, all_rounds):
    return peer if rounds == all_rounds else f"{peer} ({rounds})"


def told(value, unit, form):
    return "–" if value is None else form.format(value / unit)


def first_lines(error):
    return " ".join(error.replace("`", "'").split())[:300]
