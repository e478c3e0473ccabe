"""Folders of data sets of Hugging Face: the shards that `save_to_disk` lists, and which split the names of files say.

On the hub, and below a folder that was saved with splits, a file such as `data/validation-00000-of-00001.parquet` or
`validation/data-00000-of-00001.arrow` is validation data by its name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from jaxdist.config import RequestError
from jaxdist.files.json_files import LARGEST_LISTING, read_json

STATE = "state.json"
"""The file in which `save_to_disk` lists the shards of a data set."""

INFO = "dataset_info.json"
"""The file that is beside it."""

SPLITS = "dataset_dict.json"
"""The file in which it lists the splits, each of which is a folder."""

CACHE = re.compile(r"cache-[0-9a-f]+(?:_\d+_of_\d+)?\.arrow")
"""What `datasets` calls what it has made of a data set by `map` and `filter`, beside its files."""

Split = Literal["train", "val", "test"]

WORDS: dict[str, Split] = {"train": "train", "training": "train"}
WORDS |= dict.fromkeys(("val", "valid", "validation", "dev"), "val")
WORDS |= dict.fromkeys(("test", "testing", "eval", "evaluation"), "test")
"""The words by which the hub knows the splits of a data set."""


def shards_of(folder: Path) -> tuple[Path, ...] | None:
    """Return the files of a data set that was saved in a folder, in order; None for any other folder.

    Other files beside them, such as `cache-*.arrow`, are no part of it. Raises `RequestError` where a file or a split
    is missing, and `OSError`.
    """
    if (folder / SPLITS).is_file():
        _check_splits(folder)
    if not (folder / STATE).is_file() or not (folder / INFO).is_file():
        return None
    state = read_json(folder / STATE, LARGEST_LISTING)
    try:
        names = [str(file["filename"]) for file in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise RequestError(f"'{folder / STATE}' lists no files of a data set; save the data set again") from error
    if state.get("_indices_data_files"):
        raise RequestError(
            f"'{folder}' was saved with a selection of its rows, by an old version of datasets; save it again with a "
            "newer one"
        )
    shards = tuple(folder / name for name in names)
    missing = [path.name for path in shards if not path.is_file()]
    if missing:
        raise RequestError(f"'{folder / STATE}' names '{missing[0]}', which is not there; copy the whole folder again")
    return shards


def split_of(parts: tuple[str, ...]) -> Split:
    """Return the split that a file belongs to, from its name, or else from the nearest folder whose name says one.

    `parts` are the names below the folder of the data set; the last one is that of the file.
    """
    return next((split for split in map(split_in, reversed(parts)) if split), "train")


def split_in(name: str) -> Split | None:
    """Return the split that a name says, or None."""
    return next((WORDS[word] for word in re.split(r"[^a-z]+", name.lower()) if word in WORDS), None)


def _check_splits(folder: Path) -> None:
    splits = read_json(folder / SPLITS).get("splits")
    if not isinstance(splits, list):
        raise RequestError(f"'{folder / SPLITS}' lists no splits; save the data set again")
    for name in splits:
        if not (folder / str(name) / STATE).is_file():
            raise RequestError(f"'{folder / SPLITS}' names '{name}', which is not there; copy the whole folder again")
