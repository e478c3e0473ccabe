"""What runs beside the bytes that a step sends, as the schedule has it: by hand, and of XLA."""

import re
import tomllib

import pytest

from jaxdist.cluster import xla_options
from jaxdist.config import Config, ModelConfig, ParallelConfig, TrainConfig
from jaxdist.explain import explain
from jaxdist.mesh import abstract_mesh, parse_mesh
from jaxdist.planning import exposure
from jaxdist.programs import target
from jaxdist.programs.cross_compile import compile_apart
from jaxdist.programs.hlo import collectives
from jaxdist.programs.overlap import Sent, by_axes, line
from scripts import measure_overlap
from tests.planning import lowering
from tests.planning.programs import CUBE, OVER_MODEL, computation, program

START, DONE = f"f32[1024]{{0}} all-reduce-start(%p), {OVER_MODEL}", "f32[1024]{0} all-reduce-done(%0)"
DOT, SMALL = "f32[8] dot(%x, %y)", 'f32[8] custom-call(%x), custom_call_target="small"'
SENT = 4096
"""Bytes of such an all-reduce: twice a half of them, over two devices."""


@pytest.mark.parametrize(
    ("between", "sent"),
    [
        ([DOT, SMALL], Sent(products=SENT)),
        ([SMALL], Sent(kernels=SENT)),
        (["f32[8] add(%x, %y)"], Sent(exposed=SENT)),
        ([], Sent(exposed=SENT)),
    ],
)
def test_what_stands_between_start_and_done(between, sent):
    """And a product before or after hides nothing."""
    text = program(START, *between, DONE, DOT)
    assert by_axes(collectives(text, CUBE)) == {"model": sent}


def test_one_without_a_start_is_waited_for():
    text = program(DOT, f"f32[1024]{{0}} all-reduce(%p), {OVER_MODEL}", DOT)
    assert by_axes(collectives(text, CUBE)) == {"model": Sent(exposed=SENT)}


def test_loops_count_as_often_as_they_run():
    body = computation("body", START, DOT, DONE)
    loop = 'f32[8] while(%p), body=%body, condition=%body, backend_config={"known_trip_count":{"n":"7"}}'
    text = program(START, DONE, loop.replace("condition=%body", "condition=%until"), before=f"{body}\n\n{UNTIL}")
    sent = by_axes(collectives(text, CUBE))
    assert sent == {"model": Sent(products=7 * SENT, exposed=SENT)}
    assert line("model", sent["model"]) == "of 32 KiB over model: 28 KiB overlap matmuls, 4 KiB EXPOSED"


UNTIL = computation("until", "pred[] constant(true)")


@pytest.mark.slow
@pytest.mark.skipif(not target.available(), reason="JAX's CUDA plug-in is not installed: jaxdist[target]")
def test_a_program_for_gpus():
    """A sum that nothing follows hides behind nothing; a gather that no product waits for runs beside one."""
    text = compile_apart(lowering.gathered_and_summed, "h100", 8).text
    gathered, summed = 7 * 4 * lowering.EARLY, 2 * 7 / 8 * 4 * lowering.LATE
    assert by_axes(collectives(text, MESH)) == {"data": Sent(products=gathered, exposed=summed)}


MESH = abstract_mesh(parse_mesh("8x1x1"))


@pytest.mark.exhaustive
@pytest.mark.skipif(not target.available(), reason="JAX's CUDA plug-in is not installed: jaxdist[target]")
def test_what_is_explained_tells_the_options_of_a_run(monkeypatch):
    """But those that XLA_FLAGS name. The program is of them: without atomic sums, XLA sorts the tokens first."""
    model = ModelConfig(layers=4, embed=128, heads=4, vocab=512, sequence=64)
    train = TrainConfig(global_batch_size=16, deterministic=True)
    asked = Config(mesh="8x1x1", model=model, parallel=ParallelConfig(zero=3), train=train)
    names = xla_options.options("gpu", 8, across=False, deterministic=True)
    found = explain(asked, "h100")
    assert f"compiled with {xla_options.as_flags(names)}, as train does" in found.notes
    monkeypatch.setenv("XLA_FLAGS", " ".join(f"--{name}=false" for name in names))
    plain = explain(asked, "h100")
    assert not any("compiled with" in note for note in plain.notes)
    assert re.search(r" = .* sort\(", found.program.text)
    assert not re.search(r" = .* sort\(", plain.program.text)


@pytest.mark.exhaustive
@pytest.mark.skipif(not target.available(), reason="JAX's CUDA plug-in is not installed: jaxdist[target]")
@pytest.mark.skipif(xla_options.series() != "0.10", reason="the table is of jax 0.10")
def test_a_step_that_is_compiled_today_has_the_shares_of_the_table():
    """With the options of a run. Without pipelined reductions, 46 % of it were beside matmuls, and not 95 %."""
    found = tomllib.loads("\n".join(["steps = [", *measure_overlap.rows(measure_overlap.CASES["1b"]), "]"]))["steps"]
    table = [row for row in exposure.compiled_steps() if row["step"] == found[0]["step"]]
    assert [(row["part"], row["by_layer"]) for row in found] == [(row["part"], row["by_layer"]) for row in table]
    for row, wanted in zip(found, table, strict=True):
        for share in ("products", "kernels", "exposed", "memory"):
            assert row[share] == pytest.approx(wanted[share], abs=0.02), (row, wanted)
