"""Write the claims as one HTML page that needs no network: the course's hand-out."""

from __future__ import annotations

import base64
import inspect
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from html import escape
from itertools import groupby
from pathlib import Path

import jaxdist
from jaxdist.lab.claim import LABELS, Check
from jaxdist.lab.claims import Report, checks
from jaxdist.output.pictures import BLUE, GREY, RED

STYLE = f"""
:root {{ color-scheme: light; }}
body {{ font-family: system-ui, sans-serif; line-height: 1.45; }}
body {{ max-width: 62rem; margin: 1.5rem auto; padding: 0 1rem; }}
h2 {{ margin-top: 2.5rem; border-bottom: 2px solid {GREY}; }}
nav ul {{ list-style: none; padding: 0; margin: 0.2rem 0 0.8rem; }}
nav li {{ display: inline-block; margin: 0 0.9rem 0.2rem 0; }}
article {{ border: 1px solid #ccc; border-radius: 6px; padding: 0.2rem 1rem 0.8rem; margin: 1rem 0; }}
article.wrong {{ border-left: 5px solid {RED}; }}
article h3 {{ margin: 0.6rem 0 0.2rem; font-size: 1.05rem; overflow-wrap: anywhere; }}
article .sentence {{ font-size: 1.05rem; margin: 0.3rem 0 0.6rem; }}
dl {{ display: grid; grid-template-columns: 9rem 1fr; gap: 0.15rem 0.8rem; margin: 0.4rem 0; }}
dt {{ color: #555; }} dd {{ margin: 0; overflow-wrap: anywhere; }}
.figure {{ font-size: 1.15rem; font-weight: 600; }}
pre {{ background: #f4f4f4; padding: 0.6rem; overflow-x: auto; font-size: 0.8rem; }}
.up {{ font-size: 0.8rem; font-weight: normal; float: right; }}
a:focus-visible, summary:focus-visible {{ outline: 3px solid {BLUE}; outline-offset: 2px; }}
article:target {{ box-shadow: 0 0 0 3px {BLUE}; }}
img {{ max-width: 100%; height: auto; }}
.label {{ border-radius: 4px; padding: 0.05rem 0.4rem; font-size: 0.8rem; color: #fff; background: #555; }}
.label.measured {{ background: #00694b; }} .label.counted {{ background: {BLUE}; }}
.label.predicted {{ background: #8a5a00; }}
.passed {{ color: #00694b; }} .FAILED {{ color: #b30000; font-weight: bold; }} .not {{ color: #8a5a00; }}
@media screen and (max-width: 40rem) {{
  dl {{ grid-template-columns: 1fr; }} dt {{ margin-top: 0.3rem; }}
  .picture {{ overflow-x: auto; }} .picture img {{ max-width: none; width: 40rem; }}
}}
@media print {{
  body {{ max-width: none; font-size: 10pt; }} article {{ break-inside: avoid; }} details {{ display: none; }}
  pre {{ white-space: pre-wrap; }} img {{ max-height: 9cm; }} .up {{ display: none; }}
  a {{ color: inherit; text-decoration: none; }}
}}
"""


DOCUMENTS = {
    "000": "training on many GPUs: collectives, networks, ZeRO, FSDP",
    "001": "the training scripts: data parallel, snapshots, torchrun, Slurm",
    "002": "data, pipeline and tensor parallelism; parameter servers; slow networks",
    "003": "large models: sizes, GPipe, 3D layouts, DeepSpeed",
    "004": "FSDP step by step",
}
"""Document of the lecture -> what it is about."""

SEVERAL = "said in several documents"
OURS = "not of the lecture"
"""Words in the notes of a claim that jaxdist has added."""


def page(reports: Sequence[Report]) -> str:
    """Return HTML with an index by document and topic, then a card for each claim, with pictures inlined."""
    known = checks()
    body = [
        "<h1>What the lecture claims, and whether it holds</h1>",
        f"<p>{escape(summary(reports))}. Every figure came about by jaxdist {jaxdist.__version__} while this page was "
        "made; what is expected stands in the claims' table alone.</p>",
        _labels(),
        _index(reports),
    ]
    # Claims can share a picture; it is shown with the first of them.
    shown: dict[str, str] = {}
    for topic, group in groupby(reports, key=lambda report: report.claim.topic):
        body.append(f'<h2 id="{_anchor(topic)}">{escape(topic)} <a class="up" href="#index">index</a></h2>')
        body += [_card(report, known.get(report.claim.id), shown) for report in group]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
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


def _labels() -> str:
    items = (f"<dt>{_badge(label)}</dt><dd>{escape(about)}</dd>" for label, about in LABELS.items())
    return f"<dl>{''.join(items)}</dl>"


def _badge(label: str) -> str:
    return f'<span class="label {label.split()[0]}">{label}</span>'


