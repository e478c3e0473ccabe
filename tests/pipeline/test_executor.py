"""What the executor runs, read off its program, and that its gradients are those of one device."""

import itertools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from jaxdist.parallel import region
from jaxdist.parallel.pipeline.executor import SHARED
from jaxdist.parallel.pipeline.schedules import make
from jaxdist.parallel.pipeline.table import make_table
from jaxdist.programs.branch_check import across_ranks
from jaxdist.training.forward import pipeline
from tests.pipeline.test_split import bodies
from tests.pipeline.toy import Piped, count, loops
from tests.tiers import exhaustive, thinned

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-u", 1), ("zb-u", 2), ("zb-h1", 1), ("zb-h1", 2)]

ROWS = [
    ("2x2x2", "zb-h1", dict(zero=3, sequence=True, rate=0.1)),
    ("1x1x4", "gpipe", dict(micro=5, remat="stage")),
    ("2x2x2", "1f1b", dict(zero=2, sequence=True, remat="stage", layers=3)),
    ("2x2x2", "interleaved", dict(v=2, zero=3, rate=0.1, remat="dots")),
    ("1x2x4", "zb-u", dict(micro=6, remat="dots")),
]

OTHERS = [
    ("2x1x2", "interleaved", dict(v=2, zero=1, micro=5, layers=5, remat="stage")),
    ("2x2x2", "zb-u", dict(zero=2, sequence=True, rate=0.1)),
    ("2x2x2", "zb-u", dict(zero=1, v=2)),
    ("2x1x2", "zb-h1", dict(v=2, zero=2, micro=5, layers=5)),
    ("2x1x2", "zb-u", dict(layers=5, period=2, zero=2)),
    ("2x1x2", "1f1b", dict(layers=11, period=3, zero=1)),
    ("1x1x4", "1f1b", dict(micro=3, layers=6, remat="block")),
    ("2x1x2", "zb-u", dict(v=2, zero=3, layers=5, remat="block")),
    ("1x2x4", "zb-h1", dict(micro=6, sequence=True, remat="block")),
    ("2x2x2", "zb-h1", dict(zero=1, v=2, remat="dots")),
]
"""Each has the schedule, the axes, the stage and the kinds of layers of other rows, one by one."""

KINDS = [
    ("2x1x2", "zb-h1", dict(layers=7, period=3, zero=3, rate=0.1)),
    ("1x2x2", "interleaved", dict(layers=8, period=2, v=2, sequence=True, remat="block")),
    ("1x1x3", "gpipe", dict(layers=7, period=3, remat="stage")),
]
"""Layers of several kinds, with a period cut short or without."""


@pytest.mark.parametrize(
    ("mesh", "schedule", "options"),
    [*thinned(ROWS, len(ROWS), first=1), *thinned(KINDS, len(KINDS)), *exhaustive(OTHERS)],
)
def test_gradients_are_those_of_one_device(mesh, schedule, options):
    piped = Piped(mesh, schedule, **options)
    compiled = piped.compiled()
    assert all(piped.error(compiled) < 1e-6 for _ in range(5))  # where loops run at once, not every run goes wrong
    text = compiled.as_text()
    assert across_ranks(text, piped.mesh) == []
    if schedule == "zb-h1":  # the branches that all take alike move between ranks, and are seen
        assert across_ranks(text.replace(SHARED, ""), piped.mesh) != []


@pytest.fixture
def nan(monkeypatch):
    """All buffers and messages are NaN until something is written to them."""
    empty = lambda a, lead=(): region.zeros((*lead, *a.shape), a.dtype, ()) + jnp.nan
    monkeypatch.setattr(region, "zeros_like", lambda a, lead=(): region.vary(empty(a, lead), varying(a)))


@pytest.mark.parametrize(("schedule", "v"), thinned(SCHEDULES, every=3, first=2))
def test_what_idle_units_make_of_nan_reaches_nothing(nan, schedule, v):
    assert Piped("1x1x2", schedule, micro=3, v=v).error() < 1e-6


def test_what_idle_weights_make_of_nan_reaches_nothing(nan, monkeypatch):
    """With each W in the tick of its B, the ranks that begin later have none to run; zb-u itself has no idle W."""
    both = make("zb-u", 2, 3)
    monkeypatch.setattr(pipeline, "make", lambda *_: replace(both, weight=both.backward.copy()))
    assert Piped("1x1x2", "zb-u", micro=3).error() < 1e-6


def varying(a) -> frozenset[str]:
    return jax.typeof(a).manual_axis_type.varying if isinstance(a, jax.Array) else a.manual_axis_type.varying


