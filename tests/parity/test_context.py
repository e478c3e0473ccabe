"""Promise 1 with context parallelism: what a token sees depends on no device that holds it.

Rows lie in zigzag order for the ring, and in order for Ulysses. On most meshes a chunk has two tokens or more, and a
document ends at its border in one row and inside it in another.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdist.config import PipelineConfig
from jaxdist.mesh import parse_mesh
from jaxdist.parallel.crossing.codes import Int8
from tests.parity import cases, test_experts
from tests.tiers import exhaustive

MODELS = {
    "llama": cases.LLAMA,
    "long": cases.LLAMA.model_copy(update=dict(sequence=32)),
    "gpt": cases.MODEL,
    "dropout": cases.MODEL.model_copy(update=dict(dropout=0.1)),
    "window": cases.LLAMA.model_copy(update=dict(layers=5, window=5)),
    "moe": test_experts.MIXTRAL.model_copy(update=dict(layers=5, capacity_factor=0.5)),
}


class Row(NamedTuple):
    model: str
    form: str
    mesh: str
    zero: int = 0
    micro_batches: int = 1
    sequence: bool = False
    remat: str = "none"
    apart: bool = False
    schedule: str = ""

    def __str__(self) -> str:
        return "-".join(map(str, self))


ROWS = [
    Row("long", "ring", "context=8", 1, 1, False, "none", True),
    Row("dropout", "ring", "replica=2,data=2,context=2", 2, 4, False, "none", True),
    Row("window", "ring", "context=4,model=2", 0, 2, False, "offload", True),
    Row("llama", "ring", "context=2,model=4", 1, 1, True, "none", False),
    Row("moe", "ring", "data=2,expert=2,context=2", 3, 2, False, "block", True),
    Row("moe", "ulysses", "expert=2,context=2,model=2", 1, 4, True, "none", False),
    Row("dropout", "ring", "data=2,context=2,pipeline=2", 3, 4, False, "block", True, "1f1b"),
    Row("gpt", "ulysses", "data=2,context=2,pipeline=2", 2, 4, False, "dots", True, "zb-h1"),
]
"""Each form of attention with each family, and schedules.

The mesh context=4,model=2 has fewer key/value heads than a device needs, and context=2,model=4 fewer than its model
axis has devices."""

OTHERS = [
    Row("moe", "ring", "context=2,expert=2,pipeline=2", 1, 4, False, "stage", True, "gpipe"),
    Row("gpt", "ring", "data=2,context=2,model=2", 3, 2, True, "block", False),
    Row("dropout", "ulysses", "data=2,context=2,model=2", 2, 1, True, "dots", False),
    Row("llama", "ring", "context=2,model=2,pipeline=2", 0, 4, True, "none", False, "zb-u"),
    Row("llama", "ring", "data=2,context=4", 3, 2, False, "dots", True),
    Row("gpt", "ulysses", "data=2,context=4", 1, 1, False, "offload", True),
    Row("window", "ulysses", "context=4,model=2", 0, 4, True, "block", False),
    Row("window", "ring", "context=4,pipeline=2", 1, 2, False, "none", False, "interleaved"),
]
"""What `product` does not have of the other kinds of mesh, forms of recomputation and schedules."""

EVERY = Row(
    model=("llama", "gpt", "dropout", "window", "moe"),
    form=("ring", "ulysses"),
    mesh=(
        "data=2,context=4",
        "data=2,context=2,model=2",
        "context=2,model=4",
        "replica=2,data=2,context=2",
        "data=2,expert=2,context=2",
    ),
    zero=(0, 1, 2, 3),
    micro_batches=(2,),
    sequence=(False, True),
    remat=("none", "block"),
    apart=(True,),
    schedule=("",),
)

PIPELINES = EVERY._replace(
    model=("dropout", "window", "moe"),
    mesh=("data=2,context=2,pipeline=2", "context=2,model=2,pipeline=2", "context=4,pipeline=2"),
    zero=(1, 3),
    micro_batches=(4,),
    remat=("block",),
    schedule=("gpipe", "1f1b", "interleaved", "zb-h1", "zb-u"),
)


def works(row: Row) -> bool:
    """Whether there is a model axis for sequence parallelism to split over, and nothing that is refused is asked."""
    mesh = parse_mesh(row.mesh)
    if row.sequence and mesh["model"] == 1:
        return False
    if row.schedule == "zb-h1" and row.form == "ring":
        return False
    if row.schedule == "interleaved" and MODELS[row.model].layers < 2 * mesh["pipeline"]:
        return False
    if row.model in ("gpt", "dropout") and row.form == "ulysses":
        return MODELS[row.model].heads // mesh["model"] % mesh["context"] == 0
    return True


def product() -> list[Row]:
    every = itertools.chain(itertools.product(*EVERY), itertools.product(*PIPELINES))
    return [*OTHERS, *(row for row in itertools.starmap(Row, every) if works(row))]


def trained(row: Row, **options) -> cases.Outcome:
    pipeline = None
    if row.schedule:
        pipeline = PipelineConfig(schedule=row.schedule, virtual_stages=2 if row.schedule == "interleaved" else 1)
    return cases.train(
        row.mesh,
        row.micro_batches,
        MODELS[row.model].model_copy(update=dict(remat=row.remat)),
        stage=row.zero,
        sequence=row.sequence,
        pipeline=pipeline,
        apart=row.apart,
        context=row.form,
        **options,
    )


@cache
def one_device(model: str, *options: tuple[str, object]) -> cases.Outcome:
    outcome = cases.train(model=MODELS[model], **dict(options))
    assert cases.moved(outcome) > 0.01
    return outcome


def assert_equal(got: cases.Outcome, wanted: cases.Outcome, tolerance: float = 1e-5) -> None:
    if wanted.counts:
        test_experts.assert_equal(got, wanted, tolerance)
    else:
        cases.assert_equal(got, wanted, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_equals_one_device(row):
    assert_equal(trained(row), one_device(row.model, ("apart", row.apart)))


def by_hand(number: int, count: int, length: int) -> np.ndarray:
    """Documents that the zigzag of four devices cuts in every way: of chunks of S/8 tokens.

    By turns a row has a document in each chunk; documents that end inside chunks; one that fills the row but for its
    first and its last token; documents of one token beside one over several chunks.
    """
    chunk = length // 8
    begins = np.zeros((count, length), bool)
    begins[0::4, ::chunk] = True
    begins[1::4, 1::chunk] = True
    begins[2::4, [1, length - 1]] = True
    begins[3::4, [chunk - 1, chunk, chunk + 1, length - chunk, length - chunk + 1]] = True
    return cases.starts_of(np.roll(begins, number, axis=0))


FURTHER = {
    "documents at and inside the borders of chunks": (
        Row("llama", "ring", "data=2,context=4", 1, 1, False, "none", True),
        dict(documents=by_hand),
    ),
    "the same documents with whole rows": (
        Row("llama", "ulysses", "data=2,context=4", 0, 1, False, "none", True),
        dict(documents=by_hand),
    ),
    "as GPUs have it": (
        Row("window", "ring", "context=4,model=2", 1, 1, True, "dots", True),
        dict(platform="gpu"),
    ),
    "micro-batches outside the layers": (
        Row("dropout", "ring", "data=2,context=2,model=2", 2, 4, False, "none", True),
        dict(inside=False),
    ),
    "micro-batches outside the layers, whole rows": (
        Row("moe", "ulysses", "data=2,context=2,model=2", 3, 2, True, "none", False),
        dict(inside=False),
    ),
    "replicas that hold the same": (
        Row("llama", "ring", "replica=2,context=4", 1, 2, False, "none", False),
        dict(replica_zero=False),
    ),
}
EXHAUSTIVE = {case for case in FURTHER if case.startswith(("micro-batches", "replicas", "the same"))}
CHANGES = {"documents"}
"""Of the options above, those that change what one device computes."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*(case for case in FURTHER if case not in EXHAUSTIVE), *exhaustive((case,) for case in sorted(EXHAUSTIVE))]
)
def test_equals_one_device_whatever_else_is_asked(case):
    row, options = FURTHER[case]
    changes = {name: value for name, value in options.items() if name in CHANGES}
    assert_equal(trained(row, **options), one_device(row.model, ("apart", row.apart), *changes.items()))


