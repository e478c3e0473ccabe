"""Rates of rows: read from files, mixed by weight, and as batches on a device; and what a start on many files reads.

    python benchmarks/data_rows.py [--shards 16000]
    python benchmarks/data_rows.py --batches
    python benchmarks/data_rows.py --sources

CPU seconds are those of all threads of the process. They depend less on other jobs on the machine than the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

ENTRIES = 32_768
"""Of the vocabulary."""

SEQUENCE = 4096
"""Tokens of a row."""

BATCH = 64
"""Rows that are read at a time."""

BATCHES = ((64, 4096), (64, 2048), (512, 2048))
"""Rows of a batch on a device, and their tokens."""

ROWS = 20_000
"""Rows that are read in all."""

MEGATOKENS = 200
"""Tokens in the files that are read, in units of 2^20."""

MIXED = 1024
"""Rows of a mixture that are looked up at a time."""

SOURCES = (2, 30, 1500)
"""Sources of a mixture."""

STARTED = (60, 1500)
"""Sources of a mixture that is opened, each a file of `SOURCE` bytes."""

SOURCE = 5 << 20

FILES = (1, 100)
"""Files of tokens, among which `MEGATOKENS` are divided."""


@contextmanager
def token_files(count: int) -> Iterator[list[Path]]:
    """Write random tokens into that many files."""
    from jaxdist.data.tokens import TokenWriter

    ids = np.random.default_rng(0).integers(0, ENTRIES, 1 << 20)
    with tempfile.TemporaryDirectory() as place:
        paths = [Path(place) / f"{number:04}.bin" for number in range(count)]
        for path in paths:
            with TokenWriter(path, "uint16") as writer:
                for _ in range(MEGATOKENS // count):
                    writer.write(ids)
        yield paths


def rows() -> None:
    """Print how many tokens a CPU second reads as rows in a shuffled order, of one file and of many."""
    from jaxdist.data.order import global_rows
    from jaxdist.data.rows import CutRows
    from jaxdist.data.tokens import Tokens

    for files in FILES:
        with token_files(files) as paths:
            data = CutRows(Tokens.joined([Tokens.open(path, "uint16") for path in paths]), SEQUENCE)
            began = time.process_time()
            for step in range(ROWS // BATCH):
                data.read(global_rows(0, step, BATCH, data.count))
            seconds = time.process_time() - began
        read = ROWS // BATCH * BATCH
        print(
            f"rows of {SEQUENCE} tokens, {files:3} files: {read / seconds:8,.0f} rows and "
            f"{read * SEQUENCE / seconds / 1e6:5.0f} M tokens per CPU second; batches of {BATCH}"
        )


def mixtures() -> None:
    """Print how many rows of a mixture a CPU second finds: whose each is, and which of its rows."""
    from jaxdist.data.mixing.mixture import Mixture
    from jaxdist.data.mixing.phases import Phase

    for sources in SOURCES:
        weights = {f"source {number}": round(1 / (number + 1), 6) for number in range(sources)}
        sizes = {name: 1_000_003 + number for number, name in enumerate(weights)}
        began = time.process_time()
        mixture = Mixture(0, sizes, [Phase(0, weights)])
        tables = time.process_time() - began
        began = time.process_time()
        steps = 1000
        for step in range(steps):
            mixture.rows(step * MIXED + np.arange(MIXED))
        seconds = time.process_time() - began
        print(
            f"a mixture of {sources:5,} sources: {steps * MIXED / seconds / 1e6:5.2f} M rows per CPU second; "
            f"batches of {MIXED:,}; its tables {tables:.2f} s"
        )


def batches() -> None:
    """Print how fast a run gets its batches, as arrays on a CPU device, made by a thread while nothing else runs."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    from jaxdist.data.batches import Batch, BatchLayout, Prefetch, token_batch
    from jaxdist.data.mixing.mixed_rows import MixedRows
    from jaxdist.data.mixing.mixture import Mixture
    from jaxdist.data.mixing.phases import Phase
    from jaxdist.data.order import global_rows
    from jaxdist.data.rows import CutRows
    from jaxdist.data.tokens import Tokens
    from jaxdist.mesh import make_mesh, parse_mesh
    from jaxdist.sharding import Layout

    mesh = make_mesh(parse_mesh("1x1x1"), jax.devices()[:1])
    batch_layout = BatchLayout(1, mesh, Layout.on(mesh))

    def measure(what: str, make: Callable[[int], Batch], rows: int, sequence: int) -> None:
        steps = ROWS // rows
        began = time.perf_counter(), time.process_time()
        with Prefetch(make, 0, steps, depth=2) as made:
            for batch in made:
                jax.block_until_ready(batch)
        clock, seconds = time.perf_counter() - began[0], time.process_time() - began[1]
        tokens = steps * rows * sequence / 1e6
        print(
            f"batches of {rows:3} rows of {sequence}, {what}: {tokens / clock:5.0f} M tokens a second, "
            f"{tokens / seconds:5.0f} M per CPU second"
        )

    def measure_files(paths: list[Path], rows: int, sequence: int) -> None:
        parts = tuple(CutRows(Tokens.open(path, "uint16"), sequence) for path in paths)
        if len(parts) == 1:
            one = parts[0]
            make = lambda step: token_batch(one, global_rows(0, step, rows, one.count), batch_layout)
            measure("one file", make, rows, sequence)
            return
        mixed = MixedRows(parts, sequence)
        sizes = {f"{number:04}": part.count for number, part in enumerate(parts)}
        mixture = Mixture(0, sizes, [Phase(0, dict.fromkeys(sizes, 1.0))])

        def mixed_batch(step: int) -> Batch:
            source, row = mixture.rows(step * rows + np.arange(rows))
            return token_batch(mixed, mixed.firsts[source] + row, batch_layout)

        measure(f"a mixture of {len(parts)}", mixed_batch, rows, sequence)

    for files in FILES:
        with token_files(files) as paths:
            for rows, sequence in BATCHES:
                measure_files(paths, rows, sequence)


