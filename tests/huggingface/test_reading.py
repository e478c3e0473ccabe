"""Weights of Hugging Face's folders, read into the shards of a mesh: which numbers, how many bytes, how much memory."""

import itertools
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxdist.config import Config, DataLost, ModelConfig, ParallelConfig, RequestError
from jaxdist.huggingface import reading
from jaxdist.huggingface.families import sizes_of
from jaxdist.huggingface.folder import open_folder
from jaxdist.huggingface.parts import placed, shape_of
from jaxdist.huggingface.reading import ParameterReader, read_parameters
from jaxdist.huggingface.tensor_checks import check_tensors
from jaxdist.huggingface.type_choice import family_of
from jaxdist.huggingface.weight_files import WeightFiles
from jaxdist.mesh import parse_mesh
from jaxdist.models import build
from jaxdist.sharding import named
from jaxdist.training.run import Run
from tests.huggingface.folders import GOLDEN, NAMES, assembled, changed, model_of, sharded, tensors_of
from tests.processes import told


def laid_out(model: ModelConfig, mesh: str, zero: int = 0) -> dict:
    """The parameters of `model` as they lie between steps: shapes with shardings."""
    devices = jax.devices()[: math.prod(parse_mesh(mesh).values())]
    run = Run(Config(mesh=mesh, model=model, parallel=ParallelConfig(zero=zero)), devices=devices, batch=False)
    with jax.set_mesh(run.mesh):
        return run.engine.abstract_logical().params


def on_one_device(model: ModelConfig) -> dict:
    """The same by the table of pieces alone, on one device."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    sizes = sizes_of(model)
    tree: dict = {}
    for leaf in family_of(model).leaves:
        *parents, last = leaf.path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = jax.ShapeDtypeStruct(shape_of(leaf, sizes), np.float32, sharding=here)
    return tree


def assert_equal(found: dict, expected: dict[str, np.ndarray]) -> None:
    found = named(found)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(np.asarray(found[name]).view(np.uint32), array.view(np.uint32), err_msg=name)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_has_the_bits_of_the_file(name):
    model = model_of(GOLDEN / name)
    assert_equal(read_parameters(GOLDEN / name, model, on_one_device(model)), assembled(GOLDEN / name, model))


def test_a_constant_of_an_activation_that_is_another_is_refused(tmp_path):
    shutil.copytree(GOLDEN / "apertus", tmp_path / "folder")
    tensors = tensors_of(GOLDEN / "apertus")
    name = "model.layers.1.mlp.act_fn.beta"
    save_file(tensors | {name: np.asarray(0.25, tensors[name].dtype)}, tmp_path / "folder" / "model.safetensors")
    model = model_of(tmp_path / "folder")
    with pytest.raises(RequestError, match=rf"{name} with 0.25, and only 0.5 is computed"):
        read_parameters(tmp_path / "folder", model, on_one_device(model))


@pytest.mark.parametrize(("name", "more"), [*((name, {}) for name in NAMES), ("qwen3", {"qk_norm": "full"})])
def test_the_table_has_the_parameters_of_the_model(name, more):
    model = model_of(GOLDEN / name, **more)
    shapes = {leaf.path: shape_of(leaf, sizes_of(model)) for leaf in family_of(model).leaves}
    assert shapes == {path: a.shape for path, a in named(build(model).abstract).items()}


SHARDED = [
    *itertools.product(["llama31", "qwen2"], [("2x2x1", 3), ("1x8x1", 0), ("1x2x2", 0), ("8x1x1", 3)]),
    ("mixtral", ("data=2,expert=4", 3)),
    ("olmoe", ("expert=2,model=4", 0)),
    ("qwen3_moe", ("data=2,expert=2,pipeline=2", 3)),
]


@pytest.mark.parametrize(("name", "mesh", "zero"), [(name, *layout) for name, layout in SHARDED])
def test_each_mesh_gets_the_same_numbers_and_reads_each_byte_once(name, mesh, zero):
    """With 2 key/value heads: 8 devices of `model` split their size."""
    model = model_of(GOLDEN / name)
    like = laid_out(model, mesh, zero)
    tensors = check_tensors(open_folder(GOLDEN / name), model)
    with WeightFiles(tensors) as files:
        found = ParameterReader(files, tensors, model).read(like)
    assert_equal(found, assembled(GOLDEN / name, model))
    assert jax.tree.map(lambda a: a.sharding, found) == jax.tree.map(lambda a: a.sharding, like)
    assert files.asked == sum(array.nbytes for array in tensors_of(GOLDEN / name).values())


class Scattered:
    """In the place of a sharding: of a parameter [L, F, D], this process has two parts of F with a gap between."""

    parts = (slice(0, 20), slice(40, 60))

    def addressable_devices_indices_map(self, shape):
        return {number: (slice(None), part, slice(None)) for number, part in enumerate(self.parts)}


def test_what_lies_between_two_shards_is_not_read():
    path = GOLDEN / "llama31"
    model = model_of(path)
    tensors = check_tensors(open_folder(path), model)
    with WeightFiles(tensors) as files:
        reader = ParameterReader(files, tensors, model)
        like = SimpleNamespace(shape=(2, 80, 64), dtype=np.float32, sharding=Scattered())
        shards = reader.shards(reader.leaves["blocks.mlp.down"], like)
    whole = assembled(path, model)["blocks.mlp.down"]
    for shard, part in zip(shards.values(), Scattered.parts, strict=True):
        np.testing.assert_array_equal(shard.values, whole[:, part])
    assert files.asked == 2 * (2 * 40 * 64)


def test_shards_that_share_memory_can_be_donated():
    """All eight devices hold the same memory. A step that overwrites the weights of one must not change the others'."""
    model = model_of(GOLDEN / "llama1")
    like = laid_out(model, "8x1x1")
    scale = read_parameters(GOLDEN / "llama1", model, like)["norm"]["scale"]
    before = np.array(scale)
    shards = [shard.data for shard in scale.addressable_shards]
    assert len({shard.unsafe_buffer_pointer() for shard in shards}) == 1
    double = jax.jit(lambda w: 2 * w, donate_argnums=0)
    np.testing.assert_array_equal(double(shards[0]), 2 * before)
    np.testing.assert_array_equal(shards[1], before)


