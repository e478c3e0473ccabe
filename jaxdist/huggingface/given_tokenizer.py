"""Read the tokenizer that data.tokenizer names: a tokenizer.json, or a folder that holds one and says more about it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer

from jaxdist.config import RequestError
from jaxdist.files.json_files import LARGEST_LISTING, parse_json, read_text
from jaxdist.files.json_schema import short
from jaxdist.huggingface.added_tokens import read_beside, with_added_tokens
from jaxdist.huggingface.schema import KEPT_TOKENS, TOKENIZER
from jaxdist.huggingface.special_tokens import SpecialTokens, from_json, special_tokens_of
from jaxdist.huggingface.tokenizer import folder_problem, read_special_tokens

LONGEST_REASON = 200
"""Characters of the message of the package `tokenizers` that a sentence shows."""


@dataclass(frozen=True)
class GivenTokenizer:
    """The content of a tokenizer.json, and its special tokens."""

    text: str
    special: SpecialTokens
    bare: str | None = None
    """The content of the file, where `text` has more tokens, which other files of its folder name."""

    def alone(self) -> GivenTokenizer:
        """Return the tokenizer of the file alone."""
        return self if self.bare is None else GivenTokenizer(self.bare, self.special)

    def load(self) -> Tokenizer:
        """Return the tokenizer, which is made once, as a large one takes a second: do not change it."""
        return self._loaded

    @cached_property
    def _loaded(self) -> Tokenizer:
        return load_tokenizer(self.text)


def load_tokenizer(text: str) -> Tokenizer:
    """Return the tokenizer that a tokenizer.json describes; no other function makes one from a file.

    Published files may ask for truncation and padding, which would cut prompts and fill them up: both are switched off.
    Raises `ValueError` with a reason for what is no tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:
        # The package `tokenizers` raises no narrower exception.
        reason = str(error).partition("\n")[0]
        raise ValueError(reason[:LONGEST_REASON]) from error
    if tokenizer.post_processor is not None:
        unknown = _unknown_in_template(parse_json(tokenizer.post_processor.__getstate__().decode()))
        if unknown is not None:
            raise ValueError(f"its post_processor puts {short(unknown)}, which is not among its special_tokens")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> Encoding:
    """Return the tokens of a text, without special tokens around it.

    Raises `RequestError` if the tokenizer has no token for a part of it: one of bytes has tokens for everything, one of
    words needs one for what it does not know.
    """
    with _encoding():
        return tokenizer.encode(text, add_special_tokens=False)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of the tokens of a text, as `encode` finds them."""
    return encode(tokenizer, text).ids


def encode_all(tokenizer: Tokenizer, texts: list[str]) -> list[Encoding]:
    """Return the tokens of each text as `encode` does, made by all cores, without the places of the tokens."""
    with _encoding():
        return tokenizer.encode_batch_fast(texts, add_special_tokens=False)


def encode_with_places(tokenizer: Tokenizer, texts: list[str]) -> list[Encoding]:
    """Return the tokens of each text as `encode_all` does, with from and to which character they stand."""
    with _encoding():
        return tokenizer.encode_batch(texts, add_special_tokens=False)


@contextmanager
def _encoding() -> Iterator[None]:
    """Turn the error of the block, which encodes a text, into `RequestError`."""
    try:
        yield
    except Exception as error:
        # The package `tokenizers` raises nothing narrower than `Exception`.
        if type(error) is not Exception:
            raise
        reason = str(error).partition("\n")[0][:LONGEST_REASON]
        raise RequestError(
            f"the tokenizer has no token for a part of the text ({reason}); take another tokenizer, or other text"
        ) from error


def _unknown_in_template(processor: Mapping[str, Any]) -> str | None:
    """Return a token that a post-processor puts and does not know; its package would end with a panic at the first."""
    for part in processor.get("processors", ()):
        unknown = _unknown_in_template(part)
        if unknown is not None:
            return unknown
    known = processor.get("special_tokens", {})
    put = [piece.get("SpecialToken", {}).get("id") for piece in processor.get("single", ())]
    return next((token for token in put if token is not None and token not in known), None)


def read_tokenizer(path: Path) -> GivenTokenizer:
    """Return the tokenizer at `path`: a file, a folder of Hugging Face, or the folder of a run.

    Raises `RequestError` if there is none, or if the folder contradicts it.
    """
    folder = path if path.is_dir() else None
    if folder:
        problem = folder_problem(folder)
        if problem:
            raise RequestError(problem)
        path = folder / TOKENIZER
    text = read_text(path, LARGEST_LISTING)
    try:
        tokenizer = load_tokenizer(text)
    except ValueError as error:
        raise RequestError(
            f"data.tokenizer '{path}' is not a tokenizer ({error}); give a tokenizer.json of the tokenizers library, "
            "or leave it out to train one on the text"
        ) from error
    more = None
    if folder and not os.path.lexists(folder / KEPT_TOKENS):
        more = with_added_tokens(text, tokenizer, read_beside(folder), folder)
    special = _special_tokens(folder, tokenizer)
    return GivenTokenizer(text, special) if more is None else GivenTokenizer(more, special, bare=text)


def largest_id(tokenizer: Tokenizer) -> int:
    """Return the largest id, or -1 if the tokenizer has no entries."""
    return max(tokenizer.get_vocab().values(), default=-1)


def _special_tokens(folder: Path | None, tokenizer: Tokenizer) -> SpecialTokens:
    if folder is None:
        return special_tokens_of(tokenizer)
    if os.path.lexists(folder / KEPT_TOKENS):
        return from_json(folder / KEPT_TOKENS, tokenizer)
    return read_special_tokens(folder, tokenizer)
