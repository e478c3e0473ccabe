"""A pipeline whose stages are processes: the numbers of one device, its layers where they belong, and one program."""

import jax
import numpy as np
import pytest

from jaxdist.config import Config
from jaxdist.data.batches import global_batch
from jaxdist.sharding import named
from jaxdist.training.run import Run
from tests.parity import cases
from tests.processes import told

STEPS = 6
MODEL = dict(layers=3, embed=16, heads=2, vocab=cases.VOCAB, sequence=cases.SEQUENCE)
"""Three layers, of which the second of two stages has one, and padding in place of another."""


def outcome(mesh: str) -> dict:
    """A few steps over all devices of all processes, each on rows of its own; the last half waits for the step before.

    `curve` has loss and gradient norm of each step, `layers` the stages whose layers this process holds, and `params`
    its part of the parameters as a checkpoint has them: name -> [(where each dim begins, numbers)].
    """
    config = Config(
        mesh=mesh,
        precision="float32",
        model=MODEL,
        parallel=dict(zero=1),
        pipeline=dict(microbatches=4),
        train=dict(global_batch_size=cases.ROWS, steps=STEPS),
        optimizer=dict(name="sgd", learning_rate=0.5, warmup=0),
    )
    run, metrics = Run(config, devices=jax.devices()[: 1 if mesh == "1x1x1" else None]), []
    with jax.set_mesh(run.mesh):
        state, step = run.engine.init(), run.compile()
        for number in range(STEPS):
            tokens, labels = cases.rows(number)

            def read(rows, tokens=tokens, labels=labels):
                return {"tokens": tokens[rows], "labels": labels[rows]}

            state, found = step(state, global_batch(np.arange(cases.ROWS), run.batch(), read))
            metrics.append(found)
            if number >= STEPS // 2:
                jax.block_until_ready(state)
        params = run.step.logical(state).params
    blocks = jax.tree.leaves(state.params["blocks"])
    return {
        "curve": [[float(one.loss), float(one.grad_norm)] for one in metrics],
        "layers": sorted({shard.index[1].start or 0 for leaf in blocks for shard in leaf.addressable_shards}),
        "params": {name: held(leaf) for name, leaf in named(params).items()},
    }


def held(array: jax.Array) -> list:
    """[(where each dim begins, the numbers)] of what lies on the devices of this process."""
    shards = array.addressable_shards
    return [([part.start or 0 for part in shard.index], np.asarray(shard.data).tolist()) for shard in shards]


PROCESS = """
from tests.pipeline.test_processes import outcome
tell(outcome("2x1x2"))
"""


@pytest.mark.slow
def test_two_processes_have_the_numbers_of_one_device():
    """The pipeline is the outermost axis: its two stages are the two processes, and each reads all rows.

    Losses, norms of gradients, and every parameter, as it would be saved, on every device that holds a part of it.
    """
    alone = outcome("1x1x1")
    found = told(PROCESS, 2, devices=4, seconds=240)
    assert [process["layers"] for process in found] == [[0], [1]]
    for process in found:
        np.testing.assert_allclose(process["curve"], alone["curve"], rtol=1e-5)
        assert process["params"].keys() == alone["params"].keys()
    for name, ((_, numbers),) in alone["params"].items():
        wanted, seen = np.array(numbers), np.zeros(np.shape(numbers), bool)
        for starts, part in (one for process in found for one in process["params"][name]):
            place = tuple(slice(start, start + size) for start, size in zip(starts, np.shape(part), strict=True))
            np.testing.assert_allclose(part, wanted[place], atol=1e-5 * np.abs(wanted).max() + 1e-7, err_msg=name)
            seen[place] = True
        assert seen.all(), name


LOWERED = """
from jaxdist.config import Config
from jaxdist.training.run import lower_step
from tests.pipeline.test_processes import MODEL
config = Config(
    mesh=arguments[0], precision="float32", model=MODEL | dict(family=arguments[2]),
    parallel=dict(zero=int(arguments[1]), sequence=True),
    pipeline=dict(microbatches=4), train=dict(global_batch_size=32),
)
tell(lower_step(config, jax.devices()).as_text())
"""

SEEDS = ("7", "14")
"""Values of PYTHONHASHSEED with which a set of two of the mesh axes' names has one order, and the other."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "zero", "family"),
    [("2x2x2", 0, "gpt"), ("replica=2,data=2,pipeline=2", 1, "gpt"), ("data=4,expert=2", 0, "moe")],
)
def test_every_process_writes_the_same_program(mesh, zero, family, monkeypatch):
    """Each compiles for itself; an order that comes from a set of names would be another one in each of them."""
    programs = []
    for seed in SEEDS:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        programs += told(LOWERED, 1, mesh, str(zero), family)
    one, other = (program.splitlines() for program in programs)
    assert [(a, b) for a, b in zip(one, other, strict=True) if a != b] == []
