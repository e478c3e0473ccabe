"""The tokens that delimit documents and end generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxdist.config import RequestError
from jaxdist.json_files import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""End-of-text tokens. Where nothing else says which token ends a document, it is the first one that the tokenizer has;
a tokenizer trained here has the first of the list, as id 0."""

FILE = "special_tokens.json"
"""The file of a run folder that keeps these tokens, beside its tokenizer.json."""


class SpecialTokens(NamedTuple):
    """Ids of special tokens of a tokenizer."""

    bos: int | None = None
    """Is put before each document and before a prompt; None: nothing is."""
    eos: int | None = None
    """Is put after each document; None: nothing is."""
    stops: tuple[int, ...] = ()
    """Each of them ends a generated text."""

    def delimits(self) -> bool:
        """Return whether the tokens show where documents begin or end."""
        return self.bos is not None or self.eos is not None


def special_tokens_of(tokenizer: Tokenizer) -> SpecialTokens:
    """Return the tokens to use with a tokenizer about which no other file says anything."""
    for name in ENDS:
        token = tokenizer.token_to_id(name)
        if token is not None:
            return SpecialTokens(eos=token)
    return SpecialTokens()


def to_json(tokens: SpecialTokens) -> str:
    """Return the content of `FILE`."""
    return json.dumps(tokens._asdict()) + "\n"


def from_json(path: Path) -> SpecialTokens:
    """Read a file that `to_json` made. Raises `RequestError` for any other."""
    found = read_json(path)
    try:
        tokens = SpecialTokens(found["bos"], found["eos"], tuple(found["stops"]))
    except (KeyError, TypeError) as error:
        raise RequestError(f"'{path}' does not hold the special tokens of a run; copy the right one there") from error
    ids = [token for token in (tokens.bos, tokens.eos, *tokens.stops) if token is not None]
    if not all(is_id(token) for token in ids):
        raise RequestError(f"'{path}' holds {ids}, which are not token ids; copy the right one there")
    return tokens


def is_id(value: object) -> bool:
    """Return whether a value from JSON can be the id of a token."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
