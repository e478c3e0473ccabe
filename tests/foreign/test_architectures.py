"""Public architectures, written for one device, have the numbers of plain Flax and optax on every mesh."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist
from jaxdist.config.precision import PRECISIONS
from tests.foreign.architectures import CASES
from tests.foreign.plain import by_jaxdist, by_optax, in_float64
from tests.parity import cases
from tests.tiers import exhaustive

STEPS = 3
MESHES = ("4x1x1", "replica=2,data=2", "2x2x1", "1x1x2")

ROWS = [
    ("GAN", "4x1x1", 0, 1, "batch"),
    ("frozen batch norm", "4x1x1", 0, 4, "rows"),
    ("selective scan", "4x1x1", 1, 1, "rows"),
    ("graph network", "4x1x1", 2, 4, "rows"),
    ("U-Net", "4x1x1", 3, 4, "batch"),
    ("encoder and decoder", "replica=2,data=2", 0, 1, "batch"),
    ("VAE", "replica=2,data=2", 1, 4, "batch"),
    ("ViT", "replica=2,data=2", 2, 1, "rows"),
    ("GAN", "replica=2,data=2", 3, 4, "rows"),
    ("annotated decoder", "2x2x1", 0, 4, "batch"),
    ("LoRA by hand", "2x2x1", 1, 1, "batch"),
    ("gemma", "2x2x1", 2, 1, "batch"),
    ("experts that sow", "2x2x1", 3, 1, "batch"),
    ("experts that sow", "data=2,expert=2", 2, 4, "batch"),
    ("gemma", "1x1x2", 0, 1, "rows"),
    ("gemma", "1x1x2", 1, 4, "rows"),
    ("gemma", "1x1x2", 2, 4, "rows"),
    ("gemma", "1x1x2", 3, 1, "rows"),
]
"""Pairwise: each pair of values of two columns that can be is in a row; of the first column, of the cases' kinds."""

ADAMW = ROWS[4], ROWS[6], ROWS[12], ROWS[16]
"""One for each mesh."""

SOFTMAX_IN_FLOAT32 = "ViT", "annotated decoder"
"""Flax's attention is `jax.nn.dot_product_attention`, which rounds to float32 whatever it gets."""

FIRST = {row[0]: row for row in reversed(ROWS)}
"""The first row of each architecture."""

VERIFIED = "graph network", "VAE", "annotated decoder", "LoRA by hand", "experts that sow"
"""Of these, each kind of module, stage, accumulation, scope and mesh without a pipeline, with one of the others."""

