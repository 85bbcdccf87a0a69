"""The results as a picture: a row of panels per workload, a bar per peer."""

import statistics
from xml.sax.saxutils import escape

MIB = 1 << 20
PANELS = (
    ("freeze, s", "second", "freeze_seconds", 1, "{:.2f}"),
    ("first image durable, s", "first", "durable_seconds", 1, "{:.1f}"),
    ("second image durable, s", "second", "durable_seconds", 1, "{:.1f}"),
    ("second image adds, MiB", "second", "bytes_added", MIB, "{:.0f}"),
    ("restore, s", "restore", "restore_seconds", 1, "{:.2f}"),
)
OURS = "ckpt-run"
# Bars are cut at this multiple of the median, so that an outlier does not make all others invisible.
LONGEST_MEDIANS = 3
NAME_WIDTH, PANEL_WIDTH, BAR_WIDTH = 210, 170, 115
LINE, HEAD, GAP = 20, 46, 26
STYLE = (
    "text{font:12px sans-serif;fill:#222}.w{font-weight:bold;font-size:14px}.h{fill:#555}"
    ".o{font-weight:bold}rect.o{fill:#c2410c}rect.p{fill:#94a3b8}.cut{fill:white}"
)


def svg(results):
    """Returns the picture's text. A bar that does not fit is cut and marked."""
    parts, top = [], GAP
    for workload, peers in results.workloads.items():
        parts.append(text(10, top, workload, "w"))
        for row, peer in enumerate(peers):
            kind = "o" if peer == OURS else "p"
            parts.append(text(10, top + HEAD + row * LINE, peer, kind))
        for column, panel in enumerate(PANELS):
            left = NAME_WIDTH + column * PANEL_WIDTH
            parts += draw_panel(results, workload, panel, left, top)
        top += HEAD + len(peers) * LINE + GAP
    width = NAME_WIDTH + len(PANELS) * PANEL_WIDTH
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" '
        f'viewBox="0 0 {width} {top}"><style>{STYLE}</style>'
        f'<rect width="{width}" height="{top}" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def draw_panel(results, workload, panel, left, top):
    title, kind, name, unit, form = panel
    peers = results.workloads[workload]
    values = {peer: results.median(workload, peer, kind, name) for peer in peers}
    there = [value for value in values.values() if value is not None] or [1]
    longest = min(max(there), LONGEST_MEDIANS * statistics.median(there)) or 1
    parts = [text(left, top + LINE, title, "h")]
    for row, (peer, value) in enumerate(values.items()):
        line = top + HEAD + row * LINE
        style = "o" if peer == OURS else "p"
        if value is None:
            parts.append(text(left, line, "–", style))
            continue
        width = max(1, BAR_WIDTH * min(1, value / longest))
        parts.append(bar(left, line - 11, width, style))
        if value > longest:
            parts.append(bar(left + width - 12, line - 11, 3, "cut"))
        parts.append(text(left + width + 4, line, form.format(value / unit), style))
    return parts


def bar(x, y, width, style):
    return f'<rect class="{style}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="14"/>'


def text(x, y, words, style):
    return f'<text class="{style}" x="{x:.1f}" y="{y}">{escape(words)}</text>'
