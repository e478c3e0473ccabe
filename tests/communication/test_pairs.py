"""Promise 2 for pairs of answers: a reference in each step is a forward pass of the base alone, or a number a row."""

from collections import Counter

import jax
import pytest

from jaxdist.config import Config
from jaxdist.mesh import devices_asked, parse_mesh
from jaxdist.planning import communication, memory
from jaxdist.training.run import Run
from tests.communication.reading import collectives
from tests.communication.test_frozen import LLAMA, ROUTED, STAGES, config
from tests.planning import pipelines
from tests.tiers import exhaustive

FULL = LLAMA.model_copy(update={"lora_rank": 0})

ROWS = [
    config("1x1x1", FULL),
    config("2x2x1", FULL, accumulation=2, zero=3, sequence=True),
    config("2x2x1", accumulation=2, zero=3, sequence=True),
]

OTHERS = [
    pipelines.config("2x1x2", zero=3, **STAGES),
    config("1x1x1"),
    config("2x2x1", FULL),
    config("2x2x1"),
    config("2x2x1", accumulation=2, zero=1),
    config("2x2x1", accumulation=2, zero=3, micro_batches="outside"),
    config("data=2,expert=2", ROUTED, zero=1),
    config("data=2,context=2", zero=1),
    config("data=2,context=2", FULL, accumulation=2, zero=1),
    pipelines.config("1x2x2", **{**STAGES, "lora_rank": 0}),
    pipelines.config("context=2,pipeline=2", **STAGES),
]


def on_pairs(asked: Config) -> Config:
    return asked.with_knobs({"train.objective": "dpo"})


def name(asked: Config) -> str:
    return f"{asked.mesh} zero {asked.parallel.zero} rank {asked.model.lora_rank}"


@pytest.mark.slow
@pytest.mark.parametrize("asked", [*ROWS, *exhaustive([(row,) for row in OTHERS])], ids=name)
def test_elements_and_arguments_of_a_step_on_pairs_are_those_of_the_program(asked):
    asked = on_pairs(asked)
    run = Run(asked, devices=jax.devices()[: devices_asked(parse_mesh(asked.mesh))])
    with jax.set_mesh(run.mesh):
        program = run.lower().compile()
    moved = Counter()
    for one in collectives(program.as_text(), run.mesh):
        moved[one.kind, one.axes] += one.array_elements * one.count
    predicted = Counter()
    for transfer in communication.predict(run.sharded):
        predicted[transfer.kind, transfer.axes] += transfer.elements
        assert transfer.payload_bytes == 4 * transfer.elements
    assert +moved == predicted
    assert program.memory_analysis().argument_size_in_bytes == memory.predict(run.sharded).arguments


def test_a_reference_in_each_step_gathers_the_base_once_more_and_no_adapters():
    """ZeRO 3, where a forward and a backward pass gather each layer. Nothing is compiled."""

    def gathered(asked: Config) -> int:
        transfers = communication.predict(Run(asked, devices=jax.devices()[:4]).sharded)
        return sum(one.elements for one in transfers if one.what == "weights of layers")

    asked = config("4x1x1", zero=3)
    parameters = Run(asked, devices=jax.devices()[:4]).sharded.parameters
    base = sum(p.use for p in parameters if p.stacked and ".lora." not in p.name)
    assert gathered(on_pairs(asked)) - gathered(asked) == base
    full = config("4x1x1", FULL, zero=3)
    assert gathered(on_pairs(full)) == gathered(full)
