"""What names the data to train on: data.path, or the sources of data.mixture.

Paths with weights in data.path, such as "web.jsonl*0.7,code/*0.3", mean a mixture.
"""

from __future__ import annotations

import glob
import os

from jaxdist.config import DataConfig
from jaxdist.config.mixture import WEIGHTED, MixtureConfig, of_parts
from jaxdist.data.naming.named_files import holds_tokens, parts


def training_paths(data: DataConfig) -> tuple[str | None, ...]:
    """Return what names the files of each source, as data.path does."""
    if data.mixture:
        return tuple(source.path for source in data.mixture.sources)
    return (data.path,)


def training_tokens(data: DataConfig) -> str | None:
    """Return what names files of tokens among the data to train on; None where all are text."""
    return next((path for path in training_paths(data) if holds_tokens(path)), None)


def mixture_of(text: str | None) -> MixtureConfig | None:
    """Return the mixture that a data.path means; None for one that names a single source.

    A name that exists, and a pattern that a file has, is meant before a path with a weight. Raises `ValueError` where
    one part has a weight and another has none.
    """
    found = parts(text)
    if not any(WEIGHTED.fullmatch(part) and not _names_files(part) for part in found):
        return None
    return of_parts(found)


def _names_files(part: str) -> bool:
    return os.path.lexists(part) or any(glob.iglob(part, recursive=True))
