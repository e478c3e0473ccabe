"""What --help prints: usage, the command's own options, then every knob by section."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from jaxdist.config import Config
from jaxdist.request.knobs import KNOBS, SECTIONS, kind, option, shown, within
from jaxdist.request.reading import DEFAULT, SHIPPED

if TYPE_CHECKING:
    from jaxdist.request.commandline import Extra

LEFT = 34
"""Columns for an option and its type."""

ARGUMENTS = {
    "CONFIG": f"a TOML file, or one of {', '.join(SHIPPED)} (default {DEFAULT}); options win over what it sets",
    "RUN": "the folder of a run, such as runs/gpt_tiny; options win over its config.toml",
}


def help_text(
    command: str, description: str, positional: str | None, extras: Sequence[Extra], knobs: Collection[str] | None
) -> str:
    """The help of `command`, as wide as the terminal."""
    width = min(max(shutil.get_terminal_size().columns, 72), 120)
    first = {"CONFIG": " [CONFIG]", "RUN": " RUN", None: ""}[positional]
    more = "[--section.knob value ...]" if positional else " ".join(f"[{option(extra.name)}]" for extra in extras)
    lines = [f"usage: python -m jaxdist.{command}{first} {more}", "", *textwrap.wrap(description, width), ""]
    if positional:
        lines += ["arguments:", *_entry(positional, ARGUMENTS[positional], width), ""]
    lines += ["options:", *_entry("--help", "show this", width)]
    for extra in extras:
        value = "" if extra.flag else f" {kind(extra.annotation)}"
        default = "" if extra.flag else f" (default {_default(extra.default)})"
        lines += _entry(option(extra.name) + value, extra.help + default, width)
    for section, about in {"": Config.__doc__, **SECTIONS}.items():
        lines += _section(section, about, knobs, width)
    return "\n".join(lines)


def _section(section: str, about: str, knobs: Collection[str] | None, width: int) -> Iterator[str]:
    names = [n for n in KNOBS if n.rpartition(".")[0] == section and (knobs is None or within(n, knobs))]
    if not names:
        return
    yield from ("", *textwrap.wrap(f"{section or 'run'}: {about}", width))
    for name in names:
        field = KNOBS[name]
        text = f"{field.description or ''} (default {_default(field.default)})"
        yield from _entry(f"{option(name)} {kind(field.annotation)}", text, width)


def _entry(left: str, text: str, width: int) -> Iterator[str]:
    """`left` in its column and `text`, wrapped, beside it; below it where `left` is too long."""
    lines = textwrap.wrap(text, width - LEFT - 4)
    if len(left) <= LEFT:
        yield f"  {left:<{LEFT}}  {lines.pop(0)}"
    else:
        yield f"  {left}"
    yield from (" " * (LEFT + 4) + line for line in lines)


def _default(value: object) -> str:
    return value if isinstance(value, str) and value.split() == [value] else shown(value)
