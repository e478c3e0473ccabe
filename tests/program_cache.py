"""Compiled programs are kept between runs of the tests, in a folder that git ignores."""

import os
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import jax

from jaxdist.files.caches import processor

KEPT = Path(__file__).parent.parent / ".pytest_cache" / "xla"

MOST_BYTES = 2 << 30
MOST_DAYS = 14

ZLIB = b"\x78"
"""How what zlib compressed begins."""

ENTRIES = "*/*-cache"
"""The files of programs below `KEPT`."""


def folder() -> Path:
    """The programs of these versions and this processor. The name of each, by JAX, says the rest of what made it."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return KEPT / f"jax{version('jax')}-jaxlib{version('jaxlib')}-python{python}-{processor()}"


def shared() -> dict[str, str]:
    """Variables for tests that run in a copy of the tree: most of their programs are those of this tree."""
    return {"JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(folder()))}


@contextmanager
def not_kept() -> Iterator[None]:
    """Programs that are compiled meanwhile are not kept.

    XLA:CPU forgets the order of the collectives in a program that it reads (jaxlib 0.10.2 and 0.12.0.1). Where several
    are ready at once, two devices may begin with different ones, and wait for each other for ever: a pipeline of layers
    of several kinds was seen to do so every other time.
    """
    option = "jax_persistent_cache_min_compile_time_secs"
    least = getattr(jax.config, option)
    jax.config.update(option, float("inf"))
    try:
        yield
    finally:
        jax.config.update(option, least)


def prune(kept: Path = KEPT, most_bytes: int = MOST_BYTES, most_days: float = MOST_DAYS) -> None:
    """Remove programs that are older than `most_days`, the oldest beyond `most_bytes`, and those that are not whole.

    Other runs may read, write and prune there meanwhile: a program that is gone is compiled again.
    """
    stamp = kept / "pruned"
    kept.mkdir(parents=True, exist_ok=True)
    looked_at = stamp.stat().st_mtime if stamp.exists() else 0
    stamp.touch()

    room = most_bytes
    found = []
    for path in kept.glob(ENTRIES):
        with suppress(FileNotFoundError):
            found.append((path.stat(), path))
    for state, path in sorted(found, key=lambda one: one[0].st_mtime, reverse=True):
        room -= state.st_size
        old = time.time() - state.st_mtime > most_days * 86400
        new = state.st_mtime >= looked_at
        with suppress(FileNotFoundError):
            if room < 0 or old or (new and not _is_whole(path)):
                path.unlink()


def _is_whole(path: Path) -> bool:
    """Whether the file is there to its end: a process that is killed leaves a part, which would never be replaced."""
    data = path.read_bytes()
    if not data.startswith(ZLIB):  # JAX takes zstd where that is installed
        return bool(data)
    stream = zlib.decompressobj()
    with suppress(zlib.error):
        stream.decompress(data)
    return stream.eof
