"""Tables that are printed row by row, and kept as the sections of one Markdown file."""

import re

HEADING = re.compile(r"^## ", re.MULTILINE)


class Section:
    """A heading, a description of the measurement, a table, and remarks."""

    def __init__(self, title, legend, columns):
        """`columns` are (name, width when printed) pairs."""
        self.title, self.legend, self.columns = title, legend, columns
        self.rows, self.remarks = [], []

    def begin(self):
        names = [name for name, _ in self.columns]
        print(f"\n== {self.title}\n{self._line(names)}", flush=True)

    def row(self, *cells):
        self.rows.append([str(cell) for cell in cells])
        print(self._line(self.rows[-1]), flush=True)

    def remark(self, text):
        self.remarks.append(text)
        print(f"    {text}", flush=True)

    def _line(self, cells):
        widths = (width for _, width in self.columns)
        return "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths)).rstrip()

    def markdown(self, facts):
        names = [name for name, _ in self.columns]
        table = [names, ["---"] * len(names), *self.rows]
        lines = [f"## {self.title}", "", self.legend, "", *facts, ""]
        lines += [f"| {' | '.join(row)} |" for row in table]
        lines += ["", *(f"- {text}" for text in self.remarks)] if self.remarks else []
        return "\n".join(lines) + "\n"


def record(path, title, sections, facts):
    """Writes sections into the file; its other sections are not changed."""
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    kept = {text.partition("\n")[0]: f"## {text.strip()}\n" for text in HEADING.split(old)[1:]}
    kept |= {section.title: section.markdown(facts) for section in sections}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join([f"# {title}\n", *(kept[name] for name in sorted(kept))])
    path.write_text(text, encoding="utf-8")
