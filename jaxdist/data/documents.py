"""Read a user's text as a stream of documents: files of any size in little memory, errors with line or byte."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path

from jaxdist.config import DataConfig, RequestError
from jaxdist.data import magics
from jaxdist.data.readers import ENDINGS, FORMS
from jaxdist.data.readers.document import Document, OnRead
from jaxdist.data.readers.json_lines import holds_lines
from jaxdist.files import blocks
from jaxdist.huggingface.tokenizer import folder_problem

BLOCK_BYTES = 64 << 10
"""Plain text is cut into blocks of about this many bytes."""

SMALLEST_BLOCK_BYTES = 256
"""Bytes of the smallest blocks. A small file is cut into smaller blocks, so that some of them can be held out."""

HELD_OUT_BLOCKS = 4
"""Number of blocks of a plain text that are held out at least, if the smallest block size allows it."""

NOT_LIBRARY = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
"""Folders below the standard library that hold tests or are not part of it; `config-*` is left out too."""

KIND_NAMES = {
    "library": "Python's own library",
    "bin": "tokens (.bin)",
    "text": "plain text",
    **{ending: form.name for ending, form in FORMS.items()},
}

ONE_FILE = "one file is read, so join the texts first, in one .txt or in one .jsonl with a line for each text"


def _ignore(count: int) -> None:
    pass


@dataclass(frozen=True)
class Source:
    """Files that are read in order, as one stream of documents."""

    kind: str
    """A key of `KIND_NAMES`."""
    root: Path
    """The folder of a library, or the first of the files."""
    files: tuple[Path, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.files)

    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Return the size and the time of modification of each file.

        If they differ before and after reading, the text that was read is a mixture of two versions.
        """
        states = [os.stat(path) for path in self.files]
        return tuple((state.st_size, state.st_mtime_ns) for state in states)

    def digest(self, on_read: OnRead = _ignore) -> str:
        """Return the SHA-256 (hex) of the kind, the names of a library's files, and the content.

        One pass over the bytes; `on_read` is called with the numbers of bytes as they are read.
        """
        total = hashlib.sha256(self.kind.encode())
        for path in self.files:
            if self.kind == "library":
                total.update(b"\0" + path.relative_to(self.root).as_posix().encode())
            with reading(path), path.open("rb") as file:
                total.update(_sha256(file, on_read))
        return total.hexdigest()

    def documents(self, fraction: float = 0.0, on_read: OnRead = _ignore) -> Iterator[Document]:
        """Yield the documents in order: the files of a library, those of files in one of `FORMS`, or blocks of texts.

        `fraction` is the part that will be held out; `on_read` is called with the numbers of bytes as they are read.
        Raises `RequestError` naming the line or byte of an error.
        """
        if self.kind == "library":
            yield from _library_documents(self.files, on_read)
            return
        size = BLOCK_BYTES
        if fraction:
            # A small file is cut into smaller blocks, so that HELD_OUT_BLOCKS of them can be held out.
            held_out = int(self.size * fraction / HELD_OUT_BLOCKS)
            size = min(BLOCK_BYTES, max(SMALLEST_BLOCK_BYTES, held_out))
        for path in self.files:
            with reading(path), path.open("rb") as file:
                if self.kind in FORMS:
                    yield from FORMS[self.kind].documents(file, path, on_read)
                else:
                    yield from _blocks(file, path, size, on_read)


def split(
    source: Source, validation: Source | None, fraction: float, on_read: OnRead = _ignore
) -> Iterator[tuple[bool, Document]]:
    """Yield the documents, each with whether it is held out.

    All documents of `validation` are held out; without it every (1/fraction)-th document of `source` is. `on_read` is
    called with the numbers of bytes as they are read.
    """
    if validation is not None:
        for document in source.documents(on_read=on_read):
            yield False, document
        for document in validation.documents(on_read=on_read):
            yield True, document
        return
    for number, document in enumerate(source.documents(fraction, on_read)):
        yield int((number + 1) * fraction) > int(number * fraction), document


def open_sources(config: DataConfig) -> tuple[Source, Source | None]:
    """Return the training data and, if it has a path of its own, the validation data.

    Reads only the first bytes of a file. Raises `RequestError` with every path that does not exist, is not a file, is
    empty, or is of the wrong kind or format.
    """
    problems = [_file_problem("data.path", config.path), _tokenizer_problem(config.tokenizer)]
    if config.path:
        problems.append(_foreign("data.path", config.path))
    held_out = paths_of(config.validation_path)
    found = [problem for problem in problems if problem]
    found += held_out_problems(held_out)
    found += _pair_problems(config, held_out)
    source = source_of(*([config.path] if config.path else []))
    if not source.files:
        found.append(f"'{source.root}' holds no source files of Python's library; set data.path to a text file")
    if found:
        raise RequestError(*found)
    return source, source_of(*held_out) if held_out else None


def paths_of(path: Path | None) -> tuple[Path, ...]:
    """Return the files that data.validation_path names: one, or several with commas between them; none for None."""
    if path is None:
        return ()
    if "," not in str(path) or path.exists():
        return (path,)
    return tuple(Path(name.strip()) for name in str(path).split(",") if name.strip())


def held_out_problems(paths: Iterable[Path]) -> list[str]:
    """Return a sentence for each of these files of data.validation_path that cannot be read, by itself."""
    problems = []
    for path in paths:
        problems += [_file_problem("data.validation_path", path), _foreign("data.validation_path", path)]
    return [problem for problem in problems if problem]


