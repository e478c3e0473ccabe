"""Add to a tokenizer.json the tokens that stand in other files of its folder alone, as transformers does.

Some published folders name tokens that their tokenizer.json lacks: in `added_tokens_decoder` of tokenizer_config.json,
or, written by older versions, in added_tokens.json and special_tokens_map.json. Without them they would be read as
plain text. How transformers takes them is in `PreTrainedTokenizerBase._from_pretrained`, and in the `__init__` of its
tokenizers that this package reads (`TokenizersBackend`, before version 5 `PreTrainedTokenizerFast`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from jaxdist.config import RequestError
from jaxdist.files.json_files import json_object
from jaxdist.files.json_schema import TOKEN_ID, short
from jaxdist.huggingface.schema import (
    ADDED_TOKENS,
    CONFIG,
    SPECIAL,
    SPECIAL_TOKENS_MAP,
    TOKEN,
    TOKENIZER,
    TOKENIZER_CONFIG,
    checked,
    read_if_there,
)

ATTRIBUTES = ("single_word", "lstrip", "rstrip", "normalized", "special")

Beside = Mapping[str, Mapping[str, Any]]
"""The contents of the files beside a tokenizer.json, by their names; an empty one for a file that is absent."""

READ = (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS, CONFIG)


def read_beside(folder: Path) -> Beside:
    """Return what stands beside the tokenizer.json of a folder. Raises `RequestError`."""
    return {name: read_if_there(folder / name) for name in READ}


def kept_beside(kept: Mapping[str, bytes], folder: Path) -> Beside:
    """Return the same of files in memory, which `folder` holds. Raises `RequestError`."""
    return {name: checked(kept[name], folder / name) if name in kept else {} for name in READ}


def with_added_tokens(text: str, tokenizer: Tokenizer, beside: Beside, folder: Path) -> str | None:
    """Return the tokenizer.json with more tokens; None where the files beside it name none that it lacks.

    `tokenizer` is made from `text`, and gets the tokens. One without a row in the model, by the `vocab_size` of
    config.json, is left out: it stays plain text. Raises `RequestError` where a token of `folder` would not have the
    id that its files give it.
    """
    before = _entries(tokenizer)
    rows = beside[CONFIG].get("vocab_size")
    if type(rows) is not int:
        rows = sys.maxsize
    declared = {token: added for token, added in _declared(beside, tokenizer, folder) if token < rows}
    for added in _missing(beside, declared.values(), tokenizer, folder):
        if _id(tokenizer, added.content) < rows:
            tokenizer.add_tokens([added])
    for token, added in declared.items():
        found = tokenizer.token_to_id(added.content)
        if found != token:
            raise RequestError(
                f"'{folder}' gives the token {short(added.content)} the id {token} beside its {TOKENIZER}, with which "
                f"it has {found}; put the files of one tokenizer there"
            )
    after = _entries(tokenizer)
    if after == before:
        return None
    # Not by `Tokenizer.to_str`: its text, which names data in the cache, may differ between versions of the package.
    content = json_object(text.encode(), str(folder / TOKENIZER))
    content["added_tokens"] = after
    return json.dumps(content, ensure_ascii=False)


def _declared(beside: Beside, tokenizer: Tokenizer, folder: Path) -> Iterator[tuple[int, AddedToken]]:
    """Yield the tokens to which the files give an id, and the ids, in their order."""
    decoder = beside[TOKENIZER_CONFIG].get("added_tokens_decoder")
    if decoder is not None:
        for digits in sorted(decoder, key=int):
            yield int(digits), _token(decoder[digits], folder)
        return
    special = {added.content for _, added in _named(beside, folder)}
    own = tokenizer.get_added_tokens_decoder()
    by_content = beside[ADDED_TOKENS]
    for content, token in by_content.items():
        if not TOKEN_ID.holds(token) or not content:
            raise RequestError(
                f"'{folder / ADDED_TOKENS}': {short(content)} has {short(token)}, which must be {TOKEN_ID.words}; "
                f"put the right file there"
            )
    for content in sorted(by_content, key=by_content.__getitem__):
        token = by_content[content]
        # What tokenizer.json itself says about a token counts.
        if token not in own:
            is_special = content in special
            yield token, AddedToken(content, special=is_special, normalized=not is_special)


def _named(beside: Beside, folder: Path) -> Iterator[tuple[str, AddedToken]]:
    """Yield the special tokens that the files name without an id, each behind its key: first those with a role."""
    found = dict(beside[TOKENIZER_CONFIG])
    if found.get("added_tokens_decoder") is None:
        found |= beside[SPECIAL_TOKENS_MAP]
    roles = [
        key for key, value in found.items() if key.endswith("_token") and key not in SPECIAL and TOKEN.holds(value)
    ]
    named = [(key, found.get(key)) for key in (*SPECIAL, *roles)]
    for key in ("extra_special_tokens", "additional_special_tokens"):
        others = found.get(key) or []
        values = others.values() if isinstance(others, dict) else others
        named += [(key, value) for value in values]
    for key, value in named:
        if isinstance(value, dict):
            yield key, _token({**value, "special": True}, folder)
        elif isinstance(value, str):
            yield key, AddedToken(value, special=True)


def _missing(
    beside: Beside, declared: Iterable[AddedToken], tokenizer: Tokenizer, folder: Path
) -> Iterator[AddedToken]:
    """Yield the tokens that `tokenizer` lacks or has with other attributes, in the order of transformers."""
    own = tokenizer.get_added_tokens_decoder().values()
    attributes = {repr(added) for added in own}
    known = {added.content for added in own}
    named = list(_named(beside, folder))
    special = {added.content for _, added in named}
    for added in declared:
        if added.content in special:
            added.special = True
        known.add(added.content)
        if repr(added) not in attributes:
            yield added
    for key, added in named:
        # A BOS or EOS without an id is refused where its id is looked up.
        needed = key not in ("bos_token", "eos_token") or tokenizer.token_to_id(added.content) is not None
        if added.content and added.content not in known and needed:
            known.add(added.content)
            yield added


def _token(entry: Mapping[str, Any], folder: Path) -> AddedToken:
    """Return the token of an object with its content and attributes. Raises `RequestError`."""
    attributes = {name: entry[name] for name in ATTRIBUTES if name in entry}
    for name, value in attributes.items():
        if not isinstance(value, bool):
            raise RequestError(
                f"'{folder}' says that {name} of the token {short(entry['content'])} is {short(value)}, which must be "
                f"true or false; copy its {TOKENIZER_CONFIG} again"
            )
    if not entry["content"]:
        raise RequestError(f"'{folder}' names a token without content; copy its {TOKENIZER_CONFIG} again")
    return AddedToken(entry["content"], **attributes)


def _id(tokenizer: Tokenizer, content: str) -> int:
    """Return the id that a token has, or would be given."""
    found = tokenizer.token_to_id(content)
    if found is not None:
        return found
    of_model = tokenizer.get_vocab_size(with_added_tokens=False)
    return max(of_model, 1 + max(tokenizer.get_added_tokens_decoder(), default=-1))


def _entries(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the added tokens as a tokenizer.json lists them."""
    return [
        {"id": token, "content": added.content} | {name: getattr(added, name) for name in ATTRIBUTES}
        for token, added in sorted(tokenizer.get_added_tokens_decoder().items())
    ]
