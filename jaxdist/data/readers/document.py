"""What every reader of text yields."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

OnRead = Callable[[int], None]
"""Is called with the numbers of bytes as they are read."""


class Document(NamedTuple):
    """A document, or a piece of one."""

    text: str
    ends: bool
    """Whether the document ends here, so that an end-of-text token follows."""
    begins: bool = True
    """Whether the document begins here, so that a BOS token precedes where the tokenizer has one."""