def _pair_problems(config: DataConfig, held_out: tuple[Path, ...]) -> list[str]:
    """Return a sentence for each reason why the training and the validation data do not belong together."""
    if not held_out:
        return []
    if config.path is None:
        return [
            f"data.validation_path is '{config.validation_path}' but data.path is not set; set data.path to data of "
            "the same kind, or leave out data.validation_path to hold out a part of Python's own library"
        ]
    problems = []
    kind = _kind(config.path)
    if kind == "bin" and len(held_out) > 1:
        problems.append(
            f"data.validation_path names {len(held_out)} files of tokens (.bin), of which training takes one; join "
            f"them, such as cat {' '.join(map(str, held_out))} > all.bin"
        )
    foreign = any(_foreign("data", path) for path in (config.path, *held_out))
    for path in held_out:
        # A foreign format is reported instead, because a name such as a.txt.gz does not show the kind.
        if _kind(path) != kind and not foreign:
            problems.append(
                f"data.path '{config.path}' is {KIND_NAMES[kind]} but data.validation_path '{path}' is "
                f"{KIND_NAMES[_kind(path)]}; give files of one kind"
            )
        elif config.path.is_file() and path.is_file() and config.path.samefile(path):
            problems.append(
                f"data.path and data.validation_path are the same file, '{config.path}'; leave out "
                "data.validation_path to hold out a part of it"
            )
    return problems


def source_of(*paths: Path) -> Source:
    """Return the source that reads these files, of one kind, in order; Python's own library if there are none."""
    if not paths:
        root = Path(os.__file__).parent
        files = sorted(_library(root), key=lambda file: file.relative_to(root).as_posix())
        return Source("library", root, tuple(files))
    return Source(_kind(paths[0]), paths[0], paths)


def _kind(path: Path) -> str:
    """Return the key of `KIND_NAMES` for a file."""
    ending = path.suffix.lower().removeprefix(".")
    if ending == "bin":
        return "bin"
    if ending == "json" and path.is_file():
        with reading(path):
            return "jsonl" if holds_lines(path) else "text"
    return ENDINGS.get(ending, "text")


def as_before(source: Source) -> Source:
    """Return a source as earlier versions read it: of all names, .jsonl alone held JSON lines."""
    if source.kind in FORMS and source.root.suffix.lower() != f".{source.kind}":
        return replace(source, kind="text")
    return source


def _library(root: Path) -> Iterator[Path]:
    """Yield the source files of Python's standard library, without its tests."""
    for folder, below, names in os.walk(root):
        # `os.walk` descends into the folders that are left in this list.
        below[:] = [name for name in below if name not in NOT_LIBRARY and not name.startswith("config-")]
        for name in names:
            # _sysconfigdata holds paths of the machine that Python was built on, sitecustomize those of this machine.
            if name.endswith(".py") and not name.startswith(("_sysconfigdata", "sitecust")):
                yield Path(folder, name)


def _tokenizer_problem(path: Path | None) -> str | None:
    if path and path.is_dir():
        return folder_problem(path)
    return _file_problem("data.tokenizer", path)


def _file_problem(knob: str, path: Path | None) -> str | None:
    if path is None:
        return None
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
    """Return what is wrong with a path where no file is, and what to do; users often name several files."""
    names = [name.strip(" '\"") for name in str(path).strip("[]").split(",")]
    if len(names) > 1 and all(Path(name).exists() for name in names):
        return (
            f"is a list of {len(names)} files; {ONE_FILE}, such as cat {' '.join(names)} > all{Path(names[0]).suffix}"
        )
    if any(sign in path.name for sign in "*?[") and any(path.parent.glob(path.name)):
        return f"is a pattern of names; {ONE_FILE}, such as cat {path} > all{path.suffix}"
    return "does not exist; give the path of a file"


def _foreign(knob: str, path: Path) -> str | None:
    """Return what is wrong with a file in a format that jaxdist does not read; None for other files, and if absent."""
    if not path.is_file():
        return None
    with reading(path):
        known = magics.foreign(path)
    if known is None:
        return None
    return f"{knob} '{path}' {known}"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an `OSError` from reading the data at `path` into a `RequestError`."""
    try:
        yield
    except OSError as error:
        raise RequestError(f"'{path}' cannot be read ({error.strerror or error}); make it readable") from error


def _library_documents(files: Iterable[Path], on_read: OnRead) -> Iterator[Document]:
    """Yield each file as one document."""
    for path in files:
        with reading(path):
            content = path.read_bytes()
            text = content.decode("utf-8", errors="replace")
        on_read(len(content))
        # Many an __init__.py is empty.
        if text:
            yield Document(text, True)


def _blocks(file: BufferedReader, path: Path, size: int, on_read: OnRead) -> Iterator[Document]:
    """Yield blocks of about `size` bytes cut at line ends; a longer line is cut between two characters."""
    place = 0
    block = file.read(size)
    while block:
        if not block.endswith(b"\n"):
            block += file.readline(size)
        following = file.peek(1)[:1]
        # Bytes 0x80 to 0xbf continue a UTF-8 character, so the block must not end before one.
        while following and b"\x80" <= following <= b"\xbf" and len(block) < 2 * size + 4:
            block += file.read(1)
            following = file.peek(1)[:1]
        try:
            yield Document(block.decode("utf-8"), ends=not following, begins=place == 0)
        except UnicodeDecodeError as error:
            raise RequestError(
                f"'{path}' is not utf-8 text (byte {place + error.start + 1} is {block[error.start]:#04x}); convert "
                "it, or name it .bin if it holds uint16 tokens"
            ) from error
        place += len(block)
        on_read(len(block))
        block = file.read(size)


def _sha256(file: BufferedReader, on_read: OnRead) -> bytes:
    digest = hashlib.sha256()
    for block in blocks(file):
        digest.update(block)
        on_read(len(block))
    return digest.digest()
