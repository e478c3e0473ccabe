"""ZeRO's group of a parameter: several axes shard, gather and reduce it as one, but none that splits it already."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding

from jaxdist.config import Config
from jaxdist.mesh import DATA, MODEL, REPLICA, make_mesh, parse_mesh
from jaxdist.parallel import placing, zero
from jaxdist.parallel.crossing import replicas
from jaxdist.parallel.crossing.base import cross_at_once
from jaxdist.parallel.placement import Placement
from jaxdist.planning import parameter_layout
from jaxdist.planning.predicted_collectives import ALL_GATHER, Transfer
from jaxdist.planning.weight_traffic import gathered
from jaxdist.sharding import Layout
from tests.communication.reading import collectives, summary

SHAPE = (16, 8)
WHOLE = np.arange(16 * 8, dtype=np.float32).reshape(SHAPE)
PARTS = np.random.default_rng(0).integers(-9, 9, (8, *SHAPE)).astype(np.float32)
"""A partial sum for each of 8 devices; whole numbers, so that sums are exact in any order."""

DENSE = ("embed", None)
SPLIT = ("embed", "mlp")
"""The logical axes of a parameter that no axis of the group splits, and of one that `model` splits in use."""


@pytest.fixture(autouse=True)
def zero_shards_over_data_and_model(monkeypatch):
    monkeypatch.setattr(placing, "ZERO_AXES", (DATA, MODEL))


def mesh_and_layout(text: str) -> tuple[jax.sharding.Mesh, Layout]:
    """A mesh whose axes all split the rows of a batch, and `model` the dim mlp too."""
    mesh = make_mesh(parse_mesh(text), jax.devices())
    return mesh, Layout.on(mesh, {"batch": (REPLICA, DATA, MODEL), "mlp": (MODEL,)})


def placement(layout: Layout, axes: tuple[str | None, ...], stage: int = 1, **more: bool) -> Placement:
    abstract = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.float32)}
    return placing.placements(layout, {"w": axes}, abstract, placing.ZeroOptions(stage, **more))["w"]


def on(mesh: jax.sharding.Mesh, a: np.ndarray, spec: P) -> jax.Array:
    return jax.device_put(a, NamedSharding(mesh, spec))


def partial_sums(place: Placement, parts: jax.Array) -> jax.Array:
    """[8, ...] with a part for each device -> a gradient in use."""
    axes = tuple(axis for axis in (REPLICA, DATA, MODEL) if axis in place.use.reduced)

    def own(parts: jax.Array) -> jax.Array:
        return jax.lax.pcast(parts[0], axes, to="unreduced")

    of_each = P(axes, *place.use.partitions)
    return jax.shard_map(own, in_specs=of_each, out_specs=place.partial)(parts)


def test_a_parameter_is_sharded_over_the_axes_that_do_not_split_it():
    _, layout = mesh_and_layout("data=2,model=4")
    dense = placement(layout, DENSE)
    split = placement(layout, SPLIT)
    assert (dense.group, dense.rest) == ((DATA, MODEL), P((DATA, MODEL), None))
    assert (split.group, split.rest) == ((DATA,), P(DATA, MODEL))
    assert split.use == P(None, MODEL, reduced={DATA})


def test_an_axis_of_size_1_is_in_no_group():
    _, layout = mesh_and_layout("data=1,model=8")
    assert placement(layout, DENSE).group == (MODEL,)
    assert placement(layout, SPLIT).group == ()
    assert placement(layout, SPLIT).shard_dim is None


@pytest.mark.parametrize(("axes", "over"), [(DENSE, (DATA, MODEL)), (SPLIT, (DATA,))])
def test_one_all_gather_over_the_group_makes_a_weight_whole(axes, over):
    mesh, layout = mesh_and_layout("data=2,model=4")
    place = placement(layout, axes)
    w = on(mesh, WHOLE, place.rest)
    with jax.set_mesh(mesh):
        program = jax.jit(partial(zero.gather, place)).lower(w).compile()
    used = program(w)
    assert np.array_equal(used, WHOLE)
    assert used.sharding.is_equivalent_to(NamedSharding(mesh, P(*place.use.partitions)), 2)
    elements = WHOLE.size // layout.pieces(place.use)
    assert summary(collectives(program.as_text(), mesh)) == {("all-gather", over): (1, elements)}


@pytest.mark.parametrize(("axes", "over"), [(DENSE, (DATA, MODEL)), (SPLIT, (DATA,))])
def test_one_reduce_scatter_over_the_group_sums_a_gradient(axes, over):
    mesh, layout = mesh_and_layout("data=2,model=4")
    place = placement(layout, axes)
    parts = PARTS[: layout.size(*over)]
    of_each = on(mesh, parts, P(over, *place.use.partitions))
    with jax.set_mesh(mesh):
        program = jax.jit(lambda parts: zero.reduce(place, partial_sums(place, parts))).lower(of_each).compile()
    total = program(of_each)
    assert np.array_equal(total, parts.sum(0))
    assert total.sharding.is_equivalent_to(NamedSharding(mesh, place.rest), 2)
    elements = WHOLE.size // layout.pieces(place.use)
    assert summary(collectives(program.as_text(), mesh)) == {("reduce-scatter", over): (1, elements)}


def test_a_pipelines_region_gathers_and_reduces_over_the_group():
    mesh, layout = mesh_and_layout("data=2,model=4")
    place = placement(layout, DENSE)
    of_each = P((DATA, MODEL), None, None)

    def gather(w: jax.Array) -> jax.Array:
        return zero.gather_manual(place, w)[None]

    def reduce(parts: jax.Array) -> jax.Array:
        return zero.reduce_manual(place, parts[0])

    with jax.set_mesh(mesh):
        used = jax.jit(jax.shard_map(gather, in_specs=place.rest, out_specs=of_each))(on(mesh, WHOLE, place.rest))
        total = jax.jit(jax.shard_map(reduce, in_specs=of_each, out_specs=place.rest))(on(mesh, PARTS, of_each))
    assert np.array_equal(used, np.broadcast_to(WHOLE, PARTS.shape))
    assert np.array_equal(total, PARTS.sum(0))


@pytest.mark.parametrize(
    ("stage", "replica_zero", "held"),
    [(0, False, P(None, None)), (1, False, P((DATA, MODEL), None)), (1, True, P((DATA, MODEL, REPLICA), None))],
)
def test_what_the_group_has_scattered_crosses_the_replicas(stage, replica_zero, held):
    mesh, layout = mesh_and_layout("replica=2,data=2,model=2")
    place = placement(layout, DENSE, stage, replica_zero=replica_zero)
    assert place.held == held
    assert place.reduced.partitions == ((DATA, MODEL), None)
    with jax.set_mesh(mesh):
        add_up = jax.jit(lambda parts: zero.cross(place, zero.reduce(place, partial_sums(place, parts))))
        total = add_up(on(mesh, PARTS, P((REPLICA, DATA, MODEL), None, None)))
    assert np.array_equal(total, PARTS.sum(0))
    assert total.sharding.is_equivalent_to(NamedSharding(mesh, held), 2)


def test_late_gradients_are_gathered_over_the_group_after_they_cross():
    mesh, layout = mesh_and_layout("replica=2,data=2,model=2")
    place = placement(layout, DENSE, stage=0)

    def add_up(parts: jax.Array) -> jax.Array:
        kept = replicas.kept(place, zero.reduce(place, partial_sums(place, parts)))
        return cross_at_once({"w": place}, {"w": kept})["w"]

    with jax.set_mesh(mesh):
        total = jax.jit(add_up)(on(mesh, PARTS, P((REPLICA, DATA, MODEL), None, None)))
    assert np.array_equal(total, PARTS.sum(0))


@pytest.mark.parametrize(("axes", "over", "devices"), [(DENSE, (DATA, MODEL), 8), (SPLIT, (DATA,), 2)])
def test_a_gather_is_predicted_over_the_group(axes, over, devices):
    _, layout = mesh_and_layout("data=2,model=4")
    abstract = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.float32)}
    (p,) = parameter_layout.lay_out(layout, {"w": axes}, abstract, {"w": placement(layout, axes)})
    assert p.rest == WHOLE.size // 8
    found = list(gathered(Config(precision="float32"), p, layout, "weights of layers", 1, p.use))
    assert found == [Transfer("weights of layers", ALL_GATHER, over, devices, 1, p.use, 4)]
