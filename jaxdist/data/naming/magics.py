"""Recognise files in formats that jaxdist does not read by their first bytes, so that each is refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from jaxdist.data.compressed import compression_of, ending_of, plain
from jaxdist.data.heads import HEAD, head_of

VERSION = 1
"""Version of what is recognised; increase it when that is more."""

DECOMPRESS = "decompress it, and give the result"
UNPACK = "unpack it, and give one of its files"
EXPORT = "export its text as .txt or .jsonl, or its token ids as a headerless .bin of uint16 or uint32"
NUMPY = (
    "where all token ids are below 65,536, write them with numpy's ids.astype('<u2').tofile('tokens.bin'), otherwise "
    "with '<u4'"
)


class Format(NamedTuple):
    """A format that jaxdist does not read."""

    name: str
    start: bytes
    """A regular expression for its first bytes. Token files may contain any bytes and texts any characters, so the
    expression fixes more than either has by chance: about four bytes, or ten if all of them are letters."""
    remedy: str
    """What the user can do with such a file."""


# The first match counts: a file of PyTorch and an .npz are zip archives too.
FORMATS = (
    Format("compressed by lz4", rb"\x04\x22\x4d\x18", DECOMPRESS),
    Format("an archive of 7-Zip", rb"7z\xbc\xaf\x27\x1c", UNPACK),
    Format("a tar archive", rb".{100}[ 0-7]{5}[0-7].{151}ustar[\x00 ]", UNPACK),
    Format("a file of PyTorch (torch.save)", rb"PK\x03\x04.{26}[^\x00]{0,200}data\.pkl", EXPORT),
    Format("an archive of numpy arrays (.npz)", rb"PK\x03\x04.{26}[^\x00]{0,200}\.npy", NUMPY),
    Format("a zip archive", rb"PK(?:\x03\x04|\x05\x06)", UNPACK),
    Format("a numpy array (.npy)", rb"\x93NUMPY", NUMPY),
    Format("an encrypted Parquet file", rb"PARE[\x00-\x1f]", EXPORT),
    Format("a Feather file of version 1", rb"FEA1\x00\x00\x00\x00", "write it again with pyarrow's write_feather"),
    Format("an HDF5 file", rb"\x89HDF\r\n\x1a\n", EXPORT),
    Format("an SQLite database", rb"SQLite format 3\x00", EXPORT),
    Format("a safetensors file", rb".{4}\x00{4}\{[\" ]", EXPORT),
    Format("a file of PyTorch (torch.save)", rb"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19\.", EXPORT),
    Format("a pickle of Python objects", rb"\x80[\x04\x05]\x95.{4}\x00{4}", EXPORT),
    Format("a pickle of Python objects", rb"\x80[\x02\x03](?:[\]})](?:q\x00|\.)|c[\w.]+\n[\w.]+\n)", EXPORT),
    Format("a PDF document", rb"%PDF-\d\.\d[\r\n]+%[\x80-\xff]", EXPORT),
    Format(
        "a pointer of Git LFS, and the file itself is elsewhere",
        rb"version https://git-lfs\.github\.com/spec/v1\r?\n",
        "run git lfs pull in its folder",
    ),
    Format(
        "text in UTF-16",
        rb"\xff\xfe(?:[\t\n\r\x20-\x7e]\x00){4}|\xfe\xff(?:\x00[\t\n\r\x20-\x7e]){4}",
        "convert it: iconv -f UTF-16 -t UTF-8",
    ),
    Format(
        "a file of questions of llm.c (magic 20240522), which no model learns from",
        rb"\x8a\xd8\x34\x01.\x00\x00\x00",
        "give a token file of llm.c, or name the questions as .jsonl by --choices of jaxdist.evaluate",
    ),
    Format(
        "an index of Megatron (.idx), which holds no tokens",
        rb"(?:MMIDIDX|TNTIDX)\x00\x00",
        "give its .bin, beside which it lies, or its text as .jsonl",
    ),
)

NEVER_INSIDE = (
    Format("a Parquet file", rb"PAR1[\x00-\x1f]", DECOMPRESS),
    Format("an Arrow file", rb"ARROW1\x00\x00", DECOMPRESS),
    Format("an Arrow stream", rb"\xff\xff\xff\xff.{3}\x00\x10\x00\x00\x00", DECOMPRESS),
)
"""Formats that are read, but not while they are decompressed: they have a compression of their own."""


def foreign(path: Path) -> str | None:
    """Return what the file at `path` is and what to do with it, or None if it is in none of `FORMATS`.

    A compressed file of text is judged by what is in it. Raises `OSError`, and `RequestError` if it is damaged.
    """
    head = head_of(path)
    compression = compression_of(head)
    if compression:
        with path.open("rb") as file:
            head = plain(file, path).read(HEAD)
    twice = compression_of(head) if compression else None
    if twice:
        return f"is compressed twice, by {twice.name} inside; {DECOMPRESS}"
    for known in FORMATS + (NEVER_INSIDE if compression else ()):
        if re.match(known.start, head, re.DOTALL):
            return f"is {known.name}; {known.remedy}"
    if compression and ending_of(path) == ".bin":
        return f"is compressed by {compression.name}, and tokens are used in place; decompress it"
    return None
