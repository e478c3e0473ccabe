"""A person's text as a stream of documents: files of any size in little memory, every mistake with its place."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from jaxdist.config import DataConfig, RequestError
from jaxdist.data import magics

BLOCK_BYTES, SMALLEST_BLOCK_BYTES = 64 << 10, 256
"""Plain text is cut into blocks of about so many bytes; a small file into smaller ones, so that some are held out."""

HASHED_BYTES = 1 << 20
"""How many bytes are read at a time where all of a file is hashed."""

HELD_OUT_BLOCKS = 4
"""At least so many blocks of a plain text are held out, where the smallest block allows."""

NOT_LIBRARY = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
"""Folders below the standard library that are tests or not a part of it; `config-*` is left out too."""

KINDS = {".jsonl": "jsonl", ".bin": "bin"}
KIND_NAMES = {"library": "Python's own library", "jsonl": "JSON lines", "bin": "tokens (.bin)", "text": "plain text"}

ONE_FILE = "one file is read, so join the texts first, in one .txt or in one .jsonl with a line for each text"


def _nobody(count: int) -> None:
    """Takes the numbers of bytes where nobody wants them."""


class Document(NamedTuple):
    """A text, or a piece of one."""

    text: str
    ends: bool
    """Whether the text ends here: an end-of-text token follows."""


@dataclass(frozen=True)
class Source:
    """Files that are read in order as one stream of documents."""

    kind: Literal["library", "jsonl", "bin", "text"]
    root: Path
    files: tuple[Path, ...]

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Sizes and times of change: the same before and after reading, or what was read is a mixture."""
        return tuple((s.st_size, s.st_mtime_ns) for s in map(os.stat, self.files))

    def digest(self, read: Callable[[int], None] = _nobody) -> str:
        """sha256 (hex) of kind, names below the root and content; one pass over the bytes, whose counts `read` gets."""
        total = hashlib.sha256(self.kind.encode())
        for path in self.files:
            total.update(b"\0" + path.relative_to(self.root).as_posix().encode() if path != self.root else b"")
            with reading(path), path.open("rb") as file:
                total.update(_sha256(file, read))
        return total.hexdigest()

    def documents(self, fraction: float = 0.0, read: Callable[[int], None] = _nobody) -> Iterator[Document]:
        """The documents in order: a library's files, a file's JSON lines, or blocks of a plain text.

        `fraction` is what will be held out of them; `read` gets the numbers of bytes as they are read.
        Raises `RequestError` naming the line or byte of a mistake.
        """
        if self.kind == "library":
            for path in self.files:
                with reading(path):
                    content = path.read_bytes()
                    text = content.decode("utf-8", errors="replace")
                read(len(content))
                if text:  # an empty __init__.py says nothing
                    yield Document(text, True)
            return
        with reading(self.root), self.root.open("rb") as file:
            if self.kind == "jsonl":
                yield from _json_lines(file, self.root, read)
            else:
                held_out = int(self.size * fraction / HELD_OUT_BLOCKS) if fraction else BLOCK_BYTES
                yield from _blocks(file, self.root, min(BLOCK_BYTES, max(SMALLEST_BLOCK_BYTES, held_out)), read)


def split(
    source: Source, validation: Source | None, fraction: float, read: Callable[[int], None] = _nobody
) -> Iterator[tuple[bool, Document]]:
    """(held out?, document): all of `validation` is; without it every (1/fraction)-th document of `source`.

    `read` gets the numbers of bytes as they are read.
    """
    if validation is not None:
        yield from ((False, document) for document in source.documents(read=read))
        yield from ((True, document) for document in validation.documents(read=read))
        return
    for number, document in enumerate(source.documents(fraction, read)):
        yield int((number + 1) * fraction) > int(number * fraction), document


def open_sources(config: DataConfig) -> tuple[Source, Source | None]:
    """What to train on and, where it has its own path, what to hold out. Reads no more than the first bytes of a file.

    Raises `RequestError` with every path that does not exist, is no file, is empty, or is of the wrong kind or format.
    """
    named = {"path": config.path, "tokenizer": config.tokenizer, "validation_path": config.validation_path}
    problems = [problem for name, path in named.items() if path and (problem := _file_problem(f"data.{name}", path))]
    data = {"path": config.path, "validation_path": config.validation_path}
    foreign = [problem for name, path in data.items() if path and (problem := _foreign(f"data.{name}", path))]
    problems += foreign
    source, validation = _source(config.path), config.validation_path and _source(config.validation_path)
    if config.path is None and validation:
        problems.append(
            f"data.validation_path is '{config.validation_path}' but data.path is not set; set data.path to data of "
            "the same kind, or leave out data.validation_path to hold out a part of Python's own library"
        )
    elif validation and validation.kind != source.kind and not foreign:  # names such as a.txt.gz say nothing yet
        problems.append(
            f"data.path '{config.path}' is {KIND_NAMES[source.kind]} but data.validation_path "
            f"'{config.validation_path}' is {KIND_NAMES[validation.kind]}; give two files of one kind"
        )
    elif validation and not problems and os.path.samefile(config.path, config.validation_path):
        problems.append(
            f"data.path and data.validation_path are the same file, '{config.path}'; leave out data.validation_path "
            "to hold out a part of it"
        )
    if not source.files:
        problems.append(f"'{source.root}' holds no source files of Python's library; set data.path to a text file")
    if problems:
        raise RequestError(*problems)
    return source, validation or None


