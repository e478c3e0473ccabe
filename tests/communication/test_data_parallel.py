"""Promise 2 at ZeRO 0: every gradient crosses the data axes once per step, and nothing else of its size does."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxdist import models
from jaxdist.mesh import devices_asked, make_mesh, parse_mesh
from jaxdist.sharding import Layout
from jaxdist.training.step import Step
from tests.parity import cases

pytestmark = pytest.mark.smoke

COLLECTIVE = re.compile(r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def compiled(mesh: str, accumulation: int, model=cases.MODEL) -> str:
    """The program of one train step, as XLA will run it."""
    return lower(mesh, accumulation, model).compile().as_text()


def lower(mesh: str, accumulation: int, model=cases.MODEL):
    shape = parse_mesh(mesh)
    devices = make_mesh(shape, jax.devices()[: devices_asked(shape)])
    layout = Layout.on(devices)
    step = Step(models.build(model, layout), layout, optax.adamw(1e-3), dropout=model.dropout > 0)
    with jax.set_mesh(devices):
        state = jax.eval_shape(step.init, jax.random.key(0))
        batch = cases.on_mesh(devices, layout, *cases.rows(), accumulation)
        return jax.jit(step.train).lower(state, batch)


def collectives(program: str) -> list[tuple[str, str, int, bool]]:
    """(kind, computation, elements, in a loop) of every collective."""
    bodies = set(re.findall(r"body=%?([\w.\-]+)", program))
    found, computation = [], ""
    for line in program.splitlines():
        if line and not line.startswith(" ") and line.rstrip().endswith("{"):
            computation = line.split()[1 if line.startswith("ENTRY") else 0].lstrip("%")
        if match := COLLECTIVE.search(line):
            shapes = re.findall(r"\b[a-z]+\d+\[([\d,]*)\]", match[1])
            elements = sum(_product(shape) for shape in shapes)
            found.append((match[2], computation, elements, computation in bodies))
    return found


def _product(shape: str) -> int:
    total = 1
    for size in filter(None, shape.split(",")):
        total *= int(size)
    return total


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("mesh", ["4x1x1", "data=2,replica=2"])
def test_each_gradient_is_reduced_once(mesh, accumulation, tied):
    """All-reduces of 2 (N-1)/N elements a parameter, outside every loop; the rest are scalars."""
    model = cases.MODEL.model_copy(update={"tied": tied})
    found = collectives(compiled(mesh, accumulation, model))
    arrays = [(kind, elements, looped) for kind, _, elements, looped in found if elements > 8]
    assert {kind for kind, _, _ in arrays} == {"all-reduce"}
    assert not any(looped for _, _, looped in arrays)
    assert sum(elements for _, elements, _ in arrays) == pytest.approx(parameters(model), abs=8)


def parameters(model) -> int:
    return models.parameters(models.build(model))


def test_one_device_communicates_nothing():
    assert collectives(compiled("1x1x1", 4)) == []


def test_dropout_communicates_nothing_more():
    plain = collectives(compiled("2x1x1", 2))
    dropped = collectives(compiled("2x1x1", 2, cases.MODEL.model_copy(update={"dropout": 0.1})))
    assert sorted(c[0] for c in dropped) == sorted(c[0] for c in plain)
    assert sum(c[2] for c in dropped) == sum(c[2] for c in plain)


def test_the_counter_sees_a_reduction_in_a_loop():
    """So that the tests above cannot pass by not seeing."""
    mesh = make_mesh(parse_mesh("4x1x1"), jax.devices()[:4])
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((5, 8, 64)), jax.sharding.NamedSharding(mesh, jax.P(None, "data")))
        looped = jax.jit(lambda x: jax.lax.scan(lambda total, row: (total + row.sum(0), None), jnp.zeros(64), x)[0])
        found = collectives(looped.lower(x).compile().as_text())
    assert [(kind, elements, in_loop) for kind, _, elements, in_loop in found] == [("all-reduce", 64, True)]


def test_the_program_does_not_grow_with_depth():
    """The lowered program has as many operations at 4 layers as at 48."""

    def operations(layers: int) -> int:
        text = lower("2x1x1", 2, cases.MODEL.model_copy(update={"layers": layers})).as_text()
        return sum(" = " in line for line in text.splitlines())

    assert operations(48) == operations(4)


def test_no_array_of_all_rows_by_the_vocabulary():
    """Nor by a whole micro-batch of one device: logits exist a chunk at a time."""
    model = cases.MODEL.model_copy(update={"vocab": 1009, "sequence": 64})
    rows = 32 * 64
    shape = parse_mesh("1x1x1")
    devices = make_mesh(shape, jax.devices()[:1])
    layout = Layout.on(devices)
    step = Step(models.build(model, layout), layout, optax.sgd(0.1))
    with jax.set_mesh(devices):
        state = jax.eval_shape(step.init, jax.random.key(0))
        ids = jax.ShapeDtypeStruct((1, 32, 64), jnp.int32)
        batch = {"tokens": ids, "labels": ids, "rows": jax.ShapeDtypeStruct((1, 32), jnp.int32)}
        text = jax.jit(step.train).lower(state, batch).compile().as_text()
    arrays = {_product(s) for s in re.findall(r"\[([\d,]*1009[\d,]*)\]", text)}
    assert arrays
    assert max(arrays) <= max(256 * 1009, 1009 * model.embed)
    assert rows * 1009 not in arrays