def test_one_norm_of_all_heads_is_read_into_one_scale(tmp_path):
    """OLMo's form, of which there is no golden folder."""

    def of_all_heads(tensors):
        for layer in range(2):
            for kind, count in (("q", 8), ("k", 2)):
                scale = np.arange(count * 16, dtype=np.float32).astype(tensors["model.norm.weight"].dtype)
                tensors[f"model.layers.{layer}.self_attn.{kind}_norm.weight"] = scale

    path = changed("qwen3", tmp_path / "olmo", of_all_heads)
    model = model_of(path, qk_norm="full")
    assert_equal(read_parameters(path, model, on_one_device(model)), assembled(path, model))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_every_dtype_is_cast_exactly(tmp_path, dtype):
    path = changed("llama1", tmp_path / "cast", lambda t: t.update({name: a.astype(dtype) for name, a in t.items()}))
    model = model_of(path)
    assert_equal(read_parameters(path, model, on_one_device(model)), assembled(path, model))


def read(path, **more) -> dict:
    model = model_of(path, **more)
    return read_parameters(path, model, on_one_device(model))


def test_missing_unused_and_misshapen_tensors_are_named_at_once(tmp_path):
    def spoil(tensors):
        del tensors["model.layers.0.mlp.up_proj.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.1.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
        tensors["model.norm.weight"] = np.zeros(63, np.float32)

    with pytest.raises(RequestError) as refused:
        read(changed("llama31", tmp_path / "spoilt", spoil))
    missing, unused, shapes = refused.value.problems
    assert "lacks tensors of this model: model.layers.{0-1}.mlp.up_proj.weight;" in missing
    assert "does not use: model.layers.1.self_attn.q_proj.bias;" in unused
    assert "other shapes: model.norm.weight is (63,) there and (64,) in this model;" in shapes


def test_tensors_of_all_experts_are_named_by_one_name(tmp_path):
    def spoil(tensors):
        for name in list(tensors):
            if name.endswith("w3.weight") or name == "model.layers.1.block_sparse_moe.experts.5.w1.weight":
                del tensors[name]

    with pytest.raises(RequestError) as refused:
        read(changed("mixtral", tmp_path / "spoilt", spoil))
    (missing,) = refused.value.problems
    experts = "model.layers.{0-1}.block_sparse_moe.experts.{0-7}.w3.weight"
    assert "model.layers.1.block_sparse_moe.experts.5.w1.weight" in missing
    assert experts in missing


def test_no_weight_is_read_before_all_are_checked(tmp_path, monkeypatch):
    path = changed("llama31", tmp_path / "spoilt", lambda t: t.pop("model.layers.1.mlp.down_proj.weight"))
    monkeypatch.setattr(reading, "WeightFiles", None)
    with pytest.raises(RequestError, match="lacks"):
        read(path)


def test_a_quantised_tensor_is_refused_by_its_dtype(tmp_path):
    name = "model.layers.0.mlp.down_proj.weight"
    path = changed("llama31", tmp_path / "int8", lambda t: t.update({name: t[name].astype(np.int8)}))
    with pytest.raises(RequestError, match=rf"holds {name} as I8, and only F32, BF16, F16 are read"):
        read(path)


@pytest.mark.parametrize(
    ("name", "buffer"),
    [
        ("llama1", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("gpt2", "transformer.h.1.attn.bias"),
        ("gpt2", "transformer.h.1.attn.masked_bias"),
    ],
)
def test_tensors_that_older_files_hold_and_nobody_learns_are_left_out(tmp_path, name, buffer):
    path = changed(name, tmp_path / name, lambda t: t.update({buffer: np.ones((1, 1), bool)}))
    assert_equal(read(path), assembled(GOLDEN / name, model_of(path)))


@pytest.mark.parametrize(("name", "prefix"), [("gpt2", "transformer."), ("qwen2", "model.")])
def test_names_may_lack_the_prefix(tmp_path, name, prefix):
    def without(tensors):
        for tensor in list(tensors):
            tensors[tensor.removeprefix(prefix)] = tensors.pop(tensor)

    assert_equal(read(changed(name, tmp_path / name, without)), assembled(GOLDEN / name, model_of(GOLDEN / name)))


def test_a_tensor_under_both_names_is_refused(tmp_path):
    path = changed("gpt2", tmp_path / "gpt2", lambda t: t.update({"wpe.weight": t["transformer.wpe.weight"]}))
    with pytest.raises(RequestError, match=r"holds both transformer\.wpe\.weight and wpe\.weight"):
        read(path)


def test_a_tied_output_in_the_file_must_equal_the_table(tmp_path):
    table = "model.embed_tokens.weight"
    equal = changed("qwen2", tmp_path / "equal", lambda t: t.update({"lm_head.weight": t[table].copy()}))
    assert_equal(read(equal), assembled(GOLDEN / "qwen2", model_of(equal)))

    def differ(tensors):
        tensors["lm_head.weight"] = tensors[table].copy()
        tensors["lm_head.weight"][-1, -1] += 1

    with pytest.raises(RequestError, match=f"lm_head.weight with other numbers than {table}.*tie_word_embeddings"):
        read(changed("qwen2", tmp_path / "different", differ))


def test_an_output_that_is_not_tied_must_be_there(tmp_path):
    path = changed("llama31", tmp_path / "tied", lambda t: t.pop("lm_head.weight"))
    with pytest.raises(RequestError, match=r"lacks lm_head\.weight, though its output is not tied"):
        read(path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    path = changed("gpt2", tmp_path / "twice")
    names = list(tensors_of(path))
    sharded(
        path,
        {"a.safetensors": names, "b.safetensors": names[:1]},
        dict.fromkeys(names[1:], "a.safetensors") | {names[0]: "b.safetensors"},
    )
    with pytest.raises(RequestError, match=rf"tensor {names[0]} is in '.*a\.safetensors' and in '.*b\.safetensors'"):
        read(path)


def test_an_index_that_names_an_absent_tensor_is_refused(tmp_path):
    path = changed("gpt2", tmp_path / "absent")
    names = list(tensors_of(path))
    sharded(path, {"a.safetensors": names[1:]}, dict.fromkeys(names, "a.safetensors"))
    with pytest.raises(RequestError, match=rf"names tensors that '.*a\.safetensors' lacks: {names[0]}"):
        read(path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (lambda whole: whole[:-1], "is truncated: tensor"),
        (lambda whole: whole[:100], "its header has"),
        (lambda whole: whole[:3], "it has 3 bytes"),
        (lambda whole: b"\x02" + bytes(7) + b"[]" + whole, "its header describes no tensors"),
        (lambda whole: whole.replace(b"[64,64]", b"[64,63]", 1), "is damaged: tensor"),
    ],
)
def test_a_file_that_is_not_whole_is_refused(tmp_path, content, problem):
    path = changed("gpt2", tmp_path / "damaged")
    model = model_of(path)
    file = path / "model.safetensors"
    file.write_bytes(content(file.read_bytes()))
    with pytest.raises(RequestError, match=problem):
        read_parameters(path, model, on_one_device(model))


def test_a_file_that_becomes_shorter_while_it_is_read_is_named(tmp_path):
    path = changed("gpt2", tmp_path / "shorter")
    model = model_of(path)
    tensors = check_tensors(open_folder(path), model)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-2000])
    with WeightFiles(tensors) as files, pytest.raises(DataLost, match="has become shorter"):
        ParameterReader(files, tensors, model).read(on_one_device(model))


