"""Layers in chunks: what a rank holds, and checkpoints that know nothing of it."""

import itertools

import jax
import numpy as np
import pytest

from jaxdist.config import Config
from jaxdist.parallel.pipeline.stages import Stages, largest_chunk, split
from jaxdist.training.checkpoint.manager import Checkpoints
from jaxdist.training.run import Run
from tests.tiers import thinned


def run_on(mesh: str, schedule: str = "1f1b", virtual: int = 0, zero: int = 0, **train) -> Run:
    config = Config(
        mesh=mesh,
        precision="float32",
        model=dict(layers=6, embed=32, heads=4, vocab=97, sequence=16, dropout=0.1),
        parallel=dict(zero=zero),
        pipeline=dict(schedule=schedule, virtual_stages=virtual),
        train=dict(steps=4, global_batch_size=16, **train),
        optimizer=dict(warmup=0),
    )
    return Run(config, devices=jax.devices()[: int(np.prod([int(size) for size in mesh.split("x")]))])


@pytest.mark.slow
def test_layers_saved_on_one_pipeline_are_the_same_bits_on_another(tmp_path):
    """Four stages of 2, 2, 1 and 1 layers; then two stages in three parts each; then one device."""
    wanted = None
    for step, (mesh, *pipeline) in enumerate([("1x1x4",), ("1x1x2", "interleaved", 3), ("2x1x1", "1f1b", 0, 3)], 1):
        run = run_on(mesh, *pipeline)
        with jax.set_mesh(run.mesh), Checkpoints(tmp_path, keep=3) as checkpoints:
            state = run.step.resume(checkpoints.restore(run.engine.abstract_logical())) if wanted else run.engine.init()
            saved = run.step.logical(state)
            assert {a.shape[0] for a in jax.tree.leaves(saved.params["blocks"])} == {6}
            bits = [np.asarray(a).tobytes() for a in jax.tree.leaves((saved.params, saved.optimizer))]
            wanted = wanted or bits
            assert bits == wanted
            checkpoints.save(step, saved, {"step": step})


def test_one_initial_model_whatever_the_stages():
    one = run_on("1x1x1")
    with jax.set_mesh(one.mesh):
        wanted = jax.device_get(one.engine.init().params)
    run = run_on("2x1x4", zero=3)
    with jax.set_mesh(run.mesh):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(run.step.logical(run.engine.init()).params), wanted)


def test_stages_fold_layers_in_float32_and_then_in_float64():
    """JAX 0.10 keeps the first type that it gave an array of int64, and the stages of one shape are one object."""
    stages = Stages.cut(3, 2, 1)
    programs = []  # which hold what JAX has kept
    for x64, dtype in ((False, "float32"), (True, "float64")):
        with jax.enable_x64(x64):
            layers = {"blocks": jax.numpy.arange(1, 4, dtype=dtype)}
            programs.append(jax.jit(lambda tree: stages.fold(tree)))
            folded = programs[-1](layers)["blocks"]
            assert folded.dtype == dtype
            np.testing.assert_array_equal(folded, [[[1, 2], [3, 0]]])


@pytest.mark.parametrize(
    ("mesh", "pipeline"), thinned([("1x1x4", ("gpipe",)), ("1x2x2", ("interleaved", 3))], 2, first=1)
)
def test_logits_and_validation_are_those_of_one_device(mesh, pipeline):
    told = []
    for run in (run_on("1x1x1"), run_on(mesh, *pipeline)):
        with jax.set_mesh(run.mesh):
            weights = run.forward.weights(run.engine.init().params)
            tokens = np.arange(16 * 16, dtype=np.int32).reshape(16, 16) % 97
            logits = jax.jit(run.forward.logits)(weights, jax.device_put(tokens, run.layout.spec(["batch", None])))
            batch = {"tokens": tokens[None], "labels": np.roll(tokens, -1, 1)[None], "rows": np.arange(16)[None]}
            batch = {name: a.reshape(run.split.micro_batches, -1, *a.shape[2:]) for name, a in batch.items()}
            batch = jax.device_put(batch, run.layout.spec([None, "batch"]))
            told.append(jax.device_get((logits, jax.jit(run.forward.evaluate)(weights, {}, batch)[0])))
    np.testing.assert_allclose(told[1][0][..., :97], told[0][0], atol=2e-6)
    np.testing.assert_allclose(told[1][1], told[0][1], rtol=1e-6)


def test_a_split_is_the_best_there_is():
    rng = np.random.default_rng(0)
    for _ in range(50):
        layers = int(rng.integers(1, 9))
        chunks, costs = int(rng.integers(1, layers + 1)), rng.integers(1, 9, layers).tolist()
        sizes = split(costs, chunks)
        best = min(worst(costs, ends) for ends in itertools.combinations(range(1, layers), chunks - 1))
        assert len(sizes) == chunks
        assert sum(sizes) == layers
        assert worst(costs, np.cumsum(sizes)[:-1].tolist()) == best


def worst(costs, ends):
    return max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *ends, len(costs)]))


def test_equal_layers_are_dealt_as_evenly_as_can_be():
    assert split([1] * 6, 4) == (2, 2, 1, 1)
    assert Stages.cut(6, 4, 1).valid[0, :, 1].tolist() == [True, True, False, False]
    with pytest.raises(ValueError, match=r"2 layers cannot make 3 chunk"):
        split([1, 1], 3)


def test_chunks_are_cut_between_periods():
    for layers, chunks, period in itertools.product(range(1, 20), range(1, 6), range(1, 5)):
        if chunks <= -(-layers // period):
            stages = Stages.cut(layers, chunks, 1, period)
            assert sum(stages.sizes) == layers
            assert not any(size % period for size in stages.sizes[:-1])
            assert stages.depth == largest_chunk(layers, np.array([chunks]), period)
            assert sum(map(stages.places_of, range(period))) == stages.depth
    # The rest of a period stands beside whole ones, or alone.
    assert Stages.cut(7, 2, 1, 3).sizes == (3, 4)
    assert Stages.cut(7, 3, 1, 3).sizes == (3, 3, 1)
    with pytest.raises(ValueError, match=r"3 periods cannot make 4 chunks; ask for at most 3"):
        Stages.cut(7, 2, 2, 3)
