"""The small files of a folder of Hugging Face: their names, how large they may be, and what their keys may be.

`model_config.py` says more about the keys of `config.json` that shape the model. No jax here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.config import RequestError
from jaxdist.files.json_files import LARGEST, LARGEST_LISTING, json_object, read_bytes
from jaxdist.files.json_schema import (
    COUNT,
    FLAG,
    NULL,
    NUMBER,
    PATH,
    TEXT,
    TOKEN_ID,
    TOKEN_IDS,
    Rule,
    Rules,
    list_of,
    object_of,
    wrong_values,
)

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
JINJA_TEMPLATE = "chat_template.jinja"
JSON_TEMPLATE = "chat_template.json"

SOURCE = "source.json"
"""The file of a run with more about the folder that it began with: its path, the longest sequence, and the dtype of its
weights."""

KEPT_TOKENS = "special_tokens.json"
"""The file of a run that keeps its special tokens, beside its tokenizer.json."""


class SmallFile(NamedTuple):
    """A file beside the weights."""

    largest: int = LARGEST
    """Bytes of the largest that is read."""
    rules: Rules | None = None
    """What the keys may be; None for a file that is not read key by key."""
    needed: tuple[str, ...] = ()
    """Keys without which it says nothing."""
    kept: bool = True
    """Whether a run keeps a copy, which an export writes again."""


SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TOKEN = TEXT | object_of("an object with its content", {"content": TEXT}) | NULL
TEMPLATE = object_of("an object with a name and a template", {"name": TEXT, "template": TEXT})
TEMPLATES = {"chat_template": TEXT | list_of(TEMPLATE, "a list of objects with a name and a template") | NULL}
ADDED_TOKEN = object_of("an object with its content", {"content": TEXT})


def _are_added_tokens(value: Any) -> bool:
    """Return whether a value is an object of tokens by their ids."""
    if not isinstance(value, dict):
        return False
    return all(TOKEN_ID.holds(_number(key)) for key in value) and all(map(ADDED_TOKEN.holds, value.values()))


def _number(digits: str) -> int | None:
    return int(digits) if len(digits) <= 10 and digits.isascii() and digits.isdecimal() else None


def _names_files(value: Any) -> bool:
    """Return whether a value is an object of texts that is not empty."""
    return isinstance(value, dict) and bool(value) and all(map(TEXT.holds, value.values()))


def _are_tokens(value: Any) -> bool:
    """Return whether a value is a list of tokens, or an object of tokens by their roles."""
    if not isinstance(value, list | dict):
        return False
    return all(map((TEXT | ADDED_TOKEN).holds, value.values() if isinstance(value, dict) else value))


RANK = Rule("a whole number above 0", lambda value: COUNT.holds(value) and value > 0)
POSITIVE = Rule("a number above 0, and below 1e9", lambda value: NUMBER.holds(value) and 0 < value < 1e9)


def _are_positive(value: Any) -> bool:
    """Return whether a value is an object of positive numbers."""
    return isinstance(value, dict) and all(map(POSITIVE.holds, value.values()))


MORE_TOKENS: dict[str, Rule] = dict.fromkeys(
    ("extra_special_tokens", "additional_special_tokens"), Rule("a list of tokens", _are_tokens) | NULL
)

FILES: Mapping[str, SmallFile] = {
    CONFIG: SmallFile(
        rules={"architectures": list_of(TEXT, "a list of texts") | NULL}
        | {"model_type": TEXT | NULL}
        | dict.fromkeys(("max_position_embeddings", "n_positions"), COUNT | NULL)
        | dict.fromkeys(("bos_token_id", "eos_token_id"), TOKEN_IDS)
    ),
    GENERATION: SmallFile(
        rules=dict.fromkeys(("bos_token_id", "eos_token_id"), TOKEN_IDS)
        | dict.fromkeys(("temperature", "top_p", "repetition_penalty"), NUMBER | NULL)
        | {"top_k": COUNT | NULL, "do_sample": FLAG | NULL}
    ),
    # The package `tokenizers` reads it.
    TOKENIZER: SmallFile(LARGEST_LISTING),
    TOKENIZER_CONFIG: SmallFile(
        rules=dict.fromkeys(SPECIAL, TOKEN)
        | dict.fromkeys(("add_bos_token", "add_eos_token"), FLAG | NULL)
        | {"added_tokens_decoder": Rule("an object of tokens by their ids", _are_added_tokens) | NULL}
        | MORE_TOKENS
        | TEMPLATES
    ),
    SPECIAL_TOKENS_MAP: SmallFile(rules=dict.fromkeys(SPECIAL, TOKEN) | MORE_TOKENS),
    JINJA_TEMPLATE: SmallFile(),
    JSON_TEMPLATE: SmallFile(rules=TEMPLATES),
    # Its keys are tokens.
    ADDED_TOKENS: SmallFile(rules={}),
    "vocab.json": SmallFile(LARGEST_LISTING),
    "merges.txt": SmallFile(LARGEST_LISTING),
    "tokenizer.model": SmallFile(LARGEST_LISTING),
    INDEX: SmallFile(
        LARGEST_LISTING,
        {"weight_map": Rule("an object with the file of each tensor", _names_files)},
        needed=("weight_map",),
        kept=False,
    ),
    ADAPTER_CONFIG: SmallFile(
        rules={"peft_type": TEXT, "base_model_name_or_path": TEXT | NULL, "bias": TEXT, "use_rslora": FLAG | NULL}
        | {"r": RANK, "lora_alpha": POSITIVE}
        | {"alpha_pattern": Rule("an object of such numbers", _are_positive) | NULL},
        needed=("peft_type", "base_model_name_or_path", "r", "lora_alpha"),
        kept=False,
    ),
    SOURCE: SmallFile(rules={"path": PATH, "maximum": COUNT, "dtype": TEXT}, kept=False),
    KEPT_TOKENS: SmallFile(
        rules={"bos": TOKEN_ID | NULL, "eos": TOKEN_ID | NULL, "stops": list_of(TOKEN_ID, "a list of token ids")},
        needed=("bos", "eos", "stops"),
        kept=False,
    ),
}
"""Every small file that is read or kept, by its name."""

SMALL_FILES = tuple(name for name, file in FILES.items() if file.kept)
"""Files that a run keeps."""


def read_content(path: Path, links: bool = True) -> bytes:
    """Return the content of a file of `FILES`. Raises `RequestError` where it is no such file, or too large."""
    return read_bytes(path, FILES[path.name].largest, links)


def read_file(path: Path, links: bool = True) -> dict[str, Any]:
    """Return the object in a JSON file of `FILES`. Raises `RequestError`, with a sentence for each wrong value."""
    return checked(read_content(path, links), path)


def read_if_there(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of `FILES`, and an empty one where there is no such file."""
    return read_file(path) if os.path.lexists(path) else {}


def checked(content: bytes, path: Path) -> dict[str, Any]:
    """Return the object that is the content of a file of `FILES`. Raises `RequestError` as `read_file` does."""
    file = FILES[path.name]
    assert file.rules is not None, path
    found = json_object(content, str(path))
    problems = [f"it has no {key}" for key in file.needed if key not in found]
    problems += wrong_values(file.rules, found)
    if problems:
        raise RequestError(*(f"'{path}': {problem}; correct it, or put the right file there" for problem in problems))
    return found
