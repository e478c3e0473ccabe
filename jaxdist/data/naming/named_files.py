"""The files that data.path and data.validation_path name: one, a folder, a pattern, a list, or several with commas.

An existing file or folder is meant before anything else, so that a name may hold commas and stars. Names are put in
order by their characters, so that all hosts read the same stream.
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxdist.config import RequestError
from jaxdist.config.text_template import TEXT
from jaxdist.data.compressed import ending_of
from jaxdist.data.known import MANY, known
from jaxdist.data.naming.addresses import is_address
from jaxdist.data.naming.dataset_folders import CACHE, shards_of, split_in, split_of
from jaxdist.data.readers import READERS, is_token_file, reader_of, remember
from jaxdist.data.readers.megatron import bin_of, index_of
from jaxdist.data.readers.plain_text import PLAIN_TEXT
from jaxdist.data.readers.reader import TextReader
from jaxdist.files import digest

TXT = ".txt"
"""The ending of texts; a list of files has it too."""

LONGEST_LIST = 4 << 20
"""Bytes of the longest list of files. A longer .txt is a text."""

VERSION = 1
"""Version of the readers of files; increase it when another one takes a file."""

LISTS = ("['", '["')
"""How lists of Python and TOML begin, which are not read."""

PART_OF_DATA = re.compile(r"(?:^|[-_.])(?P<kind>val|test)(?:id|idation)?(?:[-_.]|$)", re.IGNORECASE)
"""How the names of files of tokens say that these are not to be trained on."""

ENDINGS_NAMED = 3
"""Endings of files that are left out which the summary names at most."""


class NamedFiles(NamedTuple):
    """The files that a text names, in order."""

    files: tuple[Path, ...]
    """They need not be there, where they are named one by one."""
    left_out: tuple[Path, ...] = ()
    """Files of a folder or a pattern that are empty, or of no form that is read beside the others."""

    @property
    def others(self) -> str:
        """What is left out, in words."""
        if not self.left_out:
            return ""
        endings = Counter(path.suffix.lower() or path.name for path in self.left_out).most_common()
        words = [f"{count:,} {ending}" for ending, count in endings[:ENDINGS_NAMED]]
        rest = sum(count for _, count in endings[ENDINGS_NAMED:])
        return " and ".join([", ".join(words), *([f"{rest:,} more"] if rest else [])])


def named_by(text: str | None, key: str = TEXT) -> NamedFiles:
    """Return the files that a text names; none for None. In a folder, `key` is what data.text says of their rows.

    Raises `OSError`, and `RequestError` where a data set lacks a file that it lists.
    """
    found = [_expanded(part, key) for part in parts(text)]
    files = tuple(path for one in found for path in _with_their_tokens(one.files))
    return NamedFiles(files, tuple(path for one in found for path in one.left_out))


def holds_tokens(text: str | None) -> bool:
    """Return whether a text names files of tokens, so that no tokenizer is needed to read them."""
    try:
        return any(map(is_token_file, named_by(text).files[:1]))
    except (OSError, RequestError):
        # Why they cannot be read is said where they are opened.
        return False


def by_their_names(text: str | None, named: NamedFiles) -> tuple[NamedFiles, NamedFiles]:
    """Return the files to train on, and those that are validation by their names, such as `val.bin`.

    Names count of files of tokens and of data sets, and not of other texts. Those of a test are left out. A file that
    is named by itself is what it is named as.
    """
    alone = {Path(part) for part in parts(text)}
    roots = [_root(part) for part in parts(text)]
    found: dict[str, list[Path]] = {"train": [], "val": [], "test": []}
    for path in named.files:
        found["train" if path in alone else _kind(path, roots)].append(path)
    if not found["train"]:
        return named, NamedFiles(())
    return NamedFiles(tuple(found["train"]), (*named.left_out, *found["test"])), NamedFiles(tuple(found["val"]))


def parts(text: str | None) -> tuple[str, ...]:
    """Return what stands between the commas of a text, unless it is the name of a file; nothing of an address."""
    if not text or is_address(text):
        return ()
    if "," not in text or text.startswith(LISTS) or os.path.exists(text):
        return (text,)
    return tuple(str(Path(part.strip())) for part in text.split(",") if part.strip())


def _root(part: str) -> Path:
    """Return the folder below which the names of folders count; of a pattern, what comes before its stars."""
    root = Path(part)
    while glob.has_magic(str(root)) and not root.exists():
        root = root.parent
    return root


def _kind(path: Path, roots: list[Path]) -> str:
    """Return what the name of a file says that it is for: train, val or test."""
    root = next((root for root in roots if path.is_relative_to(root)), path.parent)
    split = split_of(path.relative_to(root).parts)
    if split != "train" and _has_splits(path):
        return split
    word = PART_OF_DATA.search(path.stem)
    if word and is_token_file(path):
        return word["kind"].lower()
    return "train"


def _has_splits(path: Path) -> bool:
    reader = reader_of(path)
    return isinstance(reader, TextReader) and reader.has_splits


def _expanded(part: str, key: str) -> NamedFiles:
    """Return the files of a part without commas: those of a folder, a pattern or a list, or the one file."""
    path = Path(part)
    if path.is_dir():
        return _readable(_in_order(path), key)
    if not path.exists() and glob.has_magic(part):
        files = [Path(name) for name in sorted(glob.glob(part, recursive=True)) if os.path.isfile(name)]
        return _without_empty(files, key)
    return NamedFiles(_listed(path) or (path,))


def _with_their_tokens(files: tuple[Path, ...]) -> Iterator[Path]:
    """Yield the `.bin` of Megatron for its index, or for what the names of both begin with; once, if both are there."""
    named = set(files)
    for path in files:
        tokens = bin_of(path)
        if tokens == path or tokens not in named:
            yield tokens


def _in_order(root: Path) -> list[Path]:
    """Return the files below a folder in the order of their names, and those of a data set in its own order."""
    found: list[tuple[str, int, Path]] = []
    for folder, names in _below(root):
        shards = shards_of(folder)
        for number, path in enumerate(shards or (folder / name for name in names)):
            place = (path.parent if shards else path).relative_to(root).as_posix()
            found.append((place, number if shards else 0, path))
    return [path for _, _, path in sorted(found)]


def _below(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield folders, and the files in each, without those that are hidden; links are followed, each folder once."""
    seen = set()
    for place, below, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        # `os.walk` descends into the folders that are left in this list, in their order.
        below[:] = sorted(name for name in below if not name.startswith("."))
        yield Path(place), [name for name in names if not name.startswith(".") and Path(place, name).is_file()]


