"""Read from a Hugging Face folder which special tokens its tokenizer uses: BOS, EOS, and what ends generation.

`tokenizer_config.json` names tokens; `config.json` and `generation_config.json` give ids; the post-processor of
`tokenizer.json` puts tokens around a text.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxdist.config import RequestError
from jaxdist.files.json_schema import short
from jaxdist.huggingface.schema import (
    CONFIG,
    GENERATION,
    SPECIAL_TOKENS_MAP,
    TOKENIZER,
    TOKENIZER_CONFIG,
    read_if_there,
)
from jaxdist.huggingface.special_tokens import SpecialTokens, known, special_tokens_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

OTHER_FORMS = {"tokenizer.model": "sentencepiece", "tekken.json": "tekken", "vocab.json": "a vocabulary with merges"}
"""Files of tokenizers in other forms, and what to call these forms."""


def folder_problem(folder: Path) -> str | None:
    """Return why the folder cannot be a data.tokenizer, or None if it holds a tokenizer.json."""
    path = folder / TOKENIZER
    if path.is_file() and path.stat().st_size > 0:
        return None
    for name, form in OTHER_FORMS.items():
        if (folder / name).is_file():
            return (
                f"data.tokenizer '{folder}' has no {TOKENIZER}, only {name} ({form}); convert it where transformers is "
                f'installed: python -c "from transformers import AutoTokenizer; AutoTokenizer.from_pretrained('
                f"'{folder}').save_pretrained('{folder}')\""
            )
    return f"data.tokenizer '{folder}' is a folder without a {TOKENIZER}; name the folder of a tokenizer, or its file"


def read_special_tokens(folder: Path, tokenizer: Tokenizer) -> SpecialTokens:
    """Return the special tokens of a folder whose tokenizer.json is `tokenizer`.

    Raises `RequestError` for a file that cannot be read, and for a token that the tokenizer lacks.
    """
    names = token_names(folder)
    ids = read_if_there(folder / CONFIG)
    generation = read_if_there(folder / GENERATION)

    bos = _bos(folder, tokenizer, read_if_there(folder / TOKENIZER_CONFIG).get("add_bos_token"), names, ids)
    eos = _token(folder, tokenizer, "eos", names, ids)
    if eos is None:
        eos = special_tokens_of(tokenizer).eos
    stops = known(tokenizer, _ids("eos", generation)) or known(tokenizer, _ids("eos", ids))
    if eos is not None and eos not in stops:
        # A turn ends with the tokenizer's own EOS too, where the model's files name another one.
        stops = (*stops, eos)
    if bos == eos:
        # One token between two documents is enough.
        eos = None
    return SpecialTokens(bos, eos, stops)


def token_names(folder: Path) -> dict[str, str]:
    """Return the special tokens that a folder names, such as `<s>`, by the kind that they are, such as `bos_token`."""
    config = read_if_there(folder / TOKENIZER_CONFIG)
    # Older versions of transformers wrote the names of the tokens into a file of their own.
    found = read_if_there(folder / SPECIAL_TOKENS_MAP) | {key: name for key, name in config.items() if name}
    names: dict[str, str] = {}
    for kind, name in found.items():
        if isinstance(name, dict):
            name = name.get("content")
        if kind.endswith("_token") and isinstance(name, str) and name:
            names[kind] = name
    return names


def _bos(folder: Path, tokenizer: Tokenizer, add: Any, names: dict[str, str], ids: dict[str, Any]) -> int | None:
    """Return the token that is put before a text: `add` (add_bos_token) decides, else the post-processor does."""
    if add is True:
        return _token(folder, tokenizer, "bos", names, ids)
    if add is False:
        return None
    before = _put_before(tokenizer)
    if len(before) > 1:
        raise RequestError(
            f"data.tokenizer '{folder}' puts {len(before)} tokens before each text (ids {before}), and one at most can "
            f"be; name its {TOKENIZER} to put none"
        )
    if before and not known(tokenizer, before):
        raise RequestError(
            f"data.tokenizer '{folder}' puts token {before[0]} before each text, which its {TOKENIZER} lacks; put "
            "the right file there"
        )
    return before[0] if before else None


def _put_before(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that the post-processor puts before a text."""
    # Its own tokens are texts that every tokenizer knows; nearly always the first one is enough.
    for text in tokenizer.get_vocab():
        encoding = tokenizer.encode(text)
        # None for the tokens of the post-processor, 0 for the tokens of the text.
        sequences = encoding.sequence_ids
        if 0 in sequences:
            return encoding.ids[: sequences.index(0)]
    return []


def _token(
    folder: Path, tokenizer: Tokenizer, kind: Literal["bos", "eos"], names: dict[str, str], ids: dict[str, Any]
) -> int | None:
    """Return the id of a token by its name, or, where it has no name, the first one of config.json that is there."""
    name = names.get(f"{kind}_token")
    if name is None:
        return next(iter(known(tokenizer, _ids(kind, ids))), None)
    token = tokenizer.token_to_id(name)
    if token is None:
        raise RequestError(
            f"data.tokenizer '{folder}' names {kind}_token {short(name)}, which its {TOKENIZER} lacks; put the two "
            "files of one tokenizer there"
        )
    return token


def _ids(kind: Literal["bos", "eos"], config: dict[str, Any]) -> tuple[int, ...]:
    """Return the ids of a kind of token in config.json or generation_config.json, which may be one, several or none."""
    value = config.get(f"{kind}_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
