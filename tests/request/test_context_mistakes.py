"""Wrong meshes with `context`: each gives one sentence, before anything compiles, and what it offers works."""

from __future__ import annotations

import re
from itertools import product

import pytest

from jaxdist.config import Config, ModelConfig, ParallelConfig, PipelineConfig, RequestError
from jaxdist.mesh import parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.request import arguments, check_mesh_fits, fitting
from jaxdist.training.run import Run
from tests.request.wrong import Wrong, named

LLAMA = "--model.family llama --model.heads 8 --model.kv-heads 2"

SEQUENCES = {
    "two chunks for each device of a ring": Wrong(
        "--mesh context=8 --model.sequence 120",
        [
            (
                "model.sequence 120 does not divide by 2 x context=8 (mesh context=8), as ring attention needs",
                "; set model.sequence to 112 or 128, or the context axis to 6 or 10",
            )
        ],
    ),
    "one part for each device of Ulysses": Wrong(
        f"{LLAMA} --mesh context=4 --model.sequence 126 --parallel.context ulysses",
        [
            (
                "model.sequence 126 does not divide by context=4",
                "Ulysses needs; set model.sequence to 124 or 128, or the",
            )
        ],
    ),
    "Ulysses has room where a ring has none": Wrong(
        "--mesh context=2 --model.sequence 126 --parallel.context ring",
        [("126 does not divide by 2 x context=2", "the context axis to 3, or parallel.context to ulysses")],
    ),
    "sequence parallelism divides further": Wrong(
        "--mesh context=4,model=2 --model.sequence 120 --parallel.context ring --parallel.sequence true",
        [
            (
                "model.sequence 120 does not divide by 2 x context=4 x model=2",
                "model.sequence to 112 or 128, or the context axis to 3 or 5, or parallel.sequence to false",
            )
        ],
    ),
}

HEADS = {
    "too few heads": Wrong(
        "--mesh context=8 --parallel.context ulysses",
        [
            (
                "model.heads 4 does not divide by context=8 (mesh context=8), but parallel.context is ulysses",
                "set model.heads to 8, or the context axis to 4, or parallel.context to ring",
            )
        ],
    ),
    "too few heads of a rank of model": Wrong(
        f"{LLAMA} --mesh context=8,model=2 --parallel.context ulysses",
        [
            (
                "model.heads 8 does not divide by model=2 x context=8",
                "heads to 16, or the context axis to 4, or parallel",
            )
        ],
    ),
    "too few heads where a schedule allows no ring": Wrong(
        "--mesh context=8,pipeline=2 --pipeline.schedule zb-h1",
        [
            (
                "model.heads 4 does not divide by context=8",
                "pipeline.schedule zb-h1 allows Ulysses alone",
                "set model.heads to 8, or the context axis to 4, or pipeline.schedule to zb-u",
            )
        ],
    ),
    "no heads fit the width, and no ring the row": Wrong(
        "--mesh context=3 --model.embed 8 --model.heads 2 --model.sequence 9 --parallel.context ulysses",
        [("model.heads 2 does not divide by context=3", "; set the context axis to 1 and leave parallel.context out")],
    ),
}

SCHEDULES = {
    "ring in a branch": Wrong(
        "--mesh context=2,pipeline=2 --pipeline.schedule zb-h1 --parallel.context ring",
        [
            (
                "parallel.context is ring, but pipeline.schedule zb-h1",
                "set parallel.context to ulysses, or pipeline.schedule to zb-u",
            )
        ],
    ),
    "ring in a branch, and too few heads": Wrong(
        "--mesh context=8,pipeline=2 --pipeline.schedule zb-h1 --parallel.context ring",
        [("parallel.context is ring", "must not lie in a branch; set pipeline.schedule to zb-u")],
    ),
    "ring in a branch, and nothing else fits": Wrong(
        "--mesh context=5,pipeline=2 --pipeline.schedule zb-h1 --parallel.context ring",
        [
            ("must not lie in a branch; set the context axis to 1 and leave parallel.context out",),
            ("model.sequence 128 does not divide by 2 x context=5",),
        ],
    ),
    "ring in PipeDream": Wrong(
        "--mesh context=2,pipeline=2 --pipeline.schedule pipedream --optimizer.clip 0 --parallel.context ring",
        [("pipeline.schedule pipedream", "parallel.context to ulysses, or pipeline.schedule to 1f1b")],
    ),
}

UNUSED = {
    "a form without the axis": Wrong(
        "--mesh 2x2x1 --parallel.context ring",
        [("parallel.context is ring, but mesh 2x2x1, whose context axis is 1, does not use it; leave it out",)],
    ),
    "a form of images": Wrong(
        "cnn_digits --parallel.context ulysses", [("parallel.context is ulysses, but model.family cnn does not",)]
    ),
    "the axis of images": Wrong(
        "cnn_digits --mesh context=2",
        [("mesh context=2 has context=2, but model.family cnn has nothing that context splits; give those", "to data")],
    ),
    "a form that does not exist": Wrong(
        "--mesh context=2 --parallel.context rign",
        [("parallel.context is 'rign': valid are auto, ring, ulysses; did you mean 'ring'?",)],
    ),
}

SEVERAL = {
    "sequence and heads": Wrong(
        "--mesh context=8 --parallel.context ulysses --model.sequence 100",
        [("model.heads 4 does not divide by context=8",), ("model.sequence 100 does not divide by context=8",)],
    ),
    "heads that the model axis does not divide": Wrong(
        "--mesh context=4,model=3 --model.mlp 510", [("model.heads 4 does not divide by model=3",)]
    ),
    "heads that Ulysses can exchange": Wrong(
        "--mesh context=3,model=4 --model.heads 6 --model.embed 48 --model.mlp 96 --model.sequence 24 "
        "--parallel.context ulysses",
        [("model.heads 6 does not divide by model=4", "; set model.heads to 12, or the model axis to 2")],
    ),
    "batch and sequence": Wrong(
        "--mesh data=3,context=3",
        [("train.global_batch_size 16 does not divide by 3",), ("128 does not divide by 2 x context=3",)],
    ),
}