BYTES = """
from pathlib import Path
from types import SimpleNamespace
from tests.huggingface.test_reading import asked_and_held
rows = [("llama31", "8x1x1", 3), ("llama31", "1x8x1", 0), ("mixtral", "data=2,expert=4", 3)]
tell([process, *(asked_and_held(Path(arguments[0]) / name, mesh, zero) for name, mesh, zero in rows)])
"""


def asked_and_held(path, mesh: str, zero: int) -> tuple[int, int]:
    """The bytes that this process asks of the files, and those of the distinct numbers that it keeps, as stored."""
    model = model_of(path)
    like = laid_out(model, mesh, zero)
    tensors = check_tensors(open_folder(path), model)
    with WeightFiles(tensors) as files:
        found = ParameterReader(files, tensors, model).read(like)
    expected = assembled(path, model)
    held = 0
    for name, array in named(found).items():
        (shard,) = array.addressable_shards
        np.testing.assert_array_equal(np.asarray(shard.data), expected[name][shard.index], err_msg=name)
        if name != "blocks.mlp.balance":
            held += 2 * shard.data.size
    return files.asked, held


@pytest.mark.slow
def test_a_process_asks_for_the_bytes_of_its_own_shards_alone():
    """Eight processes with a device each. No shard of a matrix is whole rows of the file on both dense meshes."""
    total = {name: sum(array.nbytes for array in tensors_of(GOLDEN / name).values()) for name in ("llama31", "mixtral")}
    for _, sharded_by_data, sharded_by_model, own_experts in sorted(told(BYTES, 8, str(GOLDEN))):
        for asked, held in (sharded_by_data, sharded_by_model):
            assert asked == held < total["llama31"] / 4
        asked, held = own_experts
        assert asked == held < total["mixtral"] / 4


