"""Read a file of any other form as one text in UTF-8."""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from jaxdist.config import RequestError
from jaxdist.data.readers.reader import Document, OpenFile, TextReader, every_step


def blocks(opened: OpenFile) -> Iterator[Document]:
    """Yield blocks of about `opened.block` bytes cut at line ends; a longer line is cut between two characters."""
    file, path, on_read, size = opened.file, opened.path, opened.on_read, opened.block
    place = opened.start
    block = file.read(size)
    while block and (opened.stop is None or place < opened.stop):
        block += _rest(file, block[-1:], len(block), size)
        following = file.peek(1)[:1]
        try:
            yield Document(block.decode("utf-8"), ends=not following, begins=place == 0)
        except UnicodeDecodeError as error:
            raise RequestError(
                f"'{path}' is not utf-8 text (byte {place + error.start + 1} is {block[error.start]:#04x}); convert "
                "it, or name it .bin if it holds tokens"
            ) from error
        place += len(block)
        on_read(len(block))
        block = file.read(size)


def _rest(file: BufferedReader, last: bytes, length: int, size: int) -> bytes:
    """Read the rest of a block of about `size` bytes, of which `length` bytes that end with `last` are read."""
    rest = b""
    if last != b"\n":
        rest = file.readline(size)
    following = file.peek(1)[:1]
    # Bytes 0x80 to 0xbf continue a UTF-8 character, so the block must not end before one.
    while following and b"\x80" <= following <= b"\xbf" and length + len(rest) < 2 * size + 4:
        rest += file.read(1)
        following = file.peek(1)[:1]
    return rest


def places(opened: OpenFile, step: int) -> Iterator[int]:
    """Yield the first place after each `step` bytes at which a block begins."""
    return every_step(_block_starts(opened), step)


def _block_starts(opened: OpenFile) -> Iterator[int]:
    """Yield where each block but the first begins.

    That depends on all blocks before it, so the end of each one is looked at.
    """
    file, size = opened.file, opened.block
    place = 0
    while True:
        file.seek(place + size - 1)
        last = file.read(1)
        if not last:
            return
        place += size + len(_rest(file, last, size, size))
        if not file.peek(1):
            return
        yield place


def _describe(root: Path, documents: int) -> str:
    """Name the file. Whoever gives JSON may expect that its texts are read."""
    if root.suffix.lower() == ".json":
        return f'{root} (as plain text: its first line is no JSON object with a string "text")'
    return str(root)


def _any(path: Path, text: str) -> bool:
    return True


PLAIN_TEXT = TextReader(key="text", name="plain text", takes=_any, documents=blocks, places=places, describe=_describe)
