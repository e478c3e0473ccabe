"""Read the source files of Python's standard library, the text of a run without a data.path."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

from jaxdist.data.readers.reader import Document, OpenFile, TextReader

NOT_LIBRARY = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
"""Folders below the standard library that hold tests or are not part of it; `config-*` is left out too."""


def library_folder() -> Path:
    """Return the folder of the standard library."""
    return Path(os.__file__).parent


def library_files(root: Path) -> tuple[Path, ...]:
    """Return the source files below a folder, without tests, in the order of their names."""
    return tuple(sorted(_found(root), key=lambda file: file.relative_to(root).as_posix()))


def _found(root: Path) -> Iterator[Path]:
    for folder, below, names in os.walk(root):
        # `os.walk` descends into the folders that are left in this list.
        below[:] = [name for name in below if name not in NOT_LIBRARY and not name.startswith("config-")]
        for name in names:
            # _sysconfigdata holds paths of the machine that Python was built on, sitecustomize those of this machine.
            if name.endswith(".py") and not name.startswith(("_sysconfigdata", "sitecust")):
                yield Path(folder, name)


def _whole_file(opened: OpenFile) -> Iterator[Document]:
    """Yield the file as one document."""
    content = opened.file.read()
    opened.on_read(len(content))
    # Many an __init__.py is empty.
    if content:
        yield Document(content.decode("utf-8", errors="replace"), True)
    else:
        opened.on_empty()


def _describe(root: Path, documents: int) -> str:
    return f"Python {platform.python_version()} standard library, {documents} files"


def _none(path: Path, text: str) -> bool:
    return False


PYTHON_LIBRARY = TextReader(
    key="library",
    name="Python's own library",
    takes=_none,
    documents=_whole_file,
    describe=_describe,
)
"""It takes no file that a path names."""
