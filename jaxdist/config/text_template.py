r"""What `data.text` says: where in a row of data its text is, a key such as `text` or `a.b`, or `{title}\n\n{body}`."""

from __future__ import annotations

import re
from typing import NamedTuple

TEXT = "text"
"""What `data.text` is by default."""

FIELD = re.compile(r"\{([^{}]*)\}")

BREAKS = {"\\n": "\n", "\\t": "\t"}
"""How a line break and a tab are written where none can be typed, as in a shell."""


class TextTemplate(NamedTuple):
    """A text with keys in it."""

    between: tuple[str, ...]
    """What stands before, between and after the keys."""
    keys: tuple[str, ...]

    def filled(self, values: list[str]) -> str:
        """Return the text with a value for each key; an empty one if all of these are empty."""
        if not any(values):
            return ""
        pieces = [self.between[0]]
        for value, after in zip(values, self.between[1:], strict=True):
            pieces += [value, after]
        return "".join(pieces)


def parse(text: str) -> TextTemplate:
    """Return what `data.text` says. Raises `ValueError`."""
    if "{" not in text and "}" not in text:
        between, keys = ["", ""], [text]
    else:
        parts = FIELD.split(text)
        between, keys = parts[::2], parts[1::2]
    if not keys or any("{" in part or "}" in part for part in between):
        raise ValueError("a template has keys in braces, such as {title}, and no other braces")
    if not all(all(key.split(".")) for key in keys):
        raise ValueError("must name a key, such as content, or a.b for one inside another")
    for written, meant in BREAKS.items():
        between = [part.replace(written, meant) for part in between]
    return TextTemplate(tuple(between), tuple(keys))