def _anchor(topic: str) -> str:
    return "topic-" + "".join(letter if letter.isalnum() else "-" for letter in topic)


def _index(reports: Sequence[Report]) -> str:
    """Return the claims by document of the lecture, and the same claims by topic."""
    documents: dict[str, list[Report]] = {}
    for report in reports:
        for document in report.claim.documents or [OURS if OURS in report.claim.notes else SEVERAL]:
            documents.setdefault(document, []).append(report)
    parts = ['<nav id="index">', "<h2>By document</h2>"]
    for document in sorted(documents, key=[*DOCUMENTS, SEVERAL, OURS].index):
        name = f"document {document}: {DOCUMENTS[document]}" if document in DOCUMENTS else document
        parts.append(f"<strong>{escape(name)}</strong>{_links(documents[document], status=False)}")
    parts.append("<h2>By topic</h2>")
    for topic, group in groupby(reports, key=lambda report: report.claim.topic):
        parts.append(f'<strong><a href="#{_anchor(topic)}">{escape(topic)}</a></strong>{_links(group, status=True)}')
    return "\n".join([*parts, "</nav>"])


def _links(reports: Iterable[Report], status: bool) -> str:
    items = []
    for report in reports:
        link = f'<a href="#{escape(report.claim.id)}">{escape(report.claim.id)}</a>'
        items.append(f"<li>{link} {_status(report)}</li>" if status else f"<li>{link}</li>")
    return f"<ul>{''.join(items)}</ul>"


def _status(report: Report) -> str:
    return f'<span class="{report.status}">{report.status}</span>'


def _card(report: Report, check: Check | None, shown: dict[str, str]) -> str:
    """Return the card of one claim; a picture that is shown already is linked to."""
    claim = report.claim
    rows = [("expected", escape(claim.wanted)), (claim.label, f'<span class="figure">{escape(report.value)}</span>')]
    if claim.corrects:
        rows.append(("notes", f"Correction: {escape(claim.notes)}."))
    elif claim.notes:
        rows.append(("notes", escape(claim.notes)))
    rows.append(("command", f"<code>{escape(claim.command)}</code>"))
    failing = _failing(report, check)
    if failing:
        rows.append(("fails if", failing))
    kind = ' class="wrong"' if claim.corrects else ""
    parts = [
        f'<article{kind} id="{escape(claim.id)}">',
        f"<h3>{escape(claim.id)} {_badge(claim.label)} {_status(report)}</h3>",
        f'<p class="sentence">{escape(claim.claim)}</p>',
        _picture(report, shown),
        "<dl>" + "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in rows) + "</dl>",
    ]
    if report.outcome is None:
        parts.append(f"<p>{escape(report.reason)}</p>")
    elif report.outcome.lines:
        lines = escape("\n".join(report.outcome.lines))
        parts.append(f"<pre>{lines}</pre>")
    if check is not None:
        parts.append(_code(check))
    return "\n".join([*filter(None, parts), "</article>"])


def _failing(report: Report, check: Check | None) -> str:
    """Return the mistakes of the system and the changed setting with which the claim fails."""
    told = [escape(mistake) for mistake in report.claim.mistakes]
    if check is not None:
        told += [f"the setting is {escape(name)} = {escape(_value(value))}" for name, value in check.control.items()]
    return "; ".join(told)


def _value(value: object) -> str:
    return getattr(value, "__name__", None) or str(value)


def _code(check: Check) -> str:
    """Return the function that a check calls: its place, and its text to open."""
    function = check.measure.func if isinstance(check.measure, partial) else check.measure
    lines, first = inspect.getsourcelines(function)
    place = Path(inspect.getsourcefile(function)).relative_to(Path(jaxdist.__file__).parents[1]).as_posix()
    where = f"<code>{place}</code>, line {first}: <code>{function.__name__}</code>"
    # What looks like the beginning of an address in code would be taken for one.
    text = escape("".join(lines)).replace("//", "/&#47;")
    return f"<details><summary>the code that measures it: {where}</summary><pre>{text}</pre></details>"


def _picture(report: Report, shown: dict[str, str]) -> str:
    """Draw the picture of a measurement; returns it as a PNG in base64, or a link to the claim that shows it."""
    if report.outcome is None or report.outcome.picture is None:
        return ""
    # Pictures are drawn to files, and inlined because the page is one file.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture.png"
        report.outcome.picture(path)
        picture = base64.b64encode(path.read_bytes()).decode()
    claim = report.claim
    first = shown.setdefault(picture, claim.id)
    if first != claim.id:
        return f'<p>Its picture stands with <a href="#{escape(first)}">{escape(first)}</a>.</p>'
    image = f'<img alt="{escape(claim.claim)}" src="data:image/png;base64,{picture}">'
    return f'<div class="picture" tabindex="0">{image}</div>'
