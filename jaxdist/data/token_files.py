"""Open files of tokens in place: those of a source as one stream, each checked against the model's vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxdist.config import RequestError, listed
from jaxdist.config.values import IdType
from jaxdist.data.progress import Pass, Progress
from jaxdist.data.readers.reader import Expected, TokenFile, TokenReader, reading
from jaxdist.data.sources import Source
from jaxdist.data.tokens import Tokens
from jaxdist.huggingface.given_tokenizer import GivenTokenizer, largest_id


def open_token_files(
    sources: Sequence[Source], given: GivenTokenizer | None, vocab: int, progress: Progress, dtype: IdType
) -> list[TokenFile]:
    """Return the files of each source as one. Raises `RequestError` with every problem of these files."""
    entries = largest_id(given.load()) + 1 if given else None
    expected = Expected(vocab, entries, dtype)
    problems: list[str] = []
    opened = []
    for source in sources:
        checking = Pass(progress, "checking token ids", source.size)
        shards = []
        for path, reader in source.files:
            assert isinstance(reader, TokenReader)
            try:
                with reading(path):
                    shards.append(reader.open(path, expected, checking.read))
            except RequestError as error:
                problems += error.problems
        if shards:
            opened.append(_joined(shards, source.left_out))
    if problems:
        raise RequestError(*listed(iter(problems), len(problems), "such files of tokens"))
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
