"""Open files of tokens in place: those of a source as one stream, each checked against the model's vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdist.config import RequestError, listed
from jaxdist.config.values import IdType
from jaxdist.data.known import in_parallel, known
from jaxdist.data.packed_rows import lengths_in_order
from jaxdist.data.progress import Pass, Progress
from jaxdist.data.readers.megatron import index_of
from jaxdist.data.readers.reader import Expected, TokenFile, TokenReader
from jaxdist.data.row_use import usual_uses
from jaxdist.data.sources import Source
from jaxdist.data.token_samples import SMALLEST_STRETCH, STRETCH, STRETCHES, spread
from jaxdist.data.tokens import Tokens, TokenType
from jaxdist.files import digest
from jaxdist.files.reasons import reading
from jaxdist.huggingface.given_tokenizer import GivenTokenizer, largest_id
from jaxdist.huggingface.special_tokens import SpecialTokens
from jaxdist.output.units import counted

VERSION = 3
"""Version of what readers accept; increase it when one refuses more, or reads the same bytes in another way."""


def open_token_files(
    sources: Sequence[Source],
    given: GivenTokenizer | None,
    vocab: int,
    progress: Progress,
    dtype: IdType,
    whole: bool = False,
    entries: int | None = None,
) -> list[TokenFile]:
    """Return the files of each source as one. Raises `RequestError` with every problem of these files.

    Small ones are read, and of others samples, unless they are to be read `whole`. `entries` is how many ids their
    tokenizer has, where none is given.
    """
    entries = largest_id(given.load()) + 1 if given else entries
    expected = Expected(vocab, entries, dtype)
    problems: list[str] = []
    opened = []
    for source in sources:
        try:
            sharing = 0 if whole else _sharing(source)
            files = _open_all(source, expected._replace(sharing=sharing), progress)
            opened.append(_joined(files, source.left_out))
        except RequestError as error:
            problems += error.problems
    if problems:
        raise RequestError(*listed(iter(problems), len(problems), "such files of tokens"))
    return opened


def _sharing(source: Source) -> int:
    """Return `Expected.sharing` of the files of a source."""
    return len(source.files) * source.one_of if source.by_samples else 0


class _Accepted(NamedTuple):
    """What is kept of a file that was accepted, for the next start."""

    dtype: TokenType
    offset: int
    form: str
    documents: int


def _open_all(source: Source, expected: Expected, progress: Progress) -> list[TokenFile]:
    """Return each file of a source, unless they are `known` after a look at all of them.

    Raises `RequestError` with every problem of these files.
    """
    readers = [reader.key for _, reader in source.files]
    paths = [path for path in source.paths for path in (path, *index_of(path))]

    def check() -> list[_Accepted]:
        checking = Pass(progress, "checking token ids", source.size)
        readers = dict(source.files)

        def look(path: Path) -> _Accepted | RequestError:
            reader = readers[path]
            assert isinstance(reader, TokenReader)
            try:
                with reading(path):
                    tokens, form, documents = reader.open(path, expected, checking.read)
                return _Accepted(tokens.dtype, tokens.offset, form, documents)
            except RequestError as error:
                return error

        # Those that are read whole are read one after another.
        found = in_parallel(look, source.paths) if expected.sharing else map(look, source.paths)
        accepted: list[_Accepted] = []
        problems: list[str] = []
        for one in found:
            if isinstance(one, RequestError):
                problems += one.problems
            else:
                accepted.append(one)
        if problems:
            raise RequestError(*problems)
        return accepted

    question = digest("token files", VERSION, *expected, *readers)
    opened = []
    for path, one in zip(source.paths, known(question, paths, check), strict=True):
        dtype, offset, form, documents = one
        tokens = Tokens.open(path, dtype, offset)
        if expected.sharing and expected.vocab <= np.iinfo(dtype).max:
            tokens = replace(tokens, vocab=expected.vocab)
        opened.append(TokenFile(tokens, form, documents))
    return opened


def _joined(shards: Sequence[TokenFile], left_out: str) -> TokenFile:
    """Return files as one, in their order."""
    count = [f"{len(shards):,} files"] if len(shards) > 1 else []
    documents: dict[str, int] = {}
    for shard in shards:
        documents[shard.form] = documents.get(shard.form, 0) + shard.documents
    forms = [", ".join([form, *([counted(of, "document")] if of else [])]) for form, of in documents.items() if form]
    others = [f"{left_out} left out"] if left_out else []
    tokens = Tokens.joined([shard.tokens for shard in shards])
    return TokenFile(tokens, "; ".join([*count, *forms, *others]), sum(documents.values()))


def row_use_of(source: Source, train: Tokens, given: GivenTokenizer | None, progress: Progress) -> dict[str, Any]:
    """Return how rows of usual lengths use the first tokens of a source, as the cache has it of text.

    Documents are known by the tokens that delimit them, or by an index; of files that a start does not read, those of
    samples. It is counted once, and `known` from then on; nothing where neither is there.
    """
    sharing = _sharing(source)
    if given and given.special.delimits():
        lengths = _between_delimiters(train, given.special, progress, source)
        borders = f"{given.special.bos} {given.special.eos}"
    elif all(isinstance(reader, TokenReader) and reader.documents for _, reader in source.files):
        lengths = _indexed(source, sharing)
        if not sharing:
            lengths = _up_to(train.length, lengths)
        borders = "index"
    else:
        return {}
    question = digest("row use", VERSION, train.start, train.length, borders)
    paths = [path for path in source.paths for path in (path, *index_of(path))]
    return known(question, paths, lambda: usual_uses(lengths, train.length if sharing else None))


def _between_delimiters(
    tokens: Tokens, special: SpecialTokens, progress: Progress, source: Source
) -> Iterator[np.ndarray]:
    if not source.by_samples:
        yield from lengths_in_order(tokens, special, progress)
        return
    stretches = max(1, STRETCHES // source.one_of)
    size = max(SMALLEST_STRETCH, STRETCHES * STRETCH // (stretches * source.one_of))
    for start, stop in spread(tokens.length, stretches, size // np.dtype(tokens.dtype).itemsize):
        yield from lengths_in_order(tokens.part(start, stop), special)


def _indexed(source: Source, sharing: int) -> Iterator[np.ndarray]:
    for path, reader in source.files:
        assert isinstance(reader, TokenReader)
        assert reader.documents, f"{reader.name} have no index"
        with reading(path):
            yield from reader.documents(path, sharing)


def _up_to(tokens: int, lengths: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the lengths of the documents in the first tokens, of which the last one may be a part."""
    for some in lengths:
        ends = np.minimum(np.cumsum(some), tokens)
        within = np.diff(ends, prepend=0)
        yield within[within > 0]
        tokens -= int(ends[-1]) if ends.size else 0


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
