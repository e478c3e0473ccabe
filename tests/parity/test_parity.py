"""Promise 1: any mesh gives the loss, gradient norm, gradients and updated parameters of one device.

One table of rows: a new feature adds rows. SGD, at a rate that moves the weights by 1 % at least, because Adam hides
errors of scale; one AdamW row in float64.
"""

import itertools
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxdist.config import PipelineConfig
from jaxdist.mesh import parse_mesh
from tests.parity import cases
from tests.tiers import exhaustive, thinned

TIED = cases.MODEL
UNTIED = TIED.model_copy(update={"tied": False})
EIGHT_HEADS = TIED.model_copy(update={"heads": 8})
MODELS = {
    "tied": TIED,
    "untied": UNTIED,
    "dropout": TIED.model_copy(update={"dropout": 0.2}),
    "gpt-tied": EIGHT_HEADS,
    "gpt-untied": EIGHT_HEADS.model_copy(update={"tied": False}),
    "gpt-dropout": EIGHT_HEADS.model_copy(update={"dropout": 0.2}),
    "llama-tied": cases.LLAMA,
    "llama-untied": cases.LLAMA.model_copy(update={"tied": False}),
}

ROWS = [
    ("untied", "data=4,replica=2", 4),
    ("dropout", "data=2,replica=2", 4),
]
"""What `EVERY` below leaves out: replicas without a model axis, and dropout (as `test_features.py` has them, each
alone). Their product with all is exhaustive."""


class Layout(NamedTuple):
    """One row: what is trained, and how it is laid out."""

    model: str
    mesh: str
    zero: int
    accumulation: int
    sequence: bool
    remat: str


EVERY = Layout(
    model=("gpt-tied", "gpt-untied", "llama-tied", "llama-untied"),
    mesh=("1x1x1", "8x1x1", "4x2x1", "2x4x1", "1x8x1", "replica=2,data=2,model=2"),
    zero=(0, 1, 2, 3),
    accumulation=(1, 4),
    sequence=(False, True),
    remat=("none", "dots", "block"),
)
"""The values of each field. (The two Llamas have fewer key/value heads than a model axis of 4 or 8 has devices.)"""


def pairwise() -> list[Layout]:
    """Rows among which every two values of two fields meet at least once; greedy, always the same."""
    pairs = lambda row: set(itertools.combinations(enumerate(row), 2))
    rest, rows = list(itertools.product(*EVERY)), []
    missing = set().union(*map(pairs, rest))
    while missing:
        best = max(rest, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        rows.append(Layout(*best))
    return rows


USUAL = 13
"""Of the rows of `pairwise`, those of which each has most that is new: four of five pairs meet in them."""


@cache
def one_device(model: str) -> cases.Outcome:
    outcome = cases.train(model=MODELS[model])
    assert cases.moved(outcome) > 0.01
    return outcome


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "mesh", "accumulation"), ROWS, ids=lambda value: str(value))
def test_equals_one_device(model, mesh, accumulation):
    cases.assert_equal(cases.train(mesh, accumulation, MODELS[model]), one_device(model))


def check(row: Layout, **options) -> None:
    config = MODELS[row.model].model_copy(update={"remat": row.remat})
    got = cases.train(row.mesh, row.accumulation, config, stage=row.zero, sequence=row.sequence, **options)
    cases.assert_equal(got, one_device(row.model))


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [*pairwise()[:USUAL], *exhaustive((row,) for row in pairwise()[USUAL:])],
    ids=lambda row: "-".join(map(str, row)),
)
def test_every_layout_equals_one_device(row):
    check(row)


@pytest.mark.slow
def test_micro_batches_outside_the_layers_equal_one_device():
    """With ZeRO 2 and a model axis; `test_features.py` has ZeRO 3 alone."""
    check(Layout("llama-tied", "4x2x1", 2, 4, sequence=True, remat="none"), inside=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        Layout("llama-untied", "2x4x1", 3, 4, sequence=True, remat="none"),
        *exhaustive(
            [
                (Layout("llama-tied", "1x8x1", 0, 1, sequence=False, remat="dots"),),
                (Layout("gpt-tied", "replica=2,data=2,model=2", 1, 4, sequence=True, remat="block"),),
            ]
        ),
    ],
    ids=lambda row: "-".join(map(str, row)),
)
def test_products_and_loss_as_gpus_have_them_equal_one_device(row):
    check(row, platform="gpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh", "zero", "options"),
    [
        ("gpt-tied", "replica=2,data=2", 3, dict(inside=False)),
        ("llama-tied", "replica=2,model=4", 1, dict()),  # copies of key/value heads
    ]
    + exhaustive(
        [
            ("gpt-tied", "replica=4", 2, dict()),
            ("llama-tied", "replica=2,data=2,model=2", 1, dict(replica_zero=False)),
            ("gpt-tied", "replica=2,data=2", 1, dict(keep=True)),
            ("llama-tied", "replica=2,model=4", 0, dict()),
            ("gpt-untied", "replica=2,data=2", 2, dict(replica_zero=False)),
        ]
    ),
    ids=lambda value: " ".join(value) if isinstance(value, dict) else str(value),
)
def test_replicas_equal_one_device(model, mesh, zero, options):
    """Whether they split masters and moments or not: each gradient is summed over them at the end of the step."""
    check(Layout(model, mesh, zero, 2, sequence=False, remat="none"), **options)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "zero"), [("replica=2,data=2,model=2", 2), *exhaustive([("2x2x1", 3)])])
