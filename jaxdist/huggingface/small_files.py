"""The small files beside the weights of a folder that is written: configuration, generation, tokenizer, chat template.

They are those of the folder that the run began with, as it keeps them, with what the run determines itself written
over. A run that began with no folder gets new ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdist.config import ModelConfig, RequestError
from jaxdist.files.json_files import decoded
from jaxdist.huggingface.added_tokens import kept_beside, with_added_tokens
from jaxdist.huggingface.folder import KEPT
from jaxdist.huggingface.given_tokenizer import GivenTokenizer, load_tokenizer
from jaxdist.huggingface.model_config import to_json
from jaxdist.huggingface.model_types import MODEL_TYPES
from jaxdist.huggingface.safetensors_file import SPELLED
from jaxdist.huggingface.schema import (
    CONFIG,
    GENERATION,
    SMALL_FILES,
    SOURCE,
    SPECIAL_TOKENS_MAP,
    TOKENIZER,
    TOKENIZER_CONFIG,
    checked,
    read_content,
    read_file,
)
from jaxdist.huggingface.special_tokens import SpecialTokens

CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}
"""By which transformers takes a tokenizer.json as it is."""


def small_files(
    kept: Mapping[str, bytes], model: ModelConfig, dtype: str, tokenizer: GivenTokenizer | None
) -> dict[str, bytes]:
    """Return the content of each file by its name.

    `kept` are the files of the folder that the run began with; `dtype` is that of the weights, such as bfloat16, and
    `tokenizer` that of the run, where it has one. Raises `RequestError` where transformers has no such model.
    """
    source = checked(kept[CONFIG], Path(KEPT, CONFIG)) if CONFIG in kept else {}
    config = {**_ids(tokenizer), **source, **_config(source, model, dtype)}
    files = {CONFIG: _json(config), GENERATION: _generation(kept, config, tokenizer)}
    return files | tokenizer_files(kept, model, tokenizer)


def tokenizer_files(
    kept: Mapping[str, bytes], model: ModelConfig, tokenizer: GivenTokenizer | None
) -> dict[str, bytes]:
    """Return the content of each file of the tokenizer and of its chat template, as `small_files` does."""
    if tokenizer is not None and not _same(kept, tokenizer):
        return _own_tokenizer(tokenizer, model)
    files = {name: content for name, content in kept.items() if name not in (CONFIG, GENERATION)}
    if TOKENIZER_CONFIG in kept and CONFIG not in kept:
        # Where no class is named, transformers takes that of the model, which may split texts in its own way.
        config = checked(kept[TOKENIZER_CONFIG], Path(KEPT, TOKENIZER_CONFIG))
        if not config.get("tokenizer_class"):
            files[TOKENIZER_CONFIG] = _json({**config, **CLASS})
    return files


def read_kept(run: Path) -> dict[str, bytes]:
    """Return the small files that a run keeps, by their names; none where it began with no folder."""
    folder = run / KEPT
    names = [name for name in SMALL_FILES if os.path.lexists(folder / name)]
    return {name: read_content(folder / name, links=False) for name in names}


def kept_dtype(run: Path) -> str | None:
    """Return the dtype of the weights that a run began with; None where it began with no folder."""
    path = run / KEPT / SOURCE
    if not os.path.lexists(path):
        return None
    dtype = read_file(path, links=False).get("dtype")
    if dtype not in SPELLED:
        raise RequestError(f"'{path}' does not give the dtype of weights; add --dtype, such as bfloat16")
    return dtype


def _config(source: Mapping[str, Any], model: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the keys of `config.json` that the run determines; `source` is the one that it began with, or empty."""
    kind = MODEL_TYPES.get(source.get("model_type", ""))
    if kind is None:
        # A scaling of positions is for so much longer a sequence.
        maximum = max(model.sequence, int(model.rope.factor * model.rope.original))
        return to_json(model, maximum=maximum, dtype=dtype)
    maximum = source.get(kind.maximum, kind.maximum_default)
    return to_json(model, maximum=maximum, dtype=dtype, model_type=source["model_type"])


def _ids(tokenizer: GivenTokenizer | None) -> dict[str, Any]:
    """Return the special tokens as `config.json` gives them: without them, transformers takes those of Llama 2."""
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if tokenizer is not None:
        special = tokenizer.special
        ids["bos_token_id"] = special.bos
        ids["eos_token_id"] = list(special.stops) if len(special.stops) > 1 else _end(special)
    return ids


def _end(special: SpecialTokens) -> int | None:
    """Return the token that ends a text."""
    return special.stops[0] if special.stops else special.eos


def _generation(kept: Mapping[str, bytes], config: Mapping[str, Any], tokenizer: GivenTokenizer | None) -> bytes:
    """Return the `generation_config.json`: the one that is kept, or one for the ids in a `config.json`.

    It names every token at which the run stops, such as the one that ends an answer in a chat template which the model
    has learned. A server that loads the folder would go on behind it otherwise.
    """
    if GENERATION in kept:
        found = checked(kept[GENERATION], Path(KEPT, GENERATION))
    else:
        ids = {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        found = {name: value for name, value in ids.items() if value is not None}
    given = found.get("eos_token_id")
    named = given if isinstance(given, list) else [] if given is None else [given]
    unnamed = [token for token in (tokenizer.special.stops if tokenizer else ()) if token not in named]
    if GENERATION in kept and not unnamed:
        return kept[GENERATION]
    return _json({**found, "eos_token_id": [*named, *unnamed]} if unnamed else found)


def _same(kept: Mapping[str, bytes], tokenizer: GivenTokenizer) -> bool:
    """Return whether the tokenizer that is kept is the one of the run, which may have been given another."""
    if TOKENIZER not in kept:
        return False
    name = f"{KEPT}/{TOKENIZER}"
    text = decoded(kept[TOKENIZER], name)
    try:
        loaded = load_tokenizer(text)
    except ValueError as error:
        raise RequestError(f"'{name}' is not a tokenizer ({error}); put the right file there") from error
    wanted = tokenizer.load().get_vocab()
    if loaded.get_vocab() == wanted:
        return True
    with_added_tokens(text, loaded, kept_beside(kept, Path(KEPT)), Path(KEPT))
    return loaded.get_vocab() == wanted


def _own_tokenizer(tokenizer: GivenTokenizer, model: ModelConfig) -> dict[str, bytes]:
    """Return the files of a tokenizer that came with no folder, so that `AutoTokenizer` loads it."""
    loaded = tokenizer.load()
    special = tokenizer.special
    names = {}
    for key, token in (("bos_token", special.bos), ("eos_token", _end(special))):
        if token is not None:
            names[key] = loaded.id_to_token(token)
    config = {
        **CLASS,
        "model_max_length": model.sequence,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": special.bos is not None,
        **names,
    }
    # Older programs look for the names of tokens there.
    more = {SPECIAL_TOKENS_MAP: _json(names)} if names else {}
    return {TOKENIZER: tokenizer.text.encode(), TOKENIZER_CONFIG: _json(config), **more}


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
