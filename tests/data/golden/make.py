"""Make the golden files of this folder, each by the library whose format it is. made.json says which one, and when.

    pip install datasets polars backports.zstd && pip install --no-deps megatron-core
    python -m tests.data.golden.make

Of Megatron only the builder of indexed datasets runs, which needs no more of PyTorch than its name. llm.c is no
package: its files are written here, as `write_datafile` of its dev/data/data_common.py lays them out.
"""

import bz2
import gzip
import importlib.metadata
import json
import lzma
import pickle
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np

from tests.data.golden.documents import DOCUMENTS, HELD_OUT, stream, texts

FOLDER = Path(__file__).parent
TRAIN, HELD = texts(DOCUMENTS), texts(HELD_OUT)
ROWS = {"n": list(range(len(TRAIN))), "text": TRAIN, "meta": [{"text": text, "n": 1} for text in TRAIN]}


def lines() -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in TRAIN).encode()


def pyarrow(folder: Path) -> Iterator[str]:
    import pyarrow as pa
    from pyarrow import feather, ipc, parquet

    table = pa.table(ROWS)
    parquet.write_table(table, folder / "snappy.parquet", row_group_size=4)
    parquet.write_table(table, folder / "zstd.parquet", compression="zstd", data_page_version="2.0")
    feather.write_feather(table, folder / "lz4.feather", compression="lz4", chunksize=4)
    for name, new in (("file.arrow", ipc.new_file), ("stream.arrow", ipc.new_stream)):
        with new(folder / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
    yield from ("snappy.parquet", "zstd.parquet", "lz4.feather", "file.arrow", "stream.arrow")


def polars(folder: Path) -> Iterator[str]:
    import polars as pl

    pl.DataFrame(ROWS).write_parquet(folder / "polars.parquet", row_group_size=4)
    pl.DataFrame(ROWS).write_ipc(folder / "polars.arrow")
    yield from ("polars.parquet", "polars.arrow")


def datasets(folder: Path) -> Iterator[str]:
    from datasets import Dataset, DatasetDict

    train, held_out = Dataset.from_dict(ROWS), Dataset.from_dict({"text": HELD})
    train.save_to_disk(folder / "saved", num_shards=3)
    splits = {"train": train.select_columns("text"), "validation": held_out, "test": held_out}
    DatasetDict(splits).save_to_disk(folder / "saved_splits")
    hub = folder / "hub" / "data"
    hub.mkdir(parents=True)
    for number in range(2):
        train.shard(2, number, contiguous=True).to_parquet(hub / f"train-0000{number}-of-00002.parquet")
    held_out.to_parquet(hub / "validation-00000-of-00001.parquet")
    held_out.to_parquet(hub / "test-00000-of-00001.parquet")
    train.select_columns("text").to_json(folder / "rows.jsonl")
    yield from ("saved", "saved_splits", "hub", "rows.jsonl")


def zstd(folder: Path) -> Iterator[str]:
    from backports import zstd

    (folder / "rows.jsonl.zst").write_bytes(zstd.compress(lines()))
    yield "rows.jsonl.zst"


def python(folder: Path) -> Iterator[str]:
    for ending, compress in ((".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)):
        (folder / f"rows.jsonl{ending}").write_bytes(compress(lines()))
        yield f"rows.jsonl{ending}"


def numpy(folder: Path) -> Iterator[str]:
    """As data/shakespeare_char/prepare.py of nanoGPT, but for the ids."""
    nanogpt = folder / "nanogpt"
    nanogpt.mkdir()
    (nanogpt / "input.txt").write_text("\n\n".join(TRAIN))
    for name, documents in (("train", DOCUMENTS), ("val", HELD_OUT)):
        np.array(stream(documents), dtype=np.uint16).tofile(nanogpt / f"{name}.bin")
    (nanogpt / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 301}))
    np.array(stream(DOCUMENTS), dtype=np.uint32).tofile(folder / "uint32.bin")
    yield from ("nanogpt", "uint32.bin")


def megatron_core(folder: Path) -> Iterator[str]:
    indexed_dataset = _without_torch("megatron.core.datasets.indexed_dataset")
    for dtype in (np.uint16, np.int32):
        name = f"megatron_{dtype.__name__}_document"
        builder = indexed_dataset.IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=dtype)
        for document in DOCUMENTS:
            ids = stream([document])
            builder.add_document(np.array(ids), [len(ids)])
        builder.finalize(str(folder / f"{name}.idx"))
        yield name


def llm_c(folder: Path) -> Iterator[str]:
    for name, magic, version, dtype in (("gpt2", 20240520, 1, np.uint16), ("llama3", 20240801, 7, np.uint32)):
        ids = np.array(stream(DOCUMENTS), dtype)
        header = np.zeros(256, np.int32)
        header[:3] = magic, version, len(ids)
        (folder / f"llmc_{name}.bin").write_bytes(header.tobytes() + ids.tobytes())
        yield f"llmc_{name}.bin"


MAKERS: tuple[Callable[[Path], Iterator[str]], ...] = (
    pyarrow,
    polars,
    datasets,
    zstd,
    python,
    numpy,
    megatron_core,
    llm_c,
)


def version(name: str) -> str:
    if name == "llm_c":
        return "the layout of llm.c (2024-08, commit 16635d4)"
    if name == "python":
        return f"Python {sys.version.split()[0]}"
    package = {"zstd": "backports.zstd", "megatron_core": "megatron-core"}.get(name, name)
    return f"{package} {importlib.metadata.version(package)}"


def _without_torch(name: str) -> types.ModuleType:
    """A module of a package whose other modules, and torch, are not imported."""
    for missing in ("torch", "megatron.core.utils", "megatron.core.msc_utils"):
        sys.modules[missing] = MagicMock()
    sys.modules["megatron.core.datasets.object_storage_utils"] = MagicMock()
    sys.modules["torch"].utils.data.Dataset = object
    sys.modules["megatron.core.msc_utils"].MultiStorageClientFeature.is_enabled = lambda: False
    where = Path(importlib.metadata.distribution("megatron-core").locate_file(""))
    for package in ("megatron", "megatron.core", "megatron.core.datasets"):
        module = types.ModuleType(package)
        module.__path__ = [str(where / package.replace(".", "/"))]
        sys.modules[package] = module
    return importlib.import_module(name)


def main() -> None:
    files = FOLDER / "files"
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir()
    made = {name: version(maker.__name__) for maker in MAKERS for name in maker(files)}
    (FOLDER / "made.json").write_text(json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    main()
