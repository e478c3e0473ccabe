"""A vocabulary that the mesh does not divide: its added rows are in memory, and nowhere else."""

from functools import partial

import jax
import numpy as np
import pytest

from jaxdist import models
from jaxdist.config import Config
from jaxdist.mesh import devices_asked, parse_mesh
from jaxdist.training.checkpoint.manager import Checkpoints
from jaxdist.training.decoding import Choice, Decoding
from jaxdist.training.forward.step import TrainState
from jaxdist.training.run import Run
from tests.tiers import exhaustive, thinned

VOCAB = 97
ADAFACTOR = dict(name="adafactor", warmup=0)


def run_on(mesh: str, precision: str = "float32", **of) -> Run:
    model = dict(family="llama", layers=2, embed=16, heads=4, vocab=VOCAB, sequence=8, tied=False)
    options = dict(optimizer=dict(warmup=0), train=dict(steps=4, global_batch_size=8)) | of
    config = Config(mesh=mesh, precision=precision, model=model, **options)
    return Run(config, devices=jax.devices()[: devices_asked(parse_mesh(mesh))])


def tables(tree) -> list[np.ndarray]:
    """The arrays with a row for each token: of parameters, or of an optimizer state."""
    leaves = jax.tree.leaves_with_path(tree)
    return [np.asarray(a) for path, a in leaves if path[-1] in map(jax.tree_util.DictKey, ("table", "output"))]


def after_two_steps(run: Run) -> TrainState:
    rng = np.random.default_rng(0)
    state, take = run.engine.init(), jax.jit(run.step.train)
    for _ in range(2):
        ids = {name: rng.integers(0, VOCAB, a.shape).astype(a.dtype) for name, a in run.batch().items()}
        state, _ = take(state, jax.device_put(ids, jax.tree.map(lambda a: a.sharding, run.batch())))
    return state


@pytest.mark.parametrize(
    ("mesh", "of"),
    thinned(
        [
            ("1x2x1", dict(optimizer=dict(warmup=0, weight_decay=0.5))),
            ("2x2x1", dict(precision="mixed", parallel=dict(zero=3, offload="optimizer"))),
            ("1x2x2", dict(parallel=dict(zero=1))),
            ("1x1x2", dict(pipeline=dict(schedule="pipedream", microbatches=1), optimizer=dict(warmup=0, clip=0))),
        ],
        4,
    ),
    ids=str,
)
def test_added_rows_stay_zero_and_are_not_saved(mesh, of):
    run = run_on(mesh, **of)
    with jax.set_mesh(run.mesh):
        state = after_two_steps(run)
        held, saved = jax.device_get((state, run.step.logical(state)))
        for tree, logical in ((held.params, saved.params), (held.optimizer, saved.optimizer)):
            for rows, cut in zip(tables(tree), tables(logical), strict=True):
                assert rows.shape[0] > cut.shape[0] == VOCAB
                np.testing.assert_array_equal(rows[:VOCAB], cut)
                assert not rows[VOCAB:].any()
        assert len(tables(saved.params)) == 2
        assert all(np.abs(cut).sum() > 0 for cut in tables(saved.optimizer))


@pytest.mark.parametrize("mesh", ["1x2x1", *exhaustive([("1x1x2",)])])
def test_means_of_a_table_leave_its_added_rows_out(mesh):
    """Those of Adafactor, whose first update is as large as a gradient is beside them."""
    ends = []
    for run in (run_on("1x1x1", optimizer=ADAFACTOR), run_on(mesh, optimizer=ADAFACTOR)):
        with jax.set_mesh(run.mesh):
            state = after_two_steps(run)
            ends.append(jax.device_get(run.step.logical(state)))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-9), *(end.optimizer for end in ends))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), *(end.params for end in ends))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [dict(warmup=0), *exhaustive([(ADAFACTOR,)])])
def test_a_checkpoint_is_the_same_bits_on_meshes_that_add_rows_and_on_one_that_does_not(tmp_path, optimizer):
    wanted = None
    for step, mesh in enumerate(("1x2x1", "1x1x1", "1x4x1"), 1):
        run = run_on(mesh, optimizer=optimizer)
        with jax.set_mesh(run.mesh), Checkpoints(tmp_path, keep=3) as checkpoints:
            if wanted is None:
                state = after_two_steps(run)
            else:
                state = run.step.resume(checkpoints.restore(run.engine.abstract_logical()))
                abstract = run.engine.abstract()
                laid = jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), state, abstract)
                assert all(jax.tree.leaves(laid))
            saved = run.step.logical(state)
            bits = [np.asarray(a).tobytes() for a in jax.tree.leaves((saved.params, saved.optimizer))]
            wanted = wanted or bits
            assert bits == wanted
            checkpoints.save(step, saved, {"step": step})


def test_no_device_holds_a_whole_table_while_it_is_saved():
    run = run_on("1x2x1")
    with jax.set_mesh(run.mesh):
        table = run.engine.abstract_logical().params["table"]
    assert table.sharding.shard_shape(table.shape) == (VOCAB, 16 // 2)


def test_what_replicas_have_of_their_own_is_saved_without_added_rows():
    """Moments of local steps and errors of compression have a further dim for the replicas."""
    train = dict(steps=4, global_batch_size=8, local_steps=2)
    run = run_on("replica=2,model=2", train=train, parallel=dict(gradient_compression="int8"))

    def numbered(a: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(np.arange(a.size, dtype=a.dtype).reshape(a.shape), a.sharding)

    with jax.set_mesh(run.mesh):
        logical = jax.tree.map(numbered, run.engine.abstract_logical())
        assert {a.shape for a in tables((logical.optimizer, logical.crossing))} == {(VOCAB, 16, 2)}
        wanted = jax.device_get(logical)
        state = run.step.resume(logical)
        assert {a.shape for a in tables((state.optimizer, state.crossing.sums))} == {(98, 16, 2)}
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(run.step.logical(state)), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1x2x1", "1x2x2"])
def test_new_parameters_are_the_same_bits_with_added_rows(mesh):
    initial = []
    for run in (run_on("1x1x1"), run_on(mesh)):
        with jax.set_mesh(run.mesh):
            initial.append(jax.device_get(run.step.logical(run.engine.init()).params))
    jax.tree.map(np.testing.assert_array_equal, *initial)


def test_added_rows_do_not_count_as_parameters():
    assert models.parameters(run_on("1x4x1").model) == models.parameters(run_on("1x1x1").model)


@pytest.mark.slow
def test_added_rows_are_never_drawn_and_change_no_draw():
    """Of a model to which all tokens are alike: a draw among more logits would be another one."""
    drawn = []
    for run in (run_on("1x1x1"), run_on("1x4x1")):
        with jax.set_mesh(run.mesh):
            even = jax.tree.map(lambda a: 0 * a, run.engine.init().params)
        drawn.append(np.stack(list(Decoding(run, even).draw([[0]] * 8, Choice(temperature=1.0, top_k=0), seed=0))))
    np.testing.assert_array_equal(*drawn)
    assert drawn[0].max() < VOCAB
