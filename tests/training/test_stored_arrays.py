"""Parts of the arrays of a saved step, and how a step cuts its arrays into chunks."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.training.checkpoint import orbax_writer
from jaxdist.training.checkpoint.manager import Checkpoints
from jaxdist.training.checkpoint.stored_arrays import StoredArray, open_arrays, whole
from jaxdist.training.forward.step import TrainState

RNG = np.random.default_rng(0)
UP = RNG.standard_normal((4, 64, 128), np.float32)
TABLE = RNG.standard_normal((96, 32), np.float32)
SMALL = RNG.standard_normal((4, 16), np.float32)


def stored(folder: Path, spec: P) -> dict[str, StoredArray]:
    """The arrays of a step in which 8 devices hold parts of `UP` and `TABLE`."""
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    up = jax.device_put(UP, NamedSharding(mesh, spec))
    table = jax.device_put(TABLE, NamedSharding(mesh, P("a")))
    params = {"blocks": {"up": up, "bias": jnp.asarray(SMALL)}, "table": table}
    count = jnp.int32(0)
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(1, TrainState(count, params, (), count, count, variables={}), {"step": 1})
    with Checkpoints(folder, keep=None) as checkpoints:
        return dict(checkpoints.arrays(checkpoints.find(), "params"))


def chunks(array: StoredArray) -> tuple[int, ...]:
    return tuple(array.store.chunk_layout.read_chunk.shape)


@pytest.mark.parametrize("spec", [P(), P(None, "a", "b"), P("b", None, "a")])
def test_any_region_of_a_sharded_array_is_read(tmp_path, spec):
    arrays = stored(tmp_path, spec)
    assert set(arrays) == {"blocks.up", "blocks.bias", "table"}
    np.testing.assert_array_equal(arrays["table"].read(whole(2)), TABLE)
    region = (slice(1, 3), slice(5, 61), slice(31, 97))
    np.testing.assert_array_equal(arrays["blocks.up"].read(region), UP[region])


def test_blocks_cover_a_region_once_and_none_reaches_over_a_chunk(tmp_path):
    array = stored(tmp_path, P(None, "a", "b"))["blocks.up"]
    counts = np.zeros((1, 40, 100), int)
    for place, numbers in array.blocks((slice(2, 3), slice(10, 50), slice(20, 120))):
        counts[place] += 1
        assert all(size <= chunk for size, chunk in zip(numbers.shape, (4, 32, 32), strict=True))
    assert (counts == 1).all()


def test_large_arrays_are_saved_in_small_chunks_of_one_layer(tmp_path, monkeypatch):
    monkeypatch.setattr(orbax_writer, "CHUNK_BYTES", 4096)
    arrays = stored(tmp_path, P(None, "a", "b"))
    assert chunks(arrays["blocks.up"])[0] == 1
    assert 1024 <= np.prod(chunks(arrays["blocks.up"])) * 4 <= 4096
    assert np.prod(chunks(arrays["table"])) * 4 <= 4096
    assert chunks(arrays["blocks.bias"]) == SMALL.shape
    np.testing.assert_array_equal(arrays["blocks.up"].read(whole(3)), UP)


def test_an_item_that_a_step_lacks_has_no_arrays(tmp_path):
    stored(tmp_path, P())
    assert open_arrays(tmp_path / "checkpoints" / "1" / "variables") == {}
