"""What a reader is: how files of one form are recognised, and what they yield."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxdist.config import RequestError
from jaxdist.config.text_template import TEXT
from jaxdist.config.values import IdType

if TYPE_CHECKING:
    from jaxdist.data.tokens import Tokens

OnRead = Callable[[int], None]
"""Is called with the numbers of bytes as they are read."""


def unseen(count: int) -> None:
    """Ignore the bytes that are read."""


def uncounted() -> None:
    """Ignore a text that is empty."""


class Document(NamedTuple):
    """A document, or a piece of one."""

    text: str
    ends: bool
    """Whether the document ends here, so that an end-of-text token follows."""
    begins: bool = True
    """Whether the document begins here, so that a BOS token precedes where the tokenizer has one."""


def refuse(error: RequestError) -> None:
    """Raise what is wrong with a row."""
    raise error


class OpenFile(NamedTuple):
    """A file that is open at `start`, and how to read it."""

    file: BufferedReader
    path: Path
    """For messages."""
    on_read: OnRead
    block: int
    """Bytes of the pieces into which a reader cuts a text that does not say where its documents end."""
    text: str = TEXT
    """Where the text of a row is, as data.text says it."""
    on_empty: Callable[[], None] = uncounted
    """Is called for each text that is empty, which is no document."""
    bad: Callable[[RequestError], None] = refuse
    """Is called with what is wrong with a row, by readers of rows, and raises it unless the row is to be skipped."""
    start: int = 0
    """The place in the file from which on its documents are wanted: 0, or one of the `places` of its reader."""
    stop: int | None = None
    """The place before which these documents begin: another one of them; None for the end of the file."""


NAMED = 5
"""Keys that a sentence names at most."""


def named_keys(keys: Iterable[str]) -> str:
    """Return the keys of a row in words."""
    names = sorted(keys)
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return f"{names[:NAMED]}{more}"


def count_documents(root: Path, documents: int) -> str:
    """Describe data by the number of their documents."""
    return f"{root}, {documents} documents"


def without_check(path: Path, text: str) -> None:
    """Take a file as it is."""


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A form of files. Nothing here may import numpy before a file is read: requests are checked without it."""

    key: str
    """Its name in fingerprints and in the cache: with another key, runs do not find their data again."""
    name: str
    """What messages call it."""
    takes: Callable[[Path, str], bool]
    """Returns whether a file is of this form, by its ending or its content, and by the keys of its rows with data.text.

    The file may be absent, or a folder. Raises `OSError`.
    """


@dataclass(frozen=True, kw_only=True)
class TextReader(Reader):
    """A form of files that hold text."""

    documents: Callable[[OpenFile], Iterator[Document]]
    """Yields the documents of a file in little memory. Raises `RequestError` with the line or the byte of an error.

    A reader without `places` need not look at `OpenFile.start` and `OpenFile.stop`.
    """
    places: Callable[[OpenFile, int], Iterator[int]] | None = None
    """Yields places of a file at which it may be divided, so that several processes read it: in order, the first one
    at or after each multiple of a number of bytes, but 0.

    They depend on nothing but the content of the file and the number. `documents` must yield the same documents
    whether it reads the file at once or from place to place: lines, or groups of rows by where they lie in the file.
    None: a file of this form is read by one process, as each compressed one is.
    """
    describe: Callable[[Path, int], str] = count_documents
    """Returns what the summary calls the data, from their path and the number of their documents."""
    keyed: bool = False
    """Whether rows have keys, so that data.text says where their text is."""
    has_splits: bool = False
    """Whether the names of such files say which of them are held out, as those of data sets on the hub do."""
    needs: str = ""
    """The package that reads them, of the extra `data`; none where Python and numpy do."""
    check: Callable[[Path, str], None] = without_check
    """Raises `RequestError` for a file that cannot be read as a whole, with data.text; called for all files before the
    first of them is read."""
    ratio: int = 1
    """Bytes of text for a byte of a file, about."""


@dataclass(frozen=True, kw_only=True)
class TokenReader(Reader):
    """A form of files that hold token ids, which are used in place."""

    open: Callable[[Path, Expected, OnRead], TokenFile]
    """Returns the tokens of a file, after a look at all of them; calls what it is given with the numbers of bytes read.

    Raises `RequestError` with the reason why the file is not accepted, and `OSError`.
    """


class Expected(NamedTuple):
    """What the ids in a file of tokens should be."""

    vocab: int
    """The number of ids of the model."""
    entries: int | None = None
    """The number of ids of its tokenizer; None without one."""
    dtype: IdType = "auto"
    """Their type, as data.dtype says it."""


class TokenFile(NamedTuple):
    """A file of tokens that was accepted."""

    tokens: Tokens
    form: str = ""
    """What the summary adds to its name: how it was read, where that is not the usual way."""


def check_ids(tokens: Tokens, vocab: int, on_read: OnRead, also: str = "", signed: bool = False) -> None:
    """Raise `RequestError` if an id is no id of a model with `vocab` of them. Reads all tokens.

    `also` is what else may be the cause than too small a vocabulary. If the ids are `signed`, tokens of uint32 that are
    too large for int32 are negative ids.
    """
    largest = tokens.largest(on_read)
    if signed and largest >= 1 << 31:
        raise RequestError(
            f"'{tokens.path}' holds the negative id {largest - (1 << 32)}; ids begin at 0, so write it again"
        )
    if largest >= vocab:
        raise RequestError(
            f"'{tokens.path}' holds token id {largest} but model.vocab is {vocab}; set model.vocab to at least "
            f"{largest + 1}{also}"
        )