CASES = named({"sequence": SEQUENCES, "heads": HEADS, "schedule": SCHEDULES, "unused": UNUSED, "several": SEVERAL})


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_mistake_is_told(case: Wrong, tmp_path, monkeypatch):
    case.assert_told(tmp_path, monkeypatch)


LEGAL = [
    "--mesh data=2,context=4",
    "--mesh context=2 --model.window 16 --model.documents apart",
    "--mesh context=2 --model.positions 256",
    "--mesh context=2 --model.remat offload",
    "--mesh context=2,model=2 --parallel.rules.heads= --parallel.context ulysses",
    "--mesh context=4,pipeline=2 --pipeline.schedule zb-h1",
    "--mesh context=8,pipeline=2 --pipeline.schedule zb-u",
    "--mesh data=2,context=-1 --parallel.context ring",
    "moe_tiny --mesh expert=2,context=2 --parallel.zero 3",
]


@pytest.mark.parametrize("argv", LEGAL)
def test_what_works_is_not_refused(argv):
    arguments(argv.split(), "train", "")


GRID = list(
    product(
        (1, 2, 3, 8),
        (1, 2, 3),
        ("1f1b", "zb-h1", "zb-u"),
        ("auto", "ring", "ulysses"),
        (False, True),
        (24, 30, 32, 36),
    )
)
"""Sizes of context and model, schedules of two stages, forms, sequence parallelism, and tokens of a row."""


def request(context: int, model: int, schedule: str, form: str, split: bool, sequence: int) -> tuple[Config, str]:
    mesh = f"pipeline=2,context={context},model={model}"
    config = Config(
        mesh=mesh,
        model=ModelConfig(heads=4, sequence=sequence),
        parallel=ParallelConfig(context=form, sequence=split),
        pipeline=PipelineConfig(schedule=schedule),
    )
    return config, mesh


def told(config: Config, mesh: str) -> list[str]:
    try:
        check_mesh_fits(Split(config, parse_mesh(mesh)))
    except RequestError as error:
        return error.problems
    return []


def changed(config: Config, mesh: str, name: str, value: str) -> tuple[Config, str]:
    """The request with one of the values that a sentence offers."""
    if name.startswith("the "):
        axis = name.split()[1]
        return config, re.sub(rf"{axis}=\d+", f"{axis}={value}", mesh)
    section, knob = name.split(".")
    typed = {"true": True, "false": False}.get(value, int(value) if value.isdecimal() else value)
    part = getattr(config, section).model_copy(update={knob: typed})
    return config.model_copy(update={section: part}), mesh


OFFERS = re.compile(r"(the (?:context|model) axis|(?:model|parallel|pipeline)\.\w+) to ([\w-]+)(?: or (\d+))?")


def test_everything_that_is_offered_takes_its_sentence_back():
    """Alone, and without a new one."""
    offers = set()
    for case in GRID:
        config, mesh = request(*case)
        problems = told(config, mesh)
        for problem in problems:
            for name, *values in OFFERS.findall(problem.split(";")[1]):
                for value in filter(None, values):
                    offers.add(name)
                    left = told(*changed(config, mesh, name, value))
                    assert len(left) < len(problems), (case, problem, name, value, left)
    expected = {"the context axis", "the model axis", "model.sequence", "model.heads", "model.mlp"}
    assert offers == expected | {"parallel.context", "parallel.sequence", "pipeline.schedule"}


def test_a_request_is_refused_where_a_ring_or_heads_or_the_schedule_say_so():
    for case in GRID:
        context, model, schedule, form, split, sequence = case
        if model == 3:  # which heads do not divide by
            continue
        ring = sequence % (2 * context * (model if split else 1)) == 0 and schedule != "zb-h1"
        ulysses = sequence % (context * (model if split else 1)) == 0 and 4 // model % context == 0
        config, mesh = request(*case)
        refused = bool(told(config, mesh))
        if context == 1:
            assert refused == bool(sequence % (model if split else 1)), case
        elif form == "ring":
            assert refused == (not ring), case
        elif form == "ulysses":
            assert refused == (not ulysses), case
        elif ring and ulysses:
            assert not refused, case
        elif not ring and not ulysses:
            assert refused, case


def test_an_axis_to_fill_takes_the_largest_size_that_divides():
    config = Config(mesh="data=2,context=-1", model=ModelConfig(sequence=48), parallel=ParallelConfig(context="ring"))
    assert fitting(config, 16) == 16
    assert fitting(config, 22) == 2 * 8
    assert fitting(config, 30) == 2 * 12


def test_the_form_is_that_of_the_precision_that_a_run_has():
    """In float32, the sums of a ring are no wider than what Ulysses exchanges, and it sends less."""
    model = ModelConfig(family="llama", embed=64, heads=32, kv_heads=8, sequence=128)
    config = Config(mesh="context=2", model=model)
    assert Run(config, dry=True).layout.zigzag
    assert not Run(config.model_copy(update={"precision": "bfloat16"}), dry=True).layout.zigzag


def test_rows_without_two_chunks_for_each_device_take_ulysses():
    model = ModelConfig(family="llama", embed=64, heads=32, kv_heads=8, sequence=126)
    config = Config(mesh="context=2", model=model, precision="float32")
    check_mesh_fits(Split(config, parse_mesh("context=2")))
    assert not Run(config, dry=True).layout.zigzag