def _readable(files: Iterable[Path], key: str) -> NamedFiles:
    """Leave out what is no text and no form that is read; where there is no such file, all are texts.

    Texts beside the tokens to train on, such as the input.txt of nanoGPT beside its train.bin, are what these are of.
    """
    files, empty = _without_empty(files, key)
    of_a_form = tuple(path for path in files if _has_form(path, key))
    if not of_a_form:
        return NamedFiles(files, empty)
    tokens = tuple(path for path in of_a_form if is_token_file(path))
    if any(split_in(path.stem) == "train" for path in tokens):
        of_a_form = tokens
    read = set(of_a_form)
    return NamedFiles(of_a_form, (*empty, *(path for path in files if path not in read)))


def _has_form(path: Path, key: str) -> bool:
    """Return whether a file of a folder is called .txt or of a form that is read, and is no copy of other files."""
    if CACHE.fullmatch(path.name):
        return False
    return ending_of(path) == TXT or reader_of(path, key) != PLAIN_TEXT


def _look_at(files: Sequence[Path], text: str) -> None:
    """Find the readers of many files, with data.text, without a look at each, if these are `known`."""
    if len(files) < MANY:
        return
    with_indices = [path for file in files for path in (file, *index_of(file))]
    question = digest("readers", VERSION, text, *(reader.key for reader in READERS))
    by_key = {reader.key: reader for reader in READERS}
    keys = known(question, with_indices, lambda: [reader_of(path, text).key for path in files])
    for path, key in zip(files, keys, strict=True):
        remember(path, by_key[key], text)


def _without_empty(files: Iterable[Path], key: str) -> NamedFiles:
    sized = [(path, path.stat().st_size) for path in files]
    for text in dict.fromkeys((TEXT, key)):
        _look_at([path for path, size in sized if size], text)
    return NamedFiles(tuple(path for path, size in sized if size), tuple(path for path, size in sized if not size))


def _listed(path: Path) -> tuple[Path, ...] | None:
    """Return the files that a .txt lists, one a line, seen from here or from its folder; None if it is a text."""
    if path.suffix.lower() != TXT or not path.is_file() or path.stat().st_size > LONGEST_LIST:
        return None
    files = []
    with path.open("rb") as file:
        for line in file:
            if not line.strip():
                continue
            name = os.fsdecode(line.strip())
            listed = next((one for one in (name, os.path.join(path.parent, name)) if os.path.isfile(one)), None)
            if listed is None:
                return None
            # `ls *.txt > list.txt` lists the list.
            if not path.samefile(listed):
                files.append(Path(listed))
    return tuple(files) or None
