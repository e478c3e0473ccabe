"""The text that --help prints: usage, the command's own options, then every knob by section."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Collection, Iterator, Sequence

from jaxdist.config import Config
from jaxdist.request.knobs import KNOBS, SECTIONS, kind, option, unquoted, within
from jaxdist.request.options import Extra
from jaxdist.request.reading import DEFAULT, SHIPPED

LEFT = 34
"""Columns for an option and its type."""

ARGUMENTS = {
    "CONFIG": f"a TOML file, or one of {', '.join(SHIPPED)} (default {DEFAULT}); options override its values. A folder "
    f"of Hugging Face is the same as --init-from with it",
    "RUN": "the folder of a run, such as runs/gpt_tiny; options override its config.toml",
    "RUNS": "the folders of runs, such as runs/a runs/b, or runs/*",
    "PATH": "what --data.path names (default: Python's own library); or the .toml of a training, whose data are meant",
}

OPTIONAL = ("CONFIG", "PATH")
"""Arguments that may be left out."""


def help_text(
    command: str, description: str, positional: str | None, extras: Sequence[Extra], knobs: Collection[str] | None
) -> str:
    """Return the help of `command`, as wide as the terminal."""
    width = min(max(shutil.get_terminal_size().columns, 72), 120)
    usage = f"usage: python -m jaxdist.{command}"
    if positional:
        argument = f"[{positional}]" if positional in OPTIONAL else positional
        usage += f" {argument}"
        if knobs is None or knobs:
            usage += " [--section.knob value ...]"
    else:
        usage += " " + " ".join(f"[{option(extra.name)}]" for extra in extras)
    lines = [usage, "", *textwrap.wrap(description, width), ""]
    if positional:
        lines += ["arguments:", *_entry(positional, ARGUMENTS[positional], width), ""]
    lines += ["options:", *_entry("--help", "show this help", width)]
    for extra in extras:
        if extra.flag:
            lines += _entry(option(extra.name), extra.help, width)
        else:
            left = f"{option(extra.name)} {kind(extra.annotation)}"
            lines += _entry(left, f"{extra.help} (default {unquoted(extra.default)})", width)
    for section, about in {"": Config.__doc__ or "", **SECTIONS}.items():
        lines += _section(section, about, knobs, width)
    return "\n".join(lines)


def _section(section: str, about: str, knobs: Collection[str] | None, width: int) -> Iterator[str]:
    names = [name for name in KNOBS if name.rpartition(".")[0] == section]
    if knobs is not None:
        names = [name for name in names if within(name, knobs)]
    if not names:
        return
    yield ""
    yield from textwrap.wrap(f"{section or 'run'}: {about}", width)
    for name in names:
        field = KNOBS[name]
        text = f"{field.description or ''} (default {unquoted(field.default)})"
        yield from _entry(f"{option(name)} {kind(field.annotation)}", text, width)


def _entry(left: str, text: str, width: int) -> Iterator[str]:
    """Yield `left` in its column with `text`, wrapped, beside it; below it if `left` is too long for the column."""
    lines = textwrap.wrap(text, width - LEFT - 4)
    if len(left) <= LEFT:
        yield f"  {left:<{LEFT}}  {lines.pop(0)}"
    else:
        yield from _choices(left, width)
    for line in lines:
        yield " " * (LEFT + 4) + line


def _choices(left: str, width: int) -> Iterator[str]:
    """Yield an option with its choices, broken after a `|` where they are longer than a line."""
    if len(left) + 2 <= width:
        yield f"  {left}"
        return
    parts = left.replace("|", "| ")
    for line in textwrap.wrap(parts, width - 2, subsequent_indent="    ", break_on_hyphens=False):
        yield "  " + line.replace("| ", "|")