@pytest.mark.parametrize("row", exhaustive(zip(product())), ids=str)
def test_the_whole_product_equals_one_device(row):
    assert_equal(trained(row), one_device(row.model, ("apart", row.apart)))


@cache
def in_float64(row: Row) -> cases.Outcome:
    options = dict(optimizer=optax.adamw(1e-3), dtype=jnp.float64, param_dtype=jnp.float64, max_norm=0.5)
    with jax.enable_x64(True):
        return trained(row, **options)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(Row("llama", "ring", "data=2,context=4", 3, 2, False, "none", True), marks=pytest.mark.slow),
        *exhaustive([(Row("gpt", "ulysses", "data=2,context=2,model=2", 1, 4, True, "none", True),)]),
    ],
    ids=str,
)
def test_adamw_in_float64(row):
    wanted = in_float64(Row(row.model, "auto", "1x1x1", apart=row.apart))
    assert jax.tree.leaves(wanted.after)[0].dtype == jnp.float64
    assert_equal(in_float64(row), wanted, tolerance=1e-10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("keep", [False, True], ids=["bfloat16", "mixed"])
def test_bfloat16_is_close_to_one_device_in_bfloat16(keep):
    row = Row("llama", "ring", "context=4", 1, 1, False, "none", True)
    options = dict(dtype=jnp.bfloat16, keep=keep)
    got = trained(row, **options)
    wanted = one_device(row.model, ("apart", row.apart), *options.items())
    np.testing.assert_allclose(got.losses, wanted.losses, rtol=1e-3)
    np.testing.assert_allclose(got.norms, wanted.norms, rtol=2e-2)


@pytest.mark.slow
def test_compressed_gradients_of_parts_of_rows_are_close():
    row = Row("llama", "ring", "replica=2,context=2", 1, 2, False, "none", True)
    got = trained(row, compression=Int8())
    wanted = one_device(row.model, ("apart", row.apart))
    np.testing.assert_allclose(got.losses, wanted.losses, rtol=5e-3)
    np.testing.assert_allclose(got.norms, wanted.norms, rtol=5e-2)


@pytest.mark.slow
def test_documents_and_the_window_change_the_gradient():
    """Or the rows above would prove nothing of them."""
    joined = one_device("llama", ("apart", False))
    for other in (one_device("llama", ("apart", True)), one_device("window", ("apart", False))):
        with pytest.raises(AssertionError):
            cases.assert_equal(other, joined, tolerance=1e-3)
