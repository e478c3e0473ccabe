"""Write tokens for other programs: headerless little-endian ids, as nanoGPT and many others read them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.data.streams import Streams
from jaxdist.data.tokens import CHUNK, Tokens
from jaxdist.huggingface.schema import KEPT_TOKENS, TOKENIZER
from jaxdist.huggingface.special_tokens import to_json

TRAIN = "train.bin"
"""In an exported folder, the tokens to train on. nanoGPT names both so; here `val.bin` is validation by its name."""

VALIDATION = "val.bin"
"""In an exported folder, the tokens that are held out."""


def write_folder(streams: Streams, folder: Path) -> dict[str, Any]:
    """Make a folder with both parts in files of their own, and the tokenizer, so that it is a data.tokenizer too.

    Returns what was written. Raises `OSError`.
    """
    folder.mkdir()
    parts = {TRAIN: streams.train, VALIDATION: streams.validation}
    dtype = _dtype(parts.values())
    for name, tokens in parts.items():
        _write(folder / name, [tokens], dtype)
    if streams.tokenizer:
        (folder / TOKENIZER).write_text(streams.tokenizer.text, encoding="utf-8")
        (folder / KEPT_TOKENS).write_text(to_json(streams.special), encoding="utf-8")
    return _written(streams, dtype, sorted(path.name for path in folder.iterdir()))


def write_file(streams: Streams, path: Path, name: str) -> dict[str, Any]:
    """Write the tokens to train on, and then those that are held out, into one file, which will be called `name`.

    Returns what was written. Raises `OSError`.
    """
    parts = (streams.train, streams.validation)
    dtype = _dtype(parts)
    _write(path, parts, dtype)
    return _written(streams, dtype, [name])


def _dtype(parts: Iterable[Tokens]) -> str:
    return "uint32" if any(part.dtype == "uint32" for part in parts) else "uint16"


def _write(path: Path, parts: Iterable[Tokens], dtype: str) -> None:
    with path.open("wb") as file:
        for tokens in parts:
            for start in range(0, tokens.length, CHUNK):
                ids = tokens.read(start, min(start + CHUNK, tokens.length))
                file.write(ids.astype(np.dtype(dtype).newbyteorder("<"), copy=False).data)


def _written(streams: Streams, dtype: str, files: list[str]) -> dict[str, Any]:
    return {
        "files": files,
        "dtype": dtype,
        "training": streams.train.length,
        "held_out": streams.validation.length,
    }
