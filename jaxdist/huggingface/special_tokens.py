"""The tokens that delimit documents and end generation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxdist.config import RequestError
from jaxdist.huggingface.schema import read_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""End-of-text tokens. Where nothing else says which token ends a document, it is the first one that the tokenizer has;
a tokenizer trained here has the first of the list, as id 0."""


class SpecialTokens(NamedTuple):
    """Ids of special tokens of a tokenizer."""

    bos: int | None = None
    """Is put before each document and before a prompt; None: nothing is."""
    eos: int | None = None
    """Is put after each document; None: nothing is."""
    stops: tuple[int, ...] = ()
    """Each of them ends a generated text."""

    def around(self, ids: Sequence[int], begins: bool = True, ends: bool = False, doubled: bool = False) -> list[int]:
        """Return the tokens of a text with BOS in front where it `begins`, and with EOS behind where it `ends`.

        One that stands there as text already stands there once, unless `doubled` is set.
        """
        found = list(ids)
        if begins and self.bos is not None and (doubled or found[:1] != [self.bos]):
            found.insert(0, self.bos)
        if ends and self.eos is not None and (doubled or found[-1:] != [self.eos]):
            found.append(self.eos)
        return found

    def has_own(self, ids: Sequence[int], begins: bool = True, ends: bool = False) -> bool:
        """Return whether a text has a BOS or an EOS already where `around` would put one."""
        own_bos = begins and self.bos is not None and list(ids[:1]) == [self.bos]
        own_eos = ends and self.eos is not None and list(ids[-1:]) == [self.eos]
        return own_bos or own_eos

    def own_note(self, tokenizer: Tokenizer, count: int, what: str, ends: bool = False) -> str:
        """Return a sentence about `count` texts that `has_own` found; `what` they are, such as "document"."""
        found = [token for token in (self.bos, self.eos if ends else None) if token is not None]
        names = " or ".join(str(tokenizer.id_to_token(token)) for token in found)
        whose = f"1 {what} has its own" if count == 1 else f"{count:,} {what}s have their own"
        return f"{whose} {names}, which is not put there again"

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
    """Return the content of `KEPT_TOKENS`."""
    return json.dumps(tokens._asdict()) + "\n"


def from_json(path: Path, tokenizer: Tokenizer) -> SpecialTokens:
    """Read a file that `to_json` made for this tokenizer. Raises `RequestError` for any other."""
    found = read_file(path)
    delimiters = [found[name] for name in ("bos", "eos") if found[name] is not None]
    unknown = set(delimiters).difference(known(tokenizer, delimiters))
    if unknown:
        raise RequestError(
            f"'{path}' names token {min(unknown)}, which the tokenizer.json beside it lacks; copy the right one there"
        )
    return SpecialTokens(found["bos"], found["eos"], known(tokenizer, found["stops"]))


def known(tokenizer: Tokenizer, ids: Iterable[int]) -> tuple[int, ...]:
    """Return the ids that a tokenizer has: a folder may still have the default of transformers, 50,256."""
    return tuple(token for token in ids if tokenizer.id_to_token(token) is not None)
