"""Read compressed files while they are decompressed: gzip, xz, bzip2 and zstd, known by their first bytes.

A file may hold several streams, one after the other. One that is cut or damaged is refused, and never read short; the
modules of Python end in silence where a later stream is damaged.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.config import RequestError
from jaxdist.data.heads import head_of

HEAD = 16
"""Bytes at the start of a file by which a compression is known."""

CHUNK = 64 << 10
"""Bytes that are decompressed at a time."""

LONGEST_WINDOW = 31
"""Log2 of the longest window of zstd, as of `zstd --long=31`; what a file asks for is taken from memory."""

RATIO = 4
"""Bytes of text for a byte of a compressed file, about."""


class Compression(NamedTuple):
    """A way to compress a file."""

    name: str
    ending: str
    start: bytes
    """A regular expression for its first bytes, which neither tokens nor texts have by chance."""
    new: Callable[[], Any]
    """Returns what decompresses one stream, with the methods of `lzma.LZMADecompressor`."""


class _Gzip:
    """Decompresses a stream of gzip, with its checksum, as other modules do theirs."""

    def __init__(self) -> None:
        import zlib

        self._stream = zlib.decompressobj(wbits=31)

    def decompress(self, data: bytes, most: int) -> bytes:
        return self._stream.decompress(self._stream.unconsumed_tail + data, most)

    @property
    def needs_input(self) -> bool:
        return not self._stream.unconsumed_tail

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data


def _new_xz() -> Any:
    import lzma

    return lzma.LZMADecompressor(lzma.FORMAT_XZ)


def _new_bzip2() -> Any:
    import bz2

    return bz2.BZ2Decompressor()


def _new_zstd() -> Any:
    """Return one. Raises `ImportError` where Python is older than 3.14, and the extra `data` is not installed."""
    try:
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        from backports import zstd  # type: ignore[no-redef,unused-ignore]

    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: LONGEST_WINDOW})


COMPRESSIONS = (
    Compression("gzip", ".gz", rb"\x1f\x8b\x08[\x00-\x1f].{4}[\x00\x02\x04][\x00-\x0d\xff]", _Gzip),
    Compression("xz", ".xz", rb"\xfd7zXZ\x00", _new_xz),
    Compression("bzip2", ".bz2", rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)", _new_bzip2),
    Compression("zstd", ".zst", rb"\x28\xb5\x2f\xfd", _new_zstd),
)


def ending_of(path: Path) -> str:
    """Return the ending of a file in small letters; of a.jsonl.gz it is .jsonl."""
    ending = path.suffix.lower()
    if any(ending == known.ending for known in COMPRESSIONS):
        return Path(path.stem).suffix.lower()
    return ending


def compression_of(head: bytes) -> Compression | None:
    """Return how a file with these first bytes is compressed, or None if it is not."""
    return next((known for known in COMPRESSIONS if re.match(known.start, head, re.DOTALL)), None)


def is_compressed(path: Path) -> bool:
    """Return whether a file is compressed. Raises `OSError`."""
    return compression_of(head_of(path)) is not None


def text_size(path: Path) -> int:
    """Return the bytes of a text in a file; of a compressed one, about. Raises `OSError`."""
    size = path.stat().st_size
    return size * RATIO if is_compressed(path) else size


def decompressed(file: BufferedReader, path: Path, on_read: Callable[[int], None]) -> BufferedReader | None:
    """Return the content of a compressed file that is open at its start; None if it is not compressed.

    `on_read` is called with the numbers of bytes of the file as they are read. Raises `RequestError` if the package for
    it is not installed, and, while the content is read, where the file is cut or damaged.
    """
    compression = compression_of(file.peek(HEAD)[:HEAD])
    if compression is None:
        return None
    return BufferedReader(_Decompressed(file, path, compression, on_read), CHUNK)


def plain(file: BufferedReader, path: Path) -> BufferedReader:
    """Return the content of a file that is open at its start, decompressed if it is compressed."""
    return decompressed(file, path, lambda count: None) or file


def check_whole(path: Path) -> None:
    """Read a compressed file to its end. Raises `RequestError` where it is cut or damaged, and `OSError`."""
    with path.open("rb") as file:
        content = plain(file, path)
        while content.read(CHUNK):
            pass


class _Decompressed(io.RawIOBase):
    """The content of a compressed file."""

    def __init__(self, file: BufferedReader, path: Path, compression: Compression, on_read: Callable[[int], None]):
        self._file = file
        self._path = path
        self._compression = compression
        self._on_read = on_read
        self._place = 0
        self._unused = b""
        try:
            self._stream = compression.new()
        except ImportError as error:
            raise RequestError(
                f"'{path}' is compressed by {compression.name}, and the package that reads it is not installed; "
                "pip install 'jaxdist[data]', or decompress it"
            ) from error

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        """Put the next bytes into a buffer; none at the end."""
        piece = self._next(len(into))
        into[: len(piece)] = piece
        return len(piece)

    def _next(self, most: int) -> bytes:
        while True:
            if self._stream.eof and not self._begin_another():
                return b""
            needed = not self._unused and self._stream.needs_input
            data = self._unused or (self._read() if needed else b"")
            self._unused = b""
            try:
                piece = self._stream.decompress(data, most)
            # Each module has errors of its own, such as zlib.error, lzma.LZMAError and OSError.
            except Exception as error:
                raise RequestError(
                    f"'{self._path}' is damaged in its first {self._place:,} bytes: {self._compression.name} says "
                    f"'{error}'; copy it again"
                ) from error
            if piece:
                return piece
            if needed and not data and not self._stream.eof:
                raise RequestError(
                    f"'{self._path}' is cut short: its {self._place:,} bytes are not the whole of what "
                    f"{self._compression.name} has compressed; copy it again"
                )

    def _begin_another(self) -> bool:
        """Begin with the next stream of the file, if there is one. Zeros between streams are padding."""
        rest = self._stream.unused_data.lstrip(b"\0")
        while not rest:
            data = self._read()
            if not data:
                return False
            rest = data.lstrip(b"\0")
        self._stream = self._compression.new()
        self._unused = rest
        return True

    def _read(self) -> bytes:
        data = self._file.read(CHUNK)
        self._place += len(data)
        self._on_read(len(data))
        return data