MEMORY = """
import sys
from pathlib import Path
from types import SimpleNamespace
import jax
jax.config.update("jax_num_cpu_devices", 8)
from jaxdist.huggingface.reading import read_parameters
from tests.huggingface.test_reading import laid_out, model_of

status = lambda name: next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))
path = Path(sys.argv[1])
model = model_of(path)
like = laid_out(model, sys.argv[2], int(sys.argv[3]))
before = status("VmRSS:")
found = read_parameters(path, model, like)
held = {shard.data.unsafe_buffer_pointer(): shard.data.nbytes
        for leaf in jax.tree.leaves(found) for shard in leaf.addressable_shards}
print("took", sum(held.values()), status("VmHWM:") - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> tuple[Path, int]:
    """A folder of 67 million parameters in 16 layers, and the bytes of its largest tensor."""
    path = tmp_path_factory.mktemp("large")
    config = json.loads((GOLDEN / "llama31" / "config.json").read_text())
    config |= dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=16, vocab_size=4096, head_dim=64)
    config |= dict(num_key_value_heads=8, tie_word_embeddings=True)
    (path / "config.json").write_text(json.dumps(config))
    model = model_of(path)
    tensors = {}
    for leaf in family_of(model).leaves:
        for piece in placed(leaf, sizes_of(model)):
            for place in leaf.places(sizes_of(model)):
                tensors[piece.name(place)] = np.full(piece.shape, sum(place), ml_dtypes.bfloat16)
    save_file(tensors, path / "model.safetensors")
    return path, max(array.nbytes for array in tensors.values())


@pytest.mark.slow
def test_reading_takes_two_tensors_beside_the_shards_at_most(large):
    """And 64 MiB. The largest parameter, all layers of two matrices, is 128 MiB."""
    path, largest = large
    command = [sys.executable, "-c", MEMORY, str(path), "2x2x1", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    held, peak = map(int, done.stdout.split("took")[1].split())
    assert held > 256 * 2**20
    assert peak - held <= 2 * largest + 64 * 2**20
