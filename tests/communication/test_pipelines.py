"""Promise 2 for pipelines: every transfer of a step is predicted, axis by axis, to the element."""

from collections import Counter
from functools import cache

import jax
import pytest

from jaxdist.config import Config
from jaxdist.mesh import devices_asked, parse_mesh
from jaxdist.planning import communication
from jaxdist.planning.predicted_collectives import PERMUTE
from jaxdist.programs.hlo import Collective, collectives
from jaxdist.training.run import Run
from tests.planning.pipelines import config
from tests.tiers import exhaustive, thinned

GROUPED = dict(family="llama", heads=8, kv_heads=2, mlp=64)
"""Fewer key/value heads than a model axis of 4 has devices."""

ROWS = [
    ("2x1x2", dict(zero=1, remat="none")),
    ("2x1x4", dict(zero=1, microbatches=3, rows=12, layers=5)),  # padded
    ("2x2x2", dict(zero=2, sequence=True)),
    ("2x2x2", dict(zero=1, remat="block", layers=3)),
    ("2x1x2", dict(zero=3, schedule="interleaved")),
    ("2x2x2", dict(zero=3, schedule="gpipe", sequence=True, remat="dots")),
    ("replica=2,data=2,pipeline=2", dict(zero=2, family="llama", tied=False)),
    ("1x2x2", dict(whole_vocab=True)),
    ("2x2x2", dict(zero=3, sequence=True, schedule="interleaved", layers=8, virtual=2)),
    ("2x2x2", dict(zero=3, sequence=True, schedule="zb-u", remat="none")),
    ("1x2x2", dict(sequence=True, schedule="zb-h1", remat="dots")),
    ("2x2x2", dict(zero=3, sequence=True, schedule="pipedream", microbatches=1, remat="none")),
    ("1x2x2", dict(sequence=True, documents="apart")),
    ("1x4x2", dict(remat="block", head_dim=8, qkv_bias=True, qk_norm="full", **GROUPED)),
]

OTHERS = [
    ("1x4x2", GROUPED),
    ("2x2x2", dict(zero=3, schedule="interleaved", remat="none")),  # a layer in each chunk
    ("1x2x2", dict(sequence=True, vocab=97, remat="none")),  # a vocabulary with added rows
    ("1x1x2", dict(microbatches=1, rows=4)),
    ("1x2x2", dict(sequence=True, schedule="zb-u", remat="block")),
    ("2x1x4", dict(zero=2, schedule="pipedream", microbatches=1, dropout=0.1)),
    ("replica=2,data=2,pipeline=2", dict(zero=1, schedule="zb-u", remat="none")),
    ("replica=2,data=2,pipeline=2", dict(zero=2, schedule="pipedream", microbatches=1)),
    ("1x2x2", dict(sequence=True, positions=24)),  # more of them than a row has tokens
    ("1x1x2", dict()),
    ("2x2x2", dict(zero=3)),
    ("2x1x2", dict(zero=3, layers=2)),
    ("1x2x2", dict(sequence=True, layers=2)),
    ("2x2x2", dict(zero=3, schedule="zb-h1", remat="none")),
    ("2x1x2", dict(zero=1, schedule="pipedream", microbatches=1)),
    ("replica=2,data=2,pipeline=2", dict(zero=0)),
]
"""Each has the stage, the axes and the schedule of rows above, one by one."""


@cache
def moved(asked: Config) -> tuple[Run, list[Collective]]:
    """Those in a branch count as if all ranks took it in every tick: in the prediction too."""
    run = Run(asked, devices=jax.devices()[: devices_asked(parse_mesh(asked.mesh))])
    with jax.set_mesh(run.mesh):
        return run, collectives(run.lower().compile().as_text(), run.mesh)


@pytest.mark.parametrize(("mesh", "of"), [*thinned(ROWS, 12, first=3), *exhaustive(OTHERS)], ids=str)
def test_elements_are_those_of_the_program(mesh, of):
    run, found = moved(config(mesh, **of))
    predicted, counted = Counter(), Counter()
    for transfer in communication.predict(run.sharded):
        predicted[transfer.kind, transfer.axes] += transfer.elements
        assert transfer.payload_bytes == 4 * transfer.elements
    for one in found:
        counted[one.kind, one.axes] += one.array_elements * one.count
    assert +counted == predicted


SENDERS = [
    ("1x2x2", dict(whole_vocab=True)),
    ("2x2x2", dict(zero=3, schedule="gpipe", sequence=True, remat="dots")),
    ("2x1x2", dict(zero=3, schedule="interleaved")),
]
"""One of `ROWS` for each order of the units."""


@pytest.mark.parametrize(("mesh", "of"), thinned(SENDERS, 3, first=1), ids=str)
def test_neighbours_send_the_residual_stream_and_its_gradient_once_per_tick(mesh, of):
    """Two collective-permutes in the loop that runs F and B, one where there is either; of a micro-batch each."""
    assert (mesh, of) in ROWS
    run, found = moved(config(mesh, **of))
    sizes, axes = run.config.model, run.mesh.shape
    sent = [one for one in found if one.kind == "collective-permute"]
    rows = run.config.train.global_batch_size // run.config.pipeline.microbatches // axes["data"]
    stream = rows * sizes.sequence * sizes.embed // (axes["model"] if run.config.parallel.sequence else 1)
    assert {(one.axes, one.elements) for one in sent} == {(("pipeline",), stream)}
    predicted = communication.predict(run.sharded)
    assert sum(one.count for one in sent) == sum(one.calls for one in predicted if one.kind == PERMUTE)
    assert max(one.depth for one in sent) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "remat"), [(0, "stage"), (1, "none")])
def test_each_gradient_is_reduced_over_data_once_after_the_loops(zero, remat):
    _, found = moved(config("2x1x2", zero=zero, remat=remat))
    over = [one for one in found if "data" in one.axes and one.array_elements]
    assert over
    assert all((one.depth, one.count) == (0, 1) for one in over), over


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", *exhaustive([("gpipe",)])])
def test_more_micro_batches_send_more_over_pipeline_and_model_alone(schedule):
    of = [moved(config("2x2x2", schedule, microbatches=m, rows=4 * m, zero=2)) for m in (4, 8)]
    weights = [sum(one.elements * one.count for one in found if one.kind == "all-gather") for _, found in of]
    assert weights[0] == weights[1]