def bytes_read() -> int:
    """Return the bytes that this process has read, as Linux counts them."""
    return int(Path("/proc/self/io").read_text().split()[1])


def start(folder: Path, heard: str, mixed: bool) -> list[float | str]:
    """Return the bytes that opening the data reads, the seconds by the clock and of CPU, and what others may hear.

    The files are a source each if they are `mixed`, and one source otherwise.
    """
    from jaxdist.config import DataConfig
    from jaxdist.data.corpus import open_corpus
    from jaxdist.data.known import hear, told

    before = bytes_read(), time.perf_counter(), time.process_time()
    if heard:
        hear(heard)
    config = DataConfig(path=str(folder))
    if mixed:
        config = DataConfig(mixture={path.stem: {"path": str(path), "weight": 1} for path in folder.iterdir()})
    corpus = open_corpus(config, ENTRIES, SEQUENCE)
    corpus.validation.unigram_entropy()
    return [bytes_read() - before[0], time.perf_counter() - before[1], time.process_time() - before[2], told()]


def starts(shards: int, size: int, mixed: bool = False) -> None:
    """Print what starts on files of so many bytes of tokens read, which are holes on the disk behind their first ids.

    They are a source each if they are `mixed`, and one source otherwise.

    The leader of a run opens them for the first time and again, and tells another process, on a host with a cache of
    its own, what it knows.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "shards")
        folder.mkdir()
        for number in range(shards):
            path = folder / f"{number:06}.bin"
            with path.open("wb") as file:
                file.write(np.arange(1, 129, dtype="<u2").tobytes())
                file.truncate(size)
            # Files that are alike would be known by each other.
            os.utime(path, (1e9 + number, 1e9 + number))
        heard = ""
        for which, cache in (("first", "leader"), ("leader", "leader"), ("other", "other")):
            found = subprocess.run(
                [sys.executable, __file__, "--start", str(folder), *(["--sources"] if mixed else [])],
                env={**os.environ, "JAXDIST_CACHE": str(Path(place, cache))},
                input=heard if which == "other" else "",
                check=True,
                capture_output=True,
                text=True,
            )
            count, clock, seconds, heard = json.loads(found.stdout.splitlines()[-1])
            print(
                f"{which:6} start on {shards:,} {'sources' if mixed else 'files'} of {shards * size / 1e9:.1f} GB: "
                f"{count / 1e6:8,.1f} MB read, "
                f"{clock:5.1f} s, {seconds:5.1f} s of CPU"
            )


def main() -> None:
    """Measure all, or one start in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=16_000)
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--batches", action="store_true", help="measure batches alone")
    parser.add_argument("--starts", action="store_true", help="measure starts alone")
    parser.add_argument("--sources", action="store_true", help="measure starts on mixtures alone")
    asked = parser.parse_args()
    if asked.start:
        print(json.dumps(start(asked.start, sys.stdin.read(), asked.sources)))
        return
    cores = len(os.sched_getaffinity(0))
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {cores} cores, load {os.getloadavg()[0]:.1f}")
    if asked.sources:
        for sources in STARTED:
            starts(sources, SOURCE, mixed=True)
        return
    if not (asked.batches or asked.starts):
        rows()
        mixtures()
    if not asked.batches:
        starts(asked.shards, 256 << 10)
        starts(1, 6 << 30)
    if not asked.starts:
        batches()
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
