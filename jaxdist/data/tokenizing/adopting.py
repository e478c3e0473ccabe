"""Take pieces that were tokenized of a text that was refused, for the text that is there after it was mended.

A file that is damaged, or a bad row, ends the tokenizing; what is finished stays in the cache, under the name of the
text as it was. When the file is mended or removed, the text has another name, but most of its pieces are the same:
those whose files have the same content there, read in the same way with the same tokenizer. They are moved, each
checked by its checksums. Tokens that have been put into shards already are taken where all before them are: there they
are the same documents, by the same numbers.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from jaxdist.data.token_cache import left_behind
from jaxdist.data.tokenizing.encoder import PIECES, Part, part_name
from jaxdist.data.tokenizing.pieces import Plan
from jaxdist.data.tokenizing.shards import take_up
from jaxdist.files import WRONG_CONTENT


def adopt(folder: Path, plan: Plan) -> None:
    """Move into `folder` the pieces of its plan that are there of other texts, which nobody tokenizes now.

    Raises `OSError`.
    """
    for other in left_behind(folder.parent, but=folder):
        with contextlib.suppress(*WRONG_CONTENT):
            there = Plan.read(other)
            if not there.alike(plan):
                continue
            take_up(other, there)
            if _move_all(other, there, folder, plan):
                shutil.rmtree(other, ignore_errors=True)


def _move_all(other: Path, there: Plan, folder: Path, plan: Plan) -> int:
    """Move all that is the same, and return how many pieces, or beginnings of pieces, that are."""
    numbers: dict[str, list[int]] = {}
    for number in reversed(range(len(plan.pieces))):
        numbers.setdefault(plan.identity(number), []).append(number)
    moved = 0
    same_so_far = True
    for number in range(len(there.pieces)):
        wanted = numbers.get(there.identity(number), [])
        target = wanted.pop() if wanted else None
        same_so_far = same_so_far and target == number
        if target is not None:
            parts = _move(other, number, folder, target, same_so_far)
            moved += parts > 0
    return moved


def _move(other: Path, number: int, folder: Path, target: int, with_shards: bool) -> int:
    """Move the parts of a piece, and return how many: up to the first that is missing, or may not be taken."""
    count = 0
    while True:
        part = Part.read(other, number, count)
        if part is None or (part.shards is not None and not with_shards):
            return count
        before, after = part_name(number, count), part_name(target, count)
        if part.shards is None:
            names = {name: name.replace(before, after, 1) for name in part.files}
            for name, new in names.items():
                (other / PIECES / name).replace(folder / PIECES / new)
            part = part._replace(files={names[name]: checksum for name, checksum in part.files.items()})
        for name in part.shards or {}:
            (other / name).replace(folder / name)
        part.write(folder, target, count)
        count += 1