@pytest.mark.parametrize(("schedule", "v"), SCHEDULES)
def test_ticks_permutes_and_branches(schedule, v):
    """Each segment is one loop of as many ticks, and sends each way at most once in a tick, in no branch.

    Uniform schedules have no branch, but that of the head where only some ticks of a segment have one.
    """
    S, M = 2, 4
    table = make_table(make(schedule, S, M, v))
    found = loops(Piped("1x1x2", schedule, micro=M, v=v).program())
    assert [length for length, _ in found] == [end - begin for begin, end, _ in table.segments]
    assert sum(length for length, _ in found) == table.schedule.ticks
    for (begin, end, slots), (_, body) in zip(table.segments, found, strict=True):
        sends = [e for e in body.eqns if e.primitive.name == "ppermute"]
        assert len(sends) == ("F" in slots) + ("B" in slots) == count(body, "ppermute")
        some = "H" in slots and not table.rows.head.on[begin:end].all()
        if table.schedule.uniform:
            assert count(body, "cond") == some, (begin, end, slots)
        else:  # F, B and W for each rank; the embedding, its gradient and the head for all
            assert count(body, "cond") == 2 * ("F" in slots) + some + 2 * ("B" in slots) + ("W" in slots)


def test_heads_run_in_branches_where_some_ticks_have_none():
    table = make_table(make("interleaved", 2, 4, 2))
    assert any("H" in slots and not table.rows.head.on[begin:end].all() for begin, end, slots in table.segments)
    table = make_table(make("1f1b", 2, 4))
    assert all(table.rows.head.on[begin:end].all() for begin, end, slots in table.segments if "H" in slots)


@pytest.mark.parametrize("remat", [pytest.param("none", marks=pytest.mark.slow), "stage"])
def test_memory_is_flat_in_the_micro_batches(remat):
    """1F1B: what is in flight does not grow with them (Narayanan et al. 2021, section 2.2.1)."""
    few, many = (temporaries("1f1b", micro, remat) for micro in (8, 64))
    assert math.isclose(few, many, rel_tol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "micro"), [("none", (8, 36, 64)), ("stage", (16, 40, 64))])
def test_memory_of_gpipe_grows_with_them(remat, micro):
    """With 8 micro-batches and stages computed again it is 7 % above the line that 16, 32 and 64 lie on."""
    few, more, many = (temporaries("gpipe", count, remat) for count in micro)
    assert many > 2 * few
    assert math.isclose(many - more, more - few, rel_tol=0.02)


def temporaries(schedule: str, micro: int, remat: str) -> int:
    piped = Piped("1x1x2", schedule, micro=micro, remat=remat, rows=64)
    return piped.compiled().memory_analysis().temp_size_in_bytes


def test_whole_stages_are_not_computed_again_where_the_backward_pass_is_split():
    with pytest.raises(
        ValueError, match=r"schedule zb-u splits the backward pass .* ask for remat block, dots or none"
    ):
        Piped("1x1x2", "zb-u", remat="stage").program()


@pytest.mark.parametrize(("zero", "v"), [(1, 2), (3, 4)])
def test_virtual_stages_are_not_split_over_data(zero, v):
    """v divides by 2 here; layers would be read from another chunk."""
    places = Piped("2x1x2", "interleaved", v=v, zero=zero, layers=8).forward.places["blocks"]
    assert all(
        place.shard_dim in (None, 3, 4) for place in jax.tree.leaves(places, is_leaf=lambda p: hasattr(p, "rest"))
    )
    assert np.all([place.shard_dim is not None for place in places.values()])


MOVES = ("psum", "psum_invariant", "all_gather", "all_gather_invariant", "reduce_scatter", "all_to_all")


def needed(equations: list, results: list) -> list:
    """Those of `equations` that `results` follow from, in order."""
    wanted, kept = {id(v) for v in results}, []
    for equation in reversed(equations):
        if wanted & {id(v) for v in equation.outvars}:
            kept.append(equation)
            wanted |= {id(v) for v in equation.invars}
    return kept[::-1]


@pytest.mark.parametrize(
    ("schedule", "options"),
    [("1f1b", dict(remat="stage")), ("interleaved", dict(v=2, remat="stage")), ("zb-u", {}), ("zb-h1", {})],
)
def test_collectives_of_a_tick_come_one_after_the_other(schedule, options):
    """Whatever moves within a tick, in a loop, in a branch or by itself, needs what moves before it.

    So W's loop depends on B's and B's on F's: on a CPU those that do not would run at once, and mix up their messages.
    """
    for slots, body in bodies(Piped("2x2x2", schedule, zero=2, sequence=True, **options)).items():
        moving = [
            equation
            for equation in needed(body.eqns, body.outvars)
            if equation.primitive.name in MOVES
            or any(count(inner, *MOVES) for inner in core.jaxprs_in_params(equation.params))
        ]
        for earlier, later in itertools.pairwise(moving):
            before = needed(body.eqns, later.invars)
            assert any(one is earlier for one in before), (slots, earlier.primitive.name, later.primitive.name)
