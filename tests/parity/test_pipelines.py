"""Promise 1 for pipelines: any schedule on any mesh gives the losses, gradients and weights of one device."""

from __future__ import annotations

import itertools
from functools import cache
from typing import NamedTuple

import pytest

from jaxdist.config import ModelConfig, PipelineConfig
from jaxdist.mesh import parse_mesh
from tests.parity import cases
from tests.parity.test_parity import MODELS
from tests.tiers import exhaustive


class Row(NamedTuple):
    model: str
    mesh: str
    schedule: tuple[str, int]
    """Name, and v."""
    micro_batches: int
    zero: int
    sequence: bool
    remat: str


EVERY = Row(
    model=("gpt-tied", "gpt-untied", "llama-tied", "llama-untied"),
    mesh=("1x1x2", "1x1x3", "1x1x4", "1x1x8", "2x2x2", "1x2x4", "2x1x4", "replica=2,pipeline=2,data=2"),
    schedule=(
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved", 2),
        ("interleaved", 3),
        ("zb-u", 1),
        ("zb-h1", 1),
    ),
    micro_batches=(1, 2, 3, 5, 8, 11),
    zero=(0, 1, 2, 3),
    sequence=(False, True),
    remat=("none", "dots", "block", "stage"),
)


def pairs() -> set:
    """((field, value), (field, value)) for any two; schedules that split the backward pass recompute no stage."""
    every = set()
    for i, j in itertools.combinations(range(len(EVERY)), 2):
        every |= {((i, a), (j, b)) for a in EVERY[i] for b in EVERY[j]}
    schedule, remat = Row._fields.index("schedule"), Row._fields.index("remat")
    return every - {((schedule, split), (remat, "stage")) for split in EVERY.schedule if split[0].startswith("zb")}


def pairwise() -> list[Row]:
    """Rows among which every two values of two fields meet at least once; greedy, always the same."""
    missing, rows = pairs(), []
    legal = pairs()
    while missing:
        row = _grown(dict(min(missing, key=str)), missing, legal)
        rows.append(Row(*(row[field] for field in range(len(EVERY)))))
        missing -= set(itertools.combinations(sorted(row.items()), 2))
    return rows


def _grown(row: dict[int, object], missing: set, legal: set) -> dict[int, object]:
    """Field by field, the legal value that meets most of `missing` with what is in the row already."""
    for field in sorted(set(range(len(EVERY))) - set(row)):
        met = {a: {tuple(sorted([(field, a), other])) for other in row.items()} for a in EVERY[field]}
        row[field] = max((a for a in met if met[a] <= legal), key=lambda a: len(met[a] & missing))
    return row


def kinds(row: Row) -> set:
    """What meets in `row`, of whatever size: family, axes of the mesh, schedule by name, one micro-batch or more."""
    family = row.model.partition("-")[0]
    axes = tuple(axis for axis, size in parse_mesh(row.mesh).items() if size > 1)
    of = row._replace(model=family, mesh=axes, schedule=row.schedule[0], micro_batches=min(row.micro_batches, 2))
    return set(itertools.combinations(enumerate(of), 2))


def usual() -> list[Row]:
    """Of `pairwise()`, rows among which four of five pairs of kinds meet of those that meet at all; always the same."""
    rest, rows = pairwise(), []
    missing = every = set().union(*map(kinds, rest))
    while len(missing) > len(every) / 5:
        rows.append(max(rest, key=lambda row: len(kinds(row) & missing)))
        missing = missing - kinds(rows[-1])
    return rows


def shaped(model: str, chunks: int, remat: str = "none") -> ModelConfig:
    """Six layers, or 24 for more chunks: where they do not divide, some chunks have padding."""
    return MODELS[model].model_copy(update={"layers": 6 if chunks <= 6 else 24, "remat": remat})


@cache
def one_device(model: str, layers: int) -> cases.Outcome:
    outcome = cases.train(model=shaped(model, layers))
    assert cases.moved(outcome) > 0.01
    return outcome


def check(row: Row) -> None:
    name, virtual = row.schedule
    chunks, unit = parse_mesh(row.mesh)["pipeline"] * virtual, 4 * row.micro_batches
    pipeline = PipelineConfig(schedule=name, virtual_stages=virtual)
    model, layout = shaped(row.model, chunks, row.remat), dict(stage=row.zero, sequence=row.sequence)
    got = cases.train(
        row.mesh, row.micro_batches, model, pipeline=pipeline, count=-(-cases.ROWS // unit) * unit, **layout
    )
    cases.assert_equal(got, one_device(row.model, model.layers))


@pytest.mark.slow
@pytest.mark.parametrize("row", usual(), ids=lambda row: "-".join(map(str, row)))
def test_every_pipeline_equals_one_device(row):
    check(row)


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", sorted({*pairwise()} - {*usual()}), ids=lambda row: "-".join(map(str, row)))
def test_pipelines_of_the_other_sizes_equal_one_device(row):
    check(row)


def test_the_cover_is_a_cover():
    rows = pairwise()
    met, every = (set().union(*map(kinds, some)) for some in (usual(), rows))
    assert len(met) >= 0.8 * len(every)
    assert {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)} == pairs()
    assert len(rows) <= 60


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "zero", "sequence"), [("1x4x2", 0, True), ("2x2x2", 3, False), *exhaustive([("2x2x2", 1, True)])]
)
def test_repeated_key_value_heads_equal_one_device(mesh, zero, sequence):
    """One head for keys and values, or two for a model axis of four."""
    model = MODELS["llama-tied"].model_copy(update={"kv_heads": parse_mesh(mesh)["model"] // 2, "layers": 2})
    got = cases.train(mesh, 4, model, stage=zero, sequence=sequence)
    cases.assert_equal(got, cases.train(model=model))
