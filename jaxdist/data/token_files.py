"""Open files of tokens in place: those of a source as one stream, each checked against the model's vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxdist.config import RequestError, listed
from jaxdist.config.values import IdType
from jaxdist.data.known import known
from jaxdist.data.progress import Pass, Progress
from jaxdist.data.readers.megatron import index_of
from jaxdist.data.readers.reader import Expected, TokenFile, TokenReader
from jaxdist.data.sources import Source
from jaxdist.data.tokens import Tokens, TokenType
from jaxdist.files import digest
from jaxdist.files.reasons import reading
from jaxdist.huggingface.given_tokenizer import GivenTokenizer, largest_id

VERSION = 1
"""Version of what readers accept; increase it when one refuses more, or reads the same bytes in another way."""


def open_token_files(
    sources: Sequence[Source], given: GivenTokenizer | None, vocab: int, progress: Progress, dtype: IdType
) -> list[TokenFile]:
    """Return the files of each source as one. Raises `RequestError` with every problem of these files."""
    entries = largest_id(given.load()) + 1 if given else None
    expected = Expected(vocab, entries, dtype)
    problems: list[str] = []
    opened = []
    for source in sources:
        try:
            opened.append(_joined(_open_all(source, expected, progress), source.left_out))
        except RequestError as error:
            problems += error.problems
    if problems:
        raise RequestError(*listed(iter(problems), len(problems), "such files of tokens"))
    return opened


class _Accepted(NamedTuple):
    """What is kept of a file that was accepted, for the next start."""

    dtype: TokenType
    offset: int
    form: str


def _open_all(source: Source, expected: Expected, progress: Progress) -> list[TokenFile]:
    """Return each file of a source; all of them are read, unless they are `known`.

    Raises `RequestError` with every problem of these files.
    """
    readers = [reader.key for _, reader in source.files]
    paths = [path for path in source.paths for path in (path, *index_of(path))]

    def check() -> list[_Accepted]:
        checking = Pass(progress, "checking token ids", source.size)
        problems: list[str] = []
        accepted = []
        for path, reader in source.files:
            assert isinstance(reader, TokenReader)
            try:
                with reading(path):
                    tokens, form = reader.open(path, expected, checking.read)
                accepted.append(_Accepted(tokens.dtype, tokens.offset, form))
            except RequestError as error:
                problems += error.problems
        if problems:
            raise RequestError(*problems)
        return accepted

    question = digest("token files", VERSION, *expected, *readers)
    opened = []
    for path, one in zip(source.paths, known(question, paths, check), strict=True):
        dtype, offset, form = one
        opened.append(TokenFile(Tokens.open(path, dtype, offset), form))
    return opened


def _joined(shards: Sequence[TokenFile], left_out: str) -> TokenFile:
    """Return files as one, in their order."""
    count = [f"{len(shards):,} files"] if len(shards) > 1 else []
    forms = dict.fromkeys(shard.form for shard in shards if shard.form)
    others = [f"{left_out} left out"] if left_out else []
    return TokenFile(Tokens.joined([shard.tokens for shard in shards]), "; ".join([*count, *forms, *others]))


def types(parts: Iterable[Tokens]) -> list[str]:
    """Return the types of the ids of all files, if any is not uint16, which the same bytes may be too."""
    found = [file.dtype for part in parts for file in part.shards or (part,)]
    return [] if set(found) == {"uint16"} else list(found)


def form_of(file: TokenFile) -> str:
    """Return what the summary adds to the name of tokens: how they are read, in parentheses."""
    return f" ({file.form})" if file.form else ""


def other_form(files: Sequence[TokenFile]) -> str:
    """Return the same of validation data that are read in another way than the training data."""
    training, *validation = files
    return "".join(form_of(file) for file in validation if file.form != training.form)
