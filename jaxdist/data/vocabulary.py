"""How many ids data need, where nobody has said it: as many as their tokenizer has, or one more than their largest."""

from __future__ import annotations

from collections.abc import Iterable

from jaxdist.config import DataConfig
from jaxdist.data.progress import Pass, Progress, unseen
from jaxdist.data.readers.reader import Expected, TokenReader
from jaxdist.data.sources import DataFile, Source, Sources
from jaxdist.data.token_files import open_token_files
from jaxdist.files.reasons import reading
from jaxdist.huggingface.given_tokenizer import largest_id, read_tokenizer

LARGEST = 1 << 20
"""Ids of the largest vocabulary that is looked for in files of tokens."""

UINT16 = 1 << 16
"""Ids that uint16 can hold."""


def needed_vocab(data: DataConfig, found: Iterable[Sources], progress: Progress, whole: bool = True) -> int | None:
    """Return the fewest ids of a model for these data; None if they have text without a tokenizer.

    Reads files of tokens to their ends. Unless they are to be read `whole`, of those that a start does not read it is
    the number of ids that their type can hold, up to `LARGEST`. Raises `RequestError` for a file that holds none, and
    for no tokenizer.
    """
    if data.tokenizer:
        return largest_id(read_tokenizer(data.tokenizer).load()) + 1
    sources = [source for one in found for source in one.all]
    if not all(source.holds_tokens for source in sources):
        return None
    return 1 + max(
        _largest_of_type(source, data) if source.by_samples and not whole else largest_id_of(source, data, progress)
        for source in sources
    )


def largest_id_of(source: Source, data: DataConfig, progress: Progress) -> int:
    """Return the largest id in files of tokens, of which all are read.

    Raises `RequestError` for a file that holds none.
    """
    return max(_largest_id(file, data, progress) for file in source.files)


def _largest_of_type(source: Source, data: DataConfig) -> int:
    """Return the largest id that files of tokens can hold, after a look at them."""
    (file,) = open_token_files([source], None, LARGEST, unseen, data.dtype, entries=UINT16)
    return (UINT16 if file.tokens.dtype == "uint16" else LARGEST) - 1


def _largest_id(file: DataFile, data: DataConfig, progress: Progress) -> int:
    assert isinstance(file.reader, TokenReader)
    checking = Pass(progress, "looking for the largest token id", file.path.stat().st_size)
    with reading(file.path):
        # With a tokenizer whose ids uint16 holds, the content of a file says alone of which type its ids are.
        opened = file.reader.open(file.path, Expected(LARGEST, UINT16, data.dtype), checking.read)
        return opened.tokens.largest()
