"""The claims as one HTML page that needs no network: the course's hand-out."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from jaxdist import __version__
from jaxdist.lab.claims import Told

STYLE = """
body { font-family: system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; line-height: 1.4; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th, td { border-bottom: 1px solid #ccc; padding: 0.3rem 0.5rem; text-align: left; vertical-align: top; }
pre { background: #f4f4f4; padding: 0.6rem; overflow-x: auto; font-size: 0.8rem; }
img { max-width: 100%; }
.passed { color: #00694b; } .FAILED { color: #b30000; font-weight: bold; } .not { color: #8a5a00; }
.wrong { border-left: 4px solid #D55E00; padding-left: 0.6rem; }
"""


def page(told: Sequence[Told]) -> str:
    """HTML with the claims as a table, then topic by topic with what was measured, and the pictures inlined."""
    sections, shown = groupby(told, key=lambda one: one.claim.topic), set[str]()
    body = [
        "<h1>What the lecture claims, computed and measured</h1>",
        f"<p>{escape(summary(told))}. Every number was computed or measured by jaxdist {__version__} while this page "
        "was made; what is expected stands in the claims' table alone.</p>",
        _table(told),
        *(
            part
            for topic, group in sections
            for part in (f"<h2>{escape(topic)}</h2>", *(_section(one, shown) for one in group))
        ),
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f"<title>The lecture's claims</title><style>{STYLE}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def summary(told: Sequence[Told]) -> str:
    """`34 of 40 claims passed, 6 not checked, 3 show where the lecture is wrong`."""
    count = lambda status: sum(one.status == status for one in told)
    more = [
        f"{count('FAILED')} failed" * bool(count("FAILED")),
        f"{count('not checked')} not checked" * bool(count("not checked")),
        f"{sum(one.passed and one.claim.corrects for one in told)} show where the lecture is wrong",
    ]
    return ", ".join([f"{count('passed')} of {len(told)} claims passed", *filter(None, more)])


def _table(told: Sequence[Told]) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("claim", "expected", "measured", "", "command"))
    return f"<table><tr>{head}</tr>\n" + "\n".join(map(_row, told)) + "\n</table>"


def _row(one: Told) -> str:
    claim = one.claim
    wrong = f"<br><em>The lecture is wrong: {escape(claim.notes)}.</em>" if claim.corrects else ""
    cells = [
        f'<a href="#{escape(claim.id)}">{escape(claim.claim)}</a>{wrong}',
        escape(claim.wanted),
        escape(one.value),
        f'<span class="{one.status}">{one.status}</span>',
        f"<code>{escape(claim.command)}</code>",
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _section(one: Told, shown: set[str]) -> str:
    """`shown` are the pictures so far: claims that share one have it once."""
    claim = one.claim
    kind = ' class="wrong"' if claim.corrects else ""
    parts = [f'<h3 id="{escape(claim.id)}">{escape(claim.id)} <span class="{one.status}">{one.status}</span></h3>']
    parts += [f"<pre{kind}>{escape(chr(10).join(one.lines()))}</pre>"]
    if one.outcome and one.outcome.picture and (picture := _picture(one)) not in shown:
        shown.add(picture)
        parts.append(f'<img alt="{escape(claim.claim)}" src="data:image/png;base64,{picture}">')
    return "\n".join(parts)


def _picture(one: Told) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        one.outcome.picture(path)
        return base64.b64encode(path.read_bytes()).decode()