OTHERS = [
    (name, mesh, (place + zero) % 4, (1, 4)[place // 2 % 2], "batch")
    for place, name in enumerate(CASES)
    for zero, mesh in enumerate(MESHES[:2])
]


def batches(name: str) -> list[dict[str, np.ndarray]]:
    """In float64 where JAX has it."""
    rng = np.random.default_rng(7)
    made = [CASES[name].batch(rng) for _ in range(STEPS)]
    wide = jax.dtypes.canonicalize_dtype("float64")
    return jax.tree.map(lambda a: a.astype(wide) if a.dtype == np.float32 else a, made)


def mean(loss, module, batch):
    found = loss(module, batch)
    return found[0] / found[1] if isinstance(found, tuple) else found


def plain(name: str, rule: optax.GradientTransformation, make=None, accumulation: int = 1) -> cases.Outcome:
    case = CASES[name]
    loss = case.plain or case.loss
    if callable(loss):
        loss = functools.partial(mean, loss)
    # A module that draws or sows sees one micro-batch at a time.
    k = accumulation if case.kind == "variables" else 1
    return by_optax(make or case.make, loss, batches(name), rule, case.wrt, k)


@functools.cache
def one_device(name: str, accumulation: int) -> cases.Outcome:
    outcome = plain(name, optax.sgd(CASES[name].rate), accumulation=accumulation)
    assert cases.moved(outcome) > 0.01
    return outcome


def on_mesh(row, rule: optax.GradientTransformation, make=None) -> cases.Outcome:
    name, mesh, zero, accumulation, scope = row
    case = CASES[name]
    options = dict(zero=zero, accumulation=accumulation, scope=scope, rules=case.rules, wrt=case.wrt)
    return by_jaxdist(make or case.make, case.loss, batches(name), rule, mesh, **options)


def can_be(columns: dict) -> bool:
    """Tensor parallelism sees all rows; a pipeline sees a device's rows, and takes a plain module alone."""
    mesh, scope, kind = (columns.get(name) for name in ("mesh", "scope", "kind"))
    if mesh == "2x2x1":
        return scope != "rows"
    if mesh == "1x1x2":
        return scope != "batch" and kind in (None, "plain")
    return True


@pytest.mark.smoke
def test_the_table_holds_every_pair_that_can_be():
    names = ("kind", "mesh", "zero", "accumulation", "scope")
    table = [dict(zip(names, (CASES[row[0]].kind, *row[1:]), strict=True)) for row in ROWS]
    assert all(map(can_be, table))
    assert {row[0] for row in ROWS} == set(CASES)
    verified = [(CASES[name].kind, *FIRST[name][1:]) for name in VERIFIED]
    first = [(CASES[name].kind, *row[1:]) for name, row in FIRST.items()]
    assert list(map(set, zip(*verified, strict=True))) == list(map(set, zip(*first, strict=True)))
    values = dict(kind=("plain", "variables", "special"), mesh=MESHES, zero=range(4), accumulation=(1, 4))
    values["scope"] = ("batch", "rows")
    for a, b in itertools.combinations(names, 2):
        for pair in itertools.product(values[a], values[b]):
            wanted = dict(zip((a, b), pair, strict=True))
            assert not can_be(wanted) or any(wanted.items() <= row.items() for row in table), wanted


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("row", [*ROWS, *exhaustive(zip(OTHERS))], ids=lambda row: "-".join(map(str, row)))
def test_equals_plain_optax_on_one_device(row):
    name, _, _, accumulation, _ = row
    wanted = one_device(name, accumulation if CASES[name].kind == "variables" else 1)
    cases.assert_equal(on_mesh(row, optax.sgd(CASES[name].rate)), wanted)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "row",
    [*ADAMW, *exhaustive(zip([row for row in ROWS if row not in ADAMW and row[0] not in SOFTMAX_IN_FLOAT32]))],
    ids=lambda row: "-".join(map(str, row)),
)
def test_adamw_in_float64(row, monkeypatch):
    """No precision of `parallelize` is float64: here "float32" is."""
    monkeypatch.setitem(PRECISIONS, "float32", replace(PRECISIONS["float32"], compute="float64"))
    name, accumulation = row[0], row[3]
    make = in_float64(CASES[name].make)
    with jax.enable_x64(True):
        wanted = plain(name, optax.adamw(1e-3), make, accumulation)
        found = on_mesh(row, optax.adamw(1e-3), make)
    assert {a.dtype for a in jax.tree.leaves((wanted.after, found.after))} == {jnp.dtype("float64")}
    cases.assert_equal(found, wanted, 1e-10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "row",
    [*map(FIRST.get, VERIFIED), *exhaustive(zip(row for name, row in FIRST.items() if name not in VERIFIED))],
    ids=lambda row: "-".join(map(str, row)),
)
def test_verify_says_nothing_against_them(row):
    name, mesh, zero, accumulation, scope = row
    case = CASES[name]
    options = dict(zero=zero, accumulation=accumulation, scope=scope, rules=case.rules, wrt=case.wrt)
    for loss in [case.loss] if callable(case.loss) else case.loss.values():
        trainer = jaxdist.parallelize(case.make, loss, optax.adamw(1e-3), mesh=mesh, **options)
        found = trainer.verify(batches(name)[0])
        assert found.equal, str(found)
