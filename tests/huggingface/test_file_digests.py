"""The digests by which processes notice that they read other files: of all of a small one, of samples of weights."""

import os

import numpy as np
from safetensors.numpy import save_file

from jaxdist.huggingface.file_digests import BLOCK, SMALL, SMALL_PART, digests_of


def test_of_a_large_tensor_a_few_blocks_are_read(tmp_path, monkeypatch):
    """16 MiB between two small ones: 3 blocks of it. Numbers that are all others are seen, and where they end."""
    size = 1 << 22
    file = tmp_path / "large.safetensors"
    asked = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *a: asked.append(a[1]) or pread(*a))

    def found(numbers: np.ndarray):
        save_file({"a": np.ones(8, np.float32), "large": numbers, "z": np.ones(8, np.float32)}, file)
        asked.clear()
        (digest,) = digests_of([file], SMALL_PART).values()
        assert sum(asked) < 0.01 * file.stat().st_size
        return digest

    numbers = np.random.default_rng(0).normal(size=size).astype(np.float32)
    first = found(numbers)
    assert found(numbers) == first
    zeroed = numbers.copy()
    zeroed[size // 2 :] = 0  # a copy whose end was never written
    for other in (numbers * np.float32(0.5), zeroed):
        tensors = found(other).tensors
        assert [name for name in tensors if tensors[name] != first.tensors[name]] == ["large"]


def test_a_large_file_without_tensors_is_read_in_samples(tmp_path):
    file = tmp_path / "part"
    content = np.random.default_rng(0).bytes(SMALL_PART + 1)
    file.write_bytes(content)
    (first,) = digests_of([file], SMALL_PART).values()
    file.write_bytes(content[:-1] + b"x")
    (other,) = digests_of([file], SMALL_PART).values()
    assert other.whole != first.whole
    file.write_bytes(content[:BLOCK] + b"xyz" + content[BLOCK + 3 :])
    (small,) = digests_of([file], SMALL).values()
    file.write_bytes(content)
    assert digests_of([file], SMALL)[file] != small


def test_what_cannot_be_read_is_left_to_whoever_needs_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    found = digests_of([tmp_path / "pipe", tmp_path / "none", tmp_path], SMALL)
    assert [digest.whole for digest in found.values()] == ["unreadable", "absent", "unreadable"]
