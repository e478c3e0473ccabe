"""Keep the tokens of a text in the cache: a folder of token files and their tokenizer, filled once for the same key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from jaxdist.config import RequestError
from jaxdist.data.progress import Pass, Progress
from jaxdist.data.readers.reader import OnRead
from jaxdist.data.sources import Source, Sources, Split
from jaxdist.data.token_cache import open_cache
from jaxdist.data.tokenizing import PARTS, TOKENIZER, resume_point, write_parts
from jaxdist.data.tokens import Tokens, TokenType
from jaxdist.files import write_whole
from jaxdist.files.caches import cache_folder
from jaxdist.files.json_files import LARGEST_LISTING, read_text
from jaxdist.huggingface.given_tokenizer import GivenTokenizer, load_tokenizer
from jaxdist.huggingface.special_tokens import special_tokens_of


class Store(NamedTuple):
    """Tokens in the cache."""

    train: Tokens
    validation: Tokens
    used: GivenTokenizer
    """The tokenizer that made them."""
    content: str
    """The hash of the text."""
    facts: dict[str, int]
    """The fields of `tokenizing.Written`, and what else was counted."""

    @property
    def note(self) -> str | None:
        """A sentence about documents that have their own delimiters, if there are any."""
        own = self.facts["own"]
        return self.used.special.own_note(self.used.load(), own, "document", ends=True) if own else None


def open_store(
    text: Source | Sources,
    split: Callable[[OnRead], Split],
    key: Callable[[str], str],
    vocab: int,
    given: GivenTokenizer | None,
    progress: Progress,
    train: Callable[[], str] | None = None,
    counted: Callable[[], dict[str, int]] = dict,
    doubled: bool = False,
) -> Store:
    """Return the tokens of a text, after tokenizing it if the cache lacks them.

    `split` yields its documents, each with whether it is held out. `key` returns 64 hexadecimal digits, made from the
    hash of the text, that name all that determines the tokens. Where no tokenizer is given, `train` makes one and
    returns it as JSON. `counted` is asked for further facts when all documents have passed. `doubled` is explained in
    `write_parts`. Raises `RequestError` if the text changes meanwhile.
    """
    # Taken first: the content must not change from here on.
    stamp = text.stamp()
    content = text.digest(Pass(progress, "reading the data", text.size).read)
    dtype = token_type(vocab)

    def fill(new: Path) -> dict[str, int]:
        """Encode the text, or continue with what a killed process has left in `new`."""
        done = resume_point(new)
        if done is None:
            if given:
                made = given.text
            else:
                assert train, "no tokenizer is there, and none can be made"
                made = train()
            write_whole(new / TOKENIZER, made)
        encoding = Pass(progress, "tokenizing", text.size)
        written = write_parts(new, given or kept_tokenizer(new), split(encoding.read), dtype, encoding, done, doubled)
        if text.stamp() != stamp:
            raise RequestError(f"'{text.name}' changed while it was read; start again when it is complete")
        return {**written._asdict(), **counted()}

    folder = cache_folder() / key(content)
    facts = open_cache(folder, fill, progress)
    tokens = [Tokens.open(folder / part, dtype) for part in PARTS]
    return Store(tokens[0], tokens[1], given or kept_tokenizer(folder), content, facts)


def token_type(vocab: int) -> TokenType:
    """Return the dtype in which tokens of a vocabulary of that size are kept."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


def kept_tokenizer(folder: Path) -> GivenTokenizer:
    """Return the tokenizer in a folder of the cache, which was made from the text itself."""
    text = read_text(folder / TOKENIZER, LARGEST_LISTING, links=False)
    return GivenTokenizer(text, special_tokens_of(load_tokenizer(text)))
