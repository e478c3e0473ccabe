"""Values as Slurm writes them on its command line: numbers of nodes, times, names."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError


def node_counts(nodes: str) -> tuple[int, int]:
    """Return the fewest and the most nodes of `4` or `2-4`."""
    fewest, _, most = nodes.partition("-")
    return int(fewest), int(most or fewest)


def seconds(time: str) -> int:
    """Parse a time as Slurm writes it: `90` minutes, `90:00`, `12:00:00`, `2-0`, `1-12:00`, `1-12:00:00`."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash or len(parts) == 3:
        hours, minutes, secs = (parts + [0, 0])[:3]
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs
    # Without hours: minutes, or minutes and seconds.
    minutes, secs = (parts + [0])[:2]
    return 60 * minutes + secs


def _nodes(text: str) -> str:
    if re.fullmatch(r"[1-9]\d{0,5}(-[1-9]\d{0,5})?", text, re.ASCII):
        fewest, most = node_counts(text)
        if fewest <= most:
            return text
    raise PydanticCustomError("nodes", "must be a number such as 4, or fewest and most such as 2-4")


def _time(text: str) -> str:
    number = r"\d{1,4}"
    forms = rf"{number}(:{number}){{0,2}}|{number}-{number}(:{number}){{0,2}}"
    if not re.fullmatch(forms, text, re.ASCII) or not seconds(text):
        raise PydanticCustomError(
            "time", "must be a time as Slurm writes it, such as 90 (minutes), 12:00:00 or 2-00:00"
        )
    return text


def _word(text: str) -> str:
    if not re.fullmatch(r"[\w.,+-]+", text, re.ASCII):
        raise PydanticCustomError("word", "must be letters, digits and any of . , + - _")
    return text


Nodes = Annotated[str, AfterValidator(_nodes)]
Time = Annotated[str, AfterValidator(_time)]
Word = Annotated[str, AfterValidator(_word)]
