"""Promise 2 at ZeRO 0: every gradient crosses the data axes once per step, and nothing else of its size does."""

import itertools
import math
import re

import pytest

from jaxdist.programs.hlo import Collective
from tests.communication.reading import collectives, summary
from tests.communication.steps import compiled, lower, mesh_of, parameters
from tests.parity import cases
from tests.tiers import thinned


def communication(mesh: str, accumulation: int, model=cases.MODEL) -> list[Collective]:
    """The collectives of one train step, as XLA will run it."""
    return collectives(compiled(mesh, accumulation, model).as_text(), mesh_of(mesh))


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("mesh", "accumulation", "tied"), thinned(itertools.product(("4x1x1",), (1, 4), (True, False)), 3, first=1)
)
def test_each_gradient_is_reduced_once(mesh, accumulation, tied):
    """All-reduces of 2 (N-1)/N elements a parameter, outside every loop; the rest are scalars."""
    model = cases.MODEL.model_copy(update={"tied": tied})
    arrays = [one for one in communication(mesh, accumulation, model) if one.elements > 8]
    assert {(one.kind, one.axes, one.count) for one in arrays} == {("all-reduce", ("data",), 1)}
    assert sum(one.wire for one in arrays) == pytest.approx(2 * 3 / 4 * parameters(model), abs=8)


def test_one_device_communicates_nothing():
    assert communication("1x1x1", 4) == []


@pytest.mark.slow
def test_dropout_communicates_nothing_more():
    plain = communication("2x1x1", 2)
    dropped = communication("2x1x1", 2, cases.MODEL.model_copy(update={"dropout": 0.1}))
    assert summary(dropped) == summary(plain)


def test_the_program_does_not_grow_with_depth():
    """The lowered program has as many operations at 4 layers as at 48."""

    def operations(layers: int) -> int:
        text = lower("2x1x1", 2, cases.MODEL.model_copy(update={"layers": layers})).as_text()
        return sum(" = " in line for line in text.splitlines())

    assert operations(48) == operations(4)


def test_no_array_of_all_rows_by_the_vocabulary():
    """Nor by a whole micro-batch of one device: logits exist a chunk at a time."""
    model = cases.MODEL.model_copy(update={"vocab": 1009, "sequence": 64})
    rows = cases.ROWS * 64
    shapes = re.findall(r"\[([\d,]*1009[\d,]*)\]", compiled("1x1x1", 1, model).as_text())
    arrays = {math.prod(int(size) for size in shape.split(",")) for shape in shapes}
    assert arrays
    assert max(arrays) <= max(256 * 1009, 1009 * model.embed)
    assert rows * 1009 not in arrays
