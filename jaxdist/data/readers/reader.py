"""What a reader is: how files of one form are recognised, and what they yield."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from jaxdist.config import RequestError
from jaxdist.config.text_template import TEXT
from jaxdist.config.values import IdType
from jaxdist.data.heads import head_of

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Int

    from jaxdist.data.chats.rendering import Rendered
    from jaxdist.data.tokens import Tokens

Row = TypeVar("Row")

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
    rows: tuple[Rendered, ...] = ()
    """Of a conversation, the texts to learn from, each by itself and with what is learned of it."""
    forged: bool = False
    """Whether a text that a user has given holds a special token."""
    pair: bool = False
    """Whether its two rows are answers to the same, the better one first."""
    uncalled: bool = False
    """Whether what is learned of a conversation lacks a tool that the assistant calls."""
    continued: bool = False
    """Whether no chat template has written it: it is a text and what continues it."""


class WholeRows(Protocol):
    """Makes documents of rows with several keys, of which none is the text of the document by itself."""

    def keys(self, present: Iterable[str]) -> list[str]:
        """Return those of the keys of a file that are read. Raises `ValueError` with what is wrong with them."""

    def document(self, row: Mapping[str, Any], where: object) -> Document | None:
        """Return the document of a row; None for an empty one. Raises `RequestError` that says `where` it is."""


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
    whole: WholeRows | None = None
    """Makes a document of a row as a whole; None where its text does."""
    on_empty: Callable[[], None] = uncounted
    """Is called for each text that is empty, which is no document."""
    bad: Callable[[RequestError], None] = refuse
    """Is called with what is wrong with a row, by readers of rows, and raises it unless the row is to be skipped."""
    start: int = 0
    """The place in the file from which on its documents are wanted: 0, or one of the `places` of its reader."""
    stop: int | None = None
    """The place before which these documents begin: another one of them; None for the end of the file."""


def every_step(places: Iterable[int], step: int) -> Iterator[int]:
    """Yield, of ascending places, the first one at or after each multiple of `step`, but 0."""
    due = step
    for place in places:
        if place >= due:
            yield place
            due = (place // step + 1) * step


def documents_of_rows(
    rows: Iterable[Row], document_of: Callable[[Row], Document | None], opened: OpenFile
) -> Iterator[Document]:
    """Yield a document for each row of a file, skipping empty ones.

    `document_of` returns that of a row, or raises `RequestError` with what is wrong with the row.
    """
    for row in rows:
        try:
            document = document_of(row)
        except RequestError as error:
            opened.bad(error)
            continue
        if document:
            yield document
        else:
            opened.on_empty()


def of_text(text: str) -> Document | None:
    """Return a whole text as a document; None for an empty one."""
    return Document(text, True) if text else None


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


def without_check(path: Path, text: str, whole: WholeRows | None) -> None:
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
    whether it reads the file at once or from place to place. None: a file of this form is read by one process, as each
    compressed one is.
    """
    describe: Callable[[Path, int], str] = count_documents
    """Returns what the summary calls the data, from their path and the number of their documents."""
    keyed: bool = False
    """Whether rows have keys, so that data.text says where their text is."""
    has_splits: bool = False
    """Whether the names of such files say which of them are held out, as those of data sets on the hub do."""
    needs: str = ""
    """The package that reads them, of the extra `data`; none where Python and numpy do."""
    keys: Callable[[Path], list[str]] | None = None
    """Returns the keys of a file, of its first row where each has its own; None where rows have no keys."""
    check: Callable[[Path, str, WholeRows | None], None] = without_check
    """Raises `RequestError` for a file that cannot be read as a whole, or lacks keys that are read as `OpenFile` says;
    called for all files before the first of them is read."""
    ratio: int = 1
    """Bytes of text for a byte of a file, about."""


@dataclass(frozen=True, kw_only=True)
class TokenReader(Reader):
    """A form of files that hold token ids, which are used in place."""

    open: Callable[[Path, Expected, OnRead], TokenFile]
    """Returns the tokens of a file, after a look at all of them; calls what it is given with the numbers of bytes read.

    Raises `RequestError` with the reason why the file is not accepted, and `OSError`.
    """
    documents: Callable[[Path, int], Iterator[Int[np.ndarray, " documents"]]] | None = None
    """Yields the tokens of each document of a file that was accepted, some at a time, or those of samples where files
    share what is read (`Expected.sharing`). None: nothing says it."""


class Expected(NamedTuple):
    """What the ids in a file of tokens should be."""

    vocab: int
    """The number of ids of the model."""
    entries: int | None = None
    """The number of ids of its tokenizer; None without one."""
    dtype: IdType = "auto"
    """Their type, as data.dtype says it."""
    sharing: int = 0
    """Parts among which what a start reads is divided, where samples are read (`data.token_samples`), a file or less
    each; 0 where all is read."""


class TokenFile(NamedTuple):
    """A file of tokens that was accepted."""

    tokens: Tokens
    form: str = ""
    """What the summary adds to its name: how it was read, where that is not the usual way."""
    documents: int = 0
    """How many it has, where an index says it."""


def check_ids(tokens: Tokens, expected: Expected, on_read: OnRead, also: Callable[[], str] = str) -> None:
    """Raise `RequestError` if an id is no id of a model with so many of them. Reads all tokens, or samples.

    `also` returns what else may be the cause than too small a vocabulary, or raises `RequestError` where it is surely
    another. Tokens of uint32 that are too large for int32 are negative ids.
    """
    vocab = expected.vocab
    if expected.sharing:
        found = (_first_ids(tokens), *tokens.samples(expected.sharing))
        largest = max((int(ids.max()) for ids in found if ids.size), default=-1)
    else:
        largest = tokens.largest(on_read)
    if largest < vocab:
        return
    others = also()
    if largest >= 1 << 31:
        raise RequestError(
            f"'{tokens.path}' holds the negative id {largest - (1 << 32)}; ids begin at 0, so leave out what is below, "
            "and write it again"
        )
    raise RequestError(
        f"'{tokens.path}' holds token id {largest} but model.vocab is {vocab}; set model.vocab to at least "
        f"{largest + 1}{others}"
    )


def _first_ids(tokens: Tokens) -> Int[np.ndarray, " n"]:
    """Return those of the first bytes of a file, which are read in any case."""
    import numpy as np

    dtype = np.dtype(tokens.dtype).newbyteorder("<")
    start = head_of(tokens.path)[tokens.offset :]
    return np.frombuffer(start, dtype, len(start) // dtype.itemsize)