def test_dropout_is_the_same_under_sequence_parallelism(mesh, zero):
    check(Layout("gpt-dropout", mesh, zero, 4, sequence=True, remat="dots"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("remat", ["none", "dots", "block"])
@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize(
    "mesh", ["1x1x1", "2x1x1", "4x1x1", "8x1x1", "data=2,replica=2", "data=2,replica=4", "replica=8"]
)
@pytest.mark.parametrize("model", ["tied", "untied", "dropout"])
def test_every_combination_equals_one_device(model, mesh, accumulation, remat):
    check(Layout(model, mesh, 0, accumulation, sequence=False, remat=remat))


def whole_product() -> list[Layout]:
    """Recomputation on and off; sequence parallelism where there is a model axis to split over."""
    rows = [Layout(*row) for row in itertools.product(*EVERY._replace(remat=("none", "block")))]
    return [row for row in rows if not row.sequence or parse_mesh(row.mesh)["model"] > 1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", whole_product(), ids=lambda row: "-".join(map(str, row)))
def test_the_whole_product_of_layouts_equals_one_device(row):
    check(row)


ODD = {
    "gpt-tied": TIED.model_copy(update={"vocab": 97}),
    "llama-untied": cases.LLAMA.model_copy(update={"vocab": 97, "tied": False}),
}
"""A vocabulary that no mesh divides: it gets further rows."""


@cache
def odd_on_one_device(model: str) -> cases.Outcome:
    return cases.train(model=ODD[model])


@pytest.mark.parametrize(
    ("model", "mesh", "options"),
    thinned(
        [
            ("gpt-tied", "1x2x1", dict(sequence=True)),
            ("llama-untied", "1x8x1", dict(platform="gpu")),
        ],
        2,
    )
    + exhaustive(
        [
            ("gpt-tied", "2x2x1", dict(stage=3, keep=True)),
            ("llama-untied", "1x2x2", dict(accumulation=4, sequence=True)),
        ]
    ),
    ids=lambda value: " ".join(value) if isinstance(value, dict) else str(value),
)
def test_a_vocabulary_with_added_rows_equals_one_device(model, mesh, options):
    cases.assert_equal(cases.train(mesh, model=ODD[model], **options), odd_on_one_device(model))


@pytest.mark.smoke
def test_accumulation_equals_one_batch_to_1e6():
    """Weighted by labels that count, which differ from row to row."""
    cases.assert_equal(cases.train("1x1x1", accumulation=4), one_device("tied"), tolerance=2e-6)


@pytest.mark.smoke
def test_bfloat16_equals_one_device_in_bfloat16():
    """Each device rounds its own partial sums to bfloat16 (half a unit is 0.2 %), and some of them cancel."""
    wanted = cases.train("1x1x1", dtype=jnp.bfloat16)
    cases.assert_equal(cases.train("4x1x1", dtype=jnp.bfloat16), wanted, tolerance=2e-2)


def test_bfloat16_differs_from_float32():
    """Or the row above would prove nothing."""
    with pytest.raises(AssertionError):
        cases.assert_equal(cases.train("1x1x1", dtype=jnp.bfloat16), one_device("tied"))


def test_clipping_uses_the_norm_of_the_whole_gradient():
    limit = one_device("tied").norms[0] / 3
    wanted = cases.train("1x1x1", max_norm=limit)
    assert wanted.norms[0] == pytest.approx(one_device("tied").norms[0], rel=1e-6)  # reported before clipping
    assert cases.moved(wanted) < cases.moved(one_device("tied")) * 0.9
    cases.assert_equal(cases.train("8x1x1", max_norm=limit), wanted)


STRATEGIES = {
    "data parallel": ("tied", "data=4,replica=2", dict()),
    "hybrid ZeRO 2": ("gpt-tied", "data=4,replica=2", dict(stage=2)),
    "ZeRO 1 and tensor parallel": ("gpt-untied", "2x4x1", dict(stage=1)),
    "ZeRO 3, tensor and sequence parallel": ("llama-tied", "2x4x1", dict(stage=3, sequence=True)),
    "padded stages": ("gpt-untied", "1x1x2", dict()),
    "stages, ZeRO 3, tensor and sequence parallel": ("llama-tied", "2x2x2", dict(stage=3, sequence=True)),
    "zero bubble and ZeRO 1": ("gpt-tied", "2x1x2", dict(stage=1, pipeline=PipelineConfig(schedule="zb-u"))),
}
PARTS = ("data parallel", "padded stages")
"""Of these, those whose parts others have too."""


@cache
def in_float64(model: str, mesh: str, accumulation: int, *layout: tuple[str, object]) -> cases.Outcome:
    options = dict(optimizer=optax.adamw(1e-3), dtype=jnp.float64, param_dtype=jnp.float64, max_norm=0.5)
    with jax.enable_x64(True):
        return cases.train(mesh, accumulation, MODELS[model], **options, **dict(layout))


@pytest.mark.smoke
@pytest.mark.parametrize(
    "strategy",
    [*thinned(zip([name for name in STRATEGIES if name not in PARTS]), 5), *exhaustive(zip(PARTS))],
)
def test_adamw_in_float64(strategy):
    model, mesh, layout = STRATEGIES[strategy]
    wanted = in_float64(model, "1x1x1", 1)
    assert wanted.after["table"].dtype == jnp.float64
    cases.assert_equal(in_float64(model, mesh, 2, *layout.items()), wanted, tolerance=1e-10)
