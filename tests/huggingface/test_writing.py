"""Weights that are written in the form of Hugging Face."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors import safe_open

from jaxdist.config import RequestError
from jaxdist.huggingface.folder import SINGLE, open_folder
from jaxdist.huggingface.reading import read_parameters
from jaxdist.huggingface.schema import INDEX
from jaxdist.huggingface.writing import write_weights
from tests.huggingface.exported import GOLDEN, NAMES, abstract, model_of, save, stored, tensors


@pytest.mark.parametrize("name", NAMES)
def test_imported_weights_are_written_back_bit_for_bit(name, tmp_path):
    model = model_of(GOLDEN / name)
    save(tmp_path / "run", read_parameters(GOLDEN / name, model, abstract(model)))
    out = tmp_path / "out"
    out.mkdir()
    written = write_weights(
        out, model, stored(tmp_path / "run"), "bfloat16", open_folder(GOLDEN / name).config["model_type"]
    )
    expected = tensors(GOLDEN / name)
    found = tensors(out)
    assert found.keys() == expected.keys()
    for tensor, numbers in expected.items():
        assert found[tensor].dtype == numbers.dtype
        np.testing.assert_array_equal(found[tensor].view(np.uint16), numbers.view(np.uint16), tensor)
    assert written == {
        "tensors": len(expected),
        "files": 1,
        "bytes": sum(numbers.nbytes for numbers in expected.values()),
    }


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A run with the weights of the golden Llama, one of which only float32 and bfloat16 can hold."""
    run = tmp_path_factory.mktemp("runs") / "llama"
    model = model_of(GOLDEN / "llama1")
    params = read_parameters(GOLDEN / "llama1", model, abstract(model))
    down = params["blocks"]["mlp"]["down"]
    params["blocks"]["mlp"]["down"] = down.at[1, 2, 3].set(70_000)
    save(run, params)
    return run


def write(run: Path, out: Path, dtype: str = "float32", **more: int) -> dict[str, int]:
    out.mkdir()
    return write_weights(out, model_of(GOLDEN / "llama1"), stored(run), dtype, **more)


def test_small_weights_are_one_file_that_says_it_is_of_pytorch(llama, tmp_path):
    write(llama, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [SINGLE]
    with safe_open(tmp_path / "out" / SINGLE, "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_shards_keep_to_their_size_and_the_index_has_each_tensor_once(llama, tmp_path):
    limit = 40_000
    written = write(llama, tmp_path / "out", shard_bytes=limit)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert written["files"] > 2
    sizes = {}
    for number in range(1, written["files"] + 1):
        name = f"model-{number:05}-of-{written['files']:05}.safetensors"
        with safe_open(tmp_path / "out" / name, "np") as file:
            there = {tensor: file.get_tensor(tensor).nbytes for tensor in file.keys()}  # noqa: SIM118
        assert {tensor for tensor, place in index["weight_map"].items() if place == name} == there.keys()
        assert sum(there.values()) <= limit or len(there) == 1
        sizes |= there
    assert index["weight_map"].keys() == sizes.keys() == tensors(GOLDEN / "llama1").keys()
    assert index["metadata"]["total_size"] == sum(sizes.values()) == written["bytes"]


def test_a_number_too_large_for_the_dtype_is_refused_with_its_tensor(llama, tmp_path):
    message = r"^model\.layers\.1\.mlp\.down_proj\.weight has the number 70000, which is infinite in float16; export "
    with pytest.raises(RequestError, match=message):
        write(llama, tmp_path / "out", "float16")


def test_numbers_are_rounded_once_to_the_nearest(llama, tmp_path):
    run = tmp_path / "run"
    model = model_of(GOLDEN / "llama1")
    params = jax.tree.map(lambda a: a * np.float32(1 / 3), read_parameters(GOLDEN / "llama1", model, abstract(model)))
    save(run, params)
    write(run, tmp_path / "exact")
    write(run, tmp_path / "half", "float16")
    exact = tensors(tmp_path / "exact")
    half = tensors(tmp_path / "half")
    for name, numbers in exact.items():
        np.testing.assert_array_equal(half[name], numbers.astype(np.float16), name)
    np.testing.assert_array_equal(exact["model.norm.weight"], np.asarray(params["norm"]["scale"]))


def test_a_checkpoint_of_another_model_is_refused_by_name(llama, tmp_path):
    model = model_of(GOLDEN / "llama1").model_copy(update={"tied": False, "mlp": 64})
    tmp_path.joinpath("out").mkdir()
    with pytest.raises(RequestError) as error:
        write_weights(tmp_path / "out", model, stored(llama), "float32")
    told = "\n".join(error.value.problems)
    assert "blocks.mlp.down of shape (2, 80, 64), and the run's config.toml means (2, 64, 64)" in told
    assert list((tmp_path / "out").iterdir()) == []
