"""Write the claims as one HTML page that needs no network: the course's hand-out."""

from __future__ import annotations

import base64
import tempfile
from collections import Counter
from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from jaxdist import __version__
from jaxdist.lab.claims import Report

STYLE = """
body { font-family: system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; line-height: 1.4; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th, td { border-bottom: 1px solid #ccc; padding: 0.3rem 0.5rem; text-align: left; vertical-align: top; }
pre { background: #f4f4f4; padding: 0.6rem; overflow-x: auto; font-size: 0.8rem; }
img { max-width: 100%; }
.passed { color: #00694b; } .FAILED { color: #b30000; font-weight: bold; } .not { color: #8a5a00; }
.wrong { border-left: 4px solid #D55E00; padding-left: 0.6rem; }
"""


def page(reports: Sequence[Report]) -> str:
    """Return HTML with a table of all claims, then the measurements topic by topic, with pictures inlined."""
    body = [
        "<h1>What the lecture claims, computed and measured</h1>",
        f"<p>{escape(summary(reports))}. Every number was computed or measured by jaxdist {__version__} while this "
        "page was made; what is expected stands in the claims' table alone.</p>",
        _table(reports),
    ]
    # Claims can share a picture; it is shown with the first of them.
    shown: set[str] = set()
    for topic, group in groupby(reports, key=lambda report: report.claim.topic):
        body.append(f"<h2>{escape(topic)}</h2>")
        body += [_section(report, shown) for report in group]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f"<title>The lecture's claims</title><style>{STYLE}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def summary(reports: Sequence[Report]) -> str:
    """Return `34 of 40 claims passed, 6 not checked, 3 show where the lecture is wrong`."""
    statuses = Counter(report.status for report in reports)
    corrections = sum(report.passed and report.claim.corrects for report in reports)
    parts = [f"{statuses['passed']} of {len(reports)} claims passed"]
    if statuses["FAILED"]:
        parts.append(f"{statuses['FAILED']} failed")
    if statuses["not checked"]:
        parts.append(f"{statuses['not checked']} not checked")
    parts.append(f"{corrections} show where the lecture is wrong")
    return ", ".join(parts)


def _table(reports: Sequence[Report]) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("claim", "expected", "measured", "", "command"))
    return f"<table><tr>{head}</tr>\n" + "\n".join(map(_row, reports)) + "\n</table>"


def _row(report: Report) -> str:
    claim = report.claim
    wrong = ""
    if claim.corrects:
        wrong = f"<br><em>Correction: {escape(claim.notes)}.</em>"
    cells = [
        f'<a href="#{escape(claim.id)}">{escape(claim.claim)}</a>{wrong}',
        escape(claim.wanted),
        escape(report.value),
        f'<span class="{report.status}">{report.status}</span>',
        f"<code>{escape(claim.command)}</code>",
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _section(report: Report, shown: set[str]) -> str:
    """Return the measurement of one claim; its picture is added to `shown`, and left out if it is there already."""
    claim = report.claim
    text = escape("\n".join(report.lines()))
    kind = ' class="wrong"' if claim.corrects else ""
    status = f'<span class="{report.status}">{report.status}</span>'
    parts = [
        f'<h3 id="{escape(claim.id)}">{escape(claim.id)} {status}</h3>',
        f"<pre{kind}>{text}</pre>",
    ]
    if report.outcome is not None and report.outcome.picture is not None:
        picture = _picture(report)
        if picture not in shown:
            shown.add(picture)
            parts.append(f'<img alt="{escape(claim.claim)}" src="data:image/png;base64,{picture}">')
    return "\n".join(parts)


def _picture(report: Report) -> str:
    """Draw the picture of a measurement; returns the PNG in base64."""
    # Pictures are drawn to files, and inlined because the page is one file.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        report.outcome.picture(path)
        return base64.b64encode(path.read_bytes()).decode()
