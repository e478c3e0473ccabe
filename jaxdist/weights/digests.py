"""One digest of files with weights, by which those beside which adapters were trained are known again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import xxhash

from jaxdist.cluster import kv_store
from jaxdist.cluster.consensus import Errands, agreed, dealt
from jaxdist.config import RequestError
from jaxdist.files import checksums


def digest_of(sums: Callable[[], Mapping[str, str]], errands: Errands | None = None) -> str:
    """Return one digest of files, from their names and checksums, which the leader finds, if need be by `errands`.

    All processes call this.
    """

    def combined() -> int:
        text = "\n".join(f"{name} {value}" for name, value in sorted(sums().items()))
        return xxhash.xxh3_64(text.encode()).intdigest()

    return f"{agreed(combined, errands):016x}"


def digest_of_files(folder: Path, look: Callable[[], Sequence[str]]) -> str:
    """Return the digest of files in a folder: each is read by one process. All processes call this.

    `look`, which only the leader calls, returns their names. Raises `RequestError` where one cannot be read.
    """

    def read(names: Sequence[str]) -> list[str] | str:
        """Return the checksums, or what cannot be read."""
        try:
            # A cache of Hugging Face holds links to files that are named by their content.
            return [digest for _, digest in checksums([(folder / name).resolve() for name in names])]
        except OSError as error:
            where = f" by process {kv_store.process()}" if kv_store.processes() > 1 else ""
            return f"{error.filename} cannot be read{where} ({error.strerror}); make it readable"

    def sums() -> dict[str, str]:
        sizes = {name: _size(folder / name) for name in look()}
        shares = dealt(sizes, kv_store.processes())
        found = errands.deal(shares)
        problems = [one for one in found if isinstance(one, str)]
        if problems:
            raise RequestError(*problems)
        by_name = {}
        for share, digests in zip(shares, found, strict=True):
            for name, digest in zip(share, digests, strict=True):
                by_name[Path(name).name] = digest
        return by_name

    errands = Errands(read)
    return digest_of(sums, errands)


def _size(path: Path) -> int:
    """Return the bytes of a file; 0 where that is not known, which reading it will show."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
