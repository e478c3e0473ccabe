"""Files that the safetensors format forbids are refused by every reader of weights, as the format's library does."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxdist.config import RequestError
from jaxdist.huggingface.folder import CONFIG, INDEX, SINGLE, open_folder
from jaxdist.huggingface.folder_arrays import folder_arrays
from jaxdist.huggingface.reading import read_parameters
from jaxdist.huggingface.safetensors_file import BITS, Entry, read_header
from jaxdist.huggingface.tensor_checks import check_tensors
from tests.huggingface.folders import changed, model_of
from tests.huggingface.test_reading import on_one_device

Header = dict[str, Any]


def split(file: Path) -> tuple[Header, bytes]:
    """The header of a file, its tensors in the order of their bytes, and these bytes."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header.pop("__metadata__", None)
    return dict(sorted(header.items(), key=lambda item: item[1]["data_offsets"])), content[end:]


def joined(header: Header | bytes, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def shifted(header: Header, names: list[str], by: int) -> Header:
    moved = {name: header[name] | {"data_offsets": [at + by for at in header[name]["data_offsets"]]} for name in names}
    return header | moved


def alike(header: Header) -> tuple[str, str]:
    """Two tensors of one shape."""
    names = list(header)
    pairs = ((a, b) for a in names for b in names if a < b and header[a]["shape"] == header[b]["shape"])
    return next(pairs)


def on_the_same_bytes(header: Header, data: bytes) -> bytes:
    a, b = alike(header)
    return joined(header | {b: header[a]}, data)


def twice(header: Header, data: bytes) -> bytes:
    """A key twice, and each time with other bytes."""
    a, b = alike(header)
    text = json.dumps(header)[:-1] + f', "{a}": {json.dumps(header[b])}' + "}"
    return joined(text.encode(), data)


def with_entry(key: str, value: Any) -> Callable[[Header, bytes], bytes]:
    def damage(header: Header, data: bytes) -> bytes:
        name = next(iter(header))
        return joined(header | {name: header[name] | {key: value}}, data)

    return damage


def last(header: Header) -> str:
    return list(header)[-1]


DAMAGES: dict[str, Callable[[Header, bytes], bytes]] = {
    "two tensors on the same bytes": on_the_same_bytes,
    "a tensor on bytes of its neighbour": lambda h, d: joined(shifted(h, [last(h)], -4), d[:-4]),
    "all shifted": lambda h, d: joined(shifted(h, list(h), 8), d + bytes(8)),
    "all shifted by an odd number": lambda h, d: joined(shifted(h, list(h), 1), d + bytes(1)),
    "a gap": lambda h, d: joined(shifted(h, [last(h)], 8), d + bytes(8)),
    "bytes behind the last tensor": lambda h, d: joined(h, d + b"\0"),
    "bytes missing": lambda h, d: joined(h, d[:-1]),
    "no bytes at all": lambda h, d: b"",
    "a key twice": twice,
    "a key of a tensor twice": lambda h, d: joined(
        json.dumps(h).replace('"dtype"', '"dtype": "F32", "dtype"').encode(), d
    ),
    "UTF-16": lambda h, d: joined(json.dumps(h).encode("utf-16"), d),
    "UTF-16 without a mark": lambda h, d: joined(json.dumps(h).encode("utf-16-le"), d),
    "UTF-8 with a mark": lambda h, d: joined(b"\xef\xbb\xbf" + json.dumps(h).encode(), d),
    "half of a surrogate pair": lambda h, d: joined(json.dumps({"\ud800": h.pop(last(h)), **h}).encode(), d),
    "metadata that are no text": lambda h, d: joined({"__metadata__": {"a": 1}, **h}, d),
    "metadata that are no table": lambda h, d: joined({"__metadata__": "a", **h}, d),
    "an offset that is no whole number": with_entry("data_offsets", [0.0, 8]),
    "an offset below 0": with_entry("data_offsets", [-2, 8]),
    "an end before the beginning": with_entry("data_offsets", [8, 0]),
    "three offsets": with_entry("data_offsets", [0, 4, 8]),
    "a shape that overflows": with_entry("shape", [2**40, 2**40]),
    "another shape": with_entry("shape", [1]),
    "a dtype of another size": with_entry("dtype", "F64"),
    "a dtype that is no name": with_entry("dtype", 1),
    "a list": lambda h, d: joined(b"[]", d),
    "a deep header": lambda h, d: joined(b'{"a":' + b"[" * 100_000, d),
    "text behind the header": lambda h, d: joined(json.dumps(h).encode() + b"\0", d),
    "a header longer than the file": lambda h, d: (1 << 40).to_bytes(8, "little") + json.dumps(h).encode() + d,
    "a header of 2^63 bytes": lambda h, d: (1 << 63).to_bytes(8, "little") + json.dumps(h).encode() + d,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder of Hugging Face with one file of weights."""
    return changed("gpt2", tmp_path_factory.mktemp("weights") / "gpt2")


def spoilt(folder: Path, to: Path, content: bytes, shard: str) -> Path:
    """A copy of a folder with this content for its weights: in one file, or in a `shard` that an index names."""
    to.mkdir()
    shutil.copy(folder / CONFIG, to)
    (to / (shard or SINGLE)).write_bytes(content)
    if shard:
        names = split(folder / SINGLE)[0]
        (to / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))
    return to


@pytest.mark.parametrize("shard", ["", "model-00001-of-00001.safetensors"], ids=["single", "shard"])
@pytest.mark.parametrize("kind", DAMAGES)
def test_every_reader_refuses_what_the_format_forbids(folder, tmp_path, kind, shard):
    """Also the base of adapters, which a run reads as it does `init_from`, and an export array by array."""
    model = model_of(folder)
    there = spoilt(folder, tmp_path / "spoilt", DAMAGES[kind](*split(folder / SINGLE)), shard)
    file = there / (shard or SINGLE)
    readers: dict[str, Callable[[], object]] = {
        "the header alone": lambda: read_header(file),
        "the check before a run": lambda: check_tensors(open_folder(there), model),
        "init_from": lambda: read_parameters(there, model, on_one_device(model)),
        "an export": lambda: folder_arrays(there, model).__enter__(),
    }
    for reader, read in readers.items():
        with pytest.raises(RequestError) as refused:
            read()
        assert str(refused.value).startswith(f"{file} is "), reader
        assert str(refused.value).endswith("; download it again"), reader
    with pytest.raises(SafetensorError):
        safe_open(file, "np")


def test_the_sentence_names_the_tensor_and_the_bytes(tmp_path):
    file = tmp_path / "gap.safetensors"
    save_file({"a": np.zeros(2, np.float32), "b": np.ones(2, np.float32)}, file)
    header, data = split(file)
    file.write_bytes(joined(shifted(header, ["b"], 8), data + bytes(8)))
    first = len(file.read_bytes()) - 24
    with pytest.raises(RequestError) as refused:
        read_header(file)
    assert str(refused.value) == (
        f"{file} is damaged: tensor b begins at byte {first + 16:,}, and the tensor before it ends at {first + 8:,}; "
        f"download it again"
    )
    file.write_bytes(twice(header, data))
    with pytest.raises(RequestError, match=r"its header describes no tensors \('a' is there twice\); download it"):
        read_header(file)


def test_what_the_format_allows_is_read(tmp_path):
    """Tensors without bytes, another order in the header, blanks, keys of tomorrow, dtypes that nobody reads."""
    file = tmp_path / "odd.safetensors"
    of = lambda dtype, shape, start, stop: {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
    header = {
        "__metadata__": None,
        "b": of("BF16", [2, 2], 8, 16),
        "none": of("F32", [0], 8, 8),
        "a": of("F32", [2], 0, 8) | {"more": 1},
        "four bits": of("F4", [3, 2], 16, 19),
    }
    text = b" " + json.dumps(header).encode() + b"  "
    file.write_bytes(joined(text, bytes(19)))
    first = 8 + len(text)
    assert read_header(file) == {
        "b": Entry("BF16", (2, 2), first + 8, first + 16),
        "none": Entry("F32", (0,), first + 8, first + 8),
        "a": Entry("F32", (2,), first, first + 8),
        "four bits": Entry("F4", (3, 2), first + 16, first + 19),
    }
    with safe_open(file, "np") as opened:
        assert sorted(opened.keys()) == ["a", "b", "four bits", "none"]


def test_every_dtype_of_the_format_has_its_bits(tmp_path):
    file = tmp_path / "a.safetensors"
    for dtype, bits in BITS.items():
        file.write_bytes(joined({"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, bits]}}, bytes(bits)))
        assert len(read_header(file)) == 1
        with safe_open(file, "np") as opened:
            assert opened.get_slice("a").get_dtype() == dtype
    file.write_bytes(joined({"a": {"dtype": "new", "shape": [8], "data_offsets": [0, 8]}}, bytes(8)))
    with pytest.raises(SafetensorError) as refused:
        safe_open(file, "np")
    assert set(re.findall("`([A-Z0-9_]+)`", str(refused.value))) == BITS.keys()


def test_a_large_file_is_not_read_for_its_header(tmp_path, monkeypatch):
    """64 GiB, of which the disk holds the header alone."""
    file = tmp_path / "large.safetensors"
    header = {"a": {"dtype": "F32", "shape": [1 << 34], "data_offsets": [0, 1 << 36]}}
    file.write_bytes(joined(header, b""))
    os.truncate(file, file.stat().st_size + (1 << 36))
    assert read_header(file)["a"].shape == (1 << 34,)


def test_a_pipe_in_the_place_of_weights_is_refused(tmp_path):
    os.mkfifo(tmp_path / "a.safetensors")
    with pytest.raises(RequestError, match="cannot be read: not a regular file"):
        read_header(tmp_path / "a.safetensors")