def _source(path: Path | None) -> Source:
    if path is None:
        root = Path(os.__file__).parent
        files = sorted(_library(root), key=lambda file: file.relative_to(root).as_posix())
        return Source("library", root, tuple(files))
    return Source(KINDS.get(path.suffix.lower(), "text"), path, (path,))


def _library(root: Path) -> Iterator[Path]:
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in NOT_LIBRARY and not name.startswith("config-")]
        # _sysconfigdata holds the paths of the machine that Python was built on, sitecustomize those of this one
        own = (name for name in names if name.endswith(".py") and not name.startswith(("_sysconfigdata", "sitecust")))
        yield from (Path(folder, name) for name in own)


def _file_problem(knob: str, path: Path) -> str | None:
    if not path.exists():
        return f"{knob} '{path}' {_absent(path)}"
    if path.is_dir():
        return f"{knob} '{path}' is a folder; {ONE_FILE}, such as cat {path}/*.txt > all.txt"
    if not path.is_file():
        return f"{knob} '{path}' is not a regular file, and it is read more than once; copy it into one"
    if path.stat().st_size == 0:
        return f"{knob} '{path}' is empty; give a file with content"
    return None


def _absent(path: Path) -> str:
    """What is wrong with the path of no file, and what is possible: some name several files."""
    names = [name.strip(" '\"") for name in str(path).strip("[]").split(",")]
    if len(names) > 1 and all(Path(name).exists() for name in names):
        return (
            f"is a list of {len(names)} files; {ONE_FILE}, such as cat {' '.join(names)} > all{Path(names[0]).suffix}"
        )
    if any(sign in path.name for sign in "*?[") and any(path.parent.glob(path.name)):
        return f"is a pattern of names; {ONE_FILE}, such as cat {path} > all{path.suffix}"
    return "does not exist; give the path of a file"


def _foreign(knob: str, path: Path) -> str | None:
    """What to say of a file in a format that jaxdist does not read; None for others, and where there is no file."""
    if not path.is_file():
        return None
    with reading(path):
        known = magics.foreign(path)
    return f"{knob} '{path}' {known}" if known else None


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise `RequestError` in place of the `OSError` of reading the data at `path`."""
    try:
        yield
    except OSError as error:
        raise RequestError(f"'{path}' cannot be read ({error.strerror or error}); make it readable") from error


def _json_lines(file: BinaryIO, path: Path, read: Callable[[int], None]) -> Iterator[Document]:
    """A document per line; blank lines are skipped, and so are empty texts. Memory is that of the longest line."""
    for number, line in enumerate(file, start=1):
        read(len(line))
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if not line.strip():
            continue
        where = f"line {number} of '{path}'"
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise RequestError(f"{where} is not utf-8 text (byte {error.start + 1} of it); convert the file") from error
        except (ValueError, RecursionError) as error:
            reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise RequestError(f'{where} is not JSON ({reason}); write {{"text": "..."}} on each line') from error
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str):
            has = f"the keys {sorted(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
            has = 'a "text" that is no string' if isinstance(row, dict) and "text" in row else has
            raise RequestError(f'{where} has {has}; write an object with a string "text" on each line')
        if not _is_unicode(text):
            raise RequestError(
                f"{where} has half of a surrogate pair (\\ud800 to \\udfff), which is no text; remove it"
            )
        if text:
            yield Document(text, True)


def _blocks(file: BinaryIO, path: Path, size: int, read: Callable[[int], None]) -> Iterator[Document]:
    """Blocks of about `size` bytes cut at line ends; a line longer than that is cut between two characters."""
    place = 0
    while block := file.read(size):
        block += file.readline(size) if not block.endswith(b"\n") else b""
        while (following := file.peek(1)[:1]) and b"\x80" <= following <= b"\xbf" and len(block) < 2 * size + 4:
            block += file.read(1)
        try:
            yield Document(block.decode("utf-8"), ends=not following)
        except UnicodeDecodeError as error:
            raise RequestError(
                f"'{path}' is not utf-8 text (byte {place + error.start + 1} is {block[error.start]:#04x}); convert "
                "it, or name it .bin if it holds uint16 tokens"
            ) from error
        place += len(block)
        read(len(block))


def _sha256(file: BinaryIO, read: Callable[[int], None]) -> bytes:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(HASHED_BYTES))
    while count := file.readinto(buffer):
        digest.update(buffer[:count])
        read(count)
    return digest.digest()


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
