"""How many documents are cut where one stream becomes rows: for one length of rows, or once for the usual ones.

The summary of a run says it without reading the tokens: it is counted when they are made, and kept with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxdist.data.packed_rows import lengths_in_order
from jaxdist.data.packing import cut_in_stream
from jaxdist.data.progress import Progress, unseen
from jaxdist.data.tokens import Tokens
from jaxdist.huggingface.special_tokens import SpecialTokens

USUAL = tuple(1 << power for power in range(5, 18))
"""Lengths of rows for which it is kept: 32 to 131,072 tokens."""

KEPT = "row_use"
"""The fact of the cache that has it."""


class RowUse:
    """How many documents of one stream are cut where it becomes rows of `sequence` tokens."""

    def __init__(self, sequence: int):
        self.sequence = sequence
        self.documents = 0
        self.cut = 0
        """With data.pack cut."""
        self.longer = 0
        """With data.pack best-fit, which cuts only what is longer than a row."""
        self._place = 0

    def add(self, lengths: Int[np.ndarray, " documents"]) -> None:
        """Add the next documents of the stream."""
        self.documents += lengths.size
        self.cut += cut_in_stream(lengths, self.sequence, self._place)
        self.longer += int((lengths > self.sequence).sum())
        self._place += int(lengths.sum())


def usual_uses(tokens: Tokens, special: SpecialTokens, progress: Progress = unseen) -> dict[str, Any]:
    """Return for the cache how rows of each of the `USUAL` lengths use a stream; nothing without borders in it."""
    if not special.delimits():
        return {}
    uses = [RowUse(sequence) for sequence in USUAL]
    for lengths in lengths_in_order(tokens, special, progress):
        for use in uses:
            use.add(lengths)
    return {KEPT: {"documents": uses[0].documents, **{str(use.sequence): [use.cut, use.longer] for use in uses}}}


def describe_use(facts: Mapping[str, Any], sequence: int) -> str:
    """Return a phrase about the documents that rows cut, from the facts of the cache; an empty text if it has none."""
    kept = facts.get(KEPT, {})
    documents = kept.get("documents", 0)
    if documents < 2 or str(sequence) not in kept:
        return ""
    cut, longer = (f"{100 * count / documents:.1f} %" for count in kept[str(sequence)])
    return f"rows cut {cut} of the documents (with data.pack best-fit: {longer})"
