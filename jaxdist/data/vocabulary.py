"""How many ids data need, where nobody has said it: as many as their tokenizer has, or one more than their largest."""

from __future__ import annotations

from collections.abc import Iterable

from jaxdist.config import DataConfig
from jaxdist.data.progress import Pass, Progress
from jaxdist.data.readers.reader import Expected, TokenReader
from jaxdist.data.sources import DataFile, Sources
from jaxdist.files.reasons import reading
from jaxdist.huggingface.given_tokenizer import largest_id, read_tokenizer

LARGEST = 1 << 20
"""Ids of the largest vocabulary that is looked for in files of tokens."""

UINT16 = 1 << 16
"""Ids that uint16 can hold."""


def needed_vocab(data: DataConfig, found: Iterable[Sources], progress: Progress) -> int | None:
    """Return the fewest ids of a model for these data; None if they have text without a tokenizer.

    Reads files of tokens to their ends. Raises `RequestError` for a file that holds none, and for no tokenizer.
    """
    if data.tokenizer:
        return largest_id(read_tokenizer(data.tokenizer).load()) + 1
    sources = [source for one in found for source in one.all]
    if not all(source.holds_tokens for source in sources):
        return None
    return 1 + max(_largest_id(file, data, progress) for source in sources for file in source.files)


def _largest_id(file: DataFile, data: DataConfig, progress: Progress) -> int:
    assert isinstance(file.reader, TokenReader)
    checking = Pass(progress, "looking for the largest token id", file.path.stat().st_size)
    with reading(file.path):
        # With a tokenizer whose ids uint16 holds, the content of a file says alone of which type its ids are.
        opened = file.reader.open(file.path, Expected(LARGEST, UINT16, data.dtype), checking.read)
        return opened.tokens.largest()
