"""In the program for an H100 each matmul with a weight of the layers is a call of cuBLASLt in fp8, and no other is."""

import re
from collections import Counter

import pytest

from jaxdist.config import Config, ModelConfig, ParallelConfig, TrainConfig
from jaxdist.explain import explain
from jaxdist.programs import target
from tests.tiers import exhaustive

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not target.available(), reason="JAX's CUDA plug-in is not installed: jaxdist[target]"),
]

GPT = ModelConfig(layers=3, embed=128, heads=4, vocab=512, sequence=64)
LLAMA = GPT.model_copy(update=dict(family="llama", heads=8, kv_heads=2, mlp=256, tied=False))
MOE = LLAMA.model_copy(update=dict(family="moe", experts=8, expert_mlp=128))

CALL = re.compile(r'custom_call_target="__cublas\$lt\$matmul\$f8".*?"operand_precision":\["(\w+)"')

TURNS = 2
"""How often the loop back stands in the text: XLA sends a layer's gradients in the next turn, and the first turn is
before the loop."""


def compiled(mesh: str, model: ModelConfig):
    """The step for H100s, beside what is predicted."""
    config = Config(
        mesh=mesh,
        precision="fp8",
        model=model,
        parallel=ParallelConfig(zero=0 if mesh == "1x1x1" else 3),
        train=TrainConfig(global_batch_size=16),
    )
    return explain(config, "h100")


@pytest.mark.parametrize(("mesh", "model"), [("2x2x1", LLAMA), *exhaustive([("1x1x1", GPT), ("4x1x1", LLAMA)])])
def test_the_matmuls_of_layers_are_calls_in_fp8(mesh, model):
    """A turn of the loop has four products, and the one back twice as many, in which no sum is in fewer bits."""
    found = compiled(mesh, model)
    back = 1 if mesh == "1x1x1" else TURNS
    assert Counter(CALL.findall(found.program.text)) == {"DEFAULT": 4, "HIGHEST": 8 * back}
    assert found.agrees


def test_the_matmuls_of_experts_are_too():
    """Forward, two products of attention, and two of the first round and of a further one.

    Back, what is computed again: both products of a further round, because ZeRO 3 keeps no result of them, and the
    first one in each of the two loops for gradients. The gradients are twice as many as the products; the loop for
    weights makes those of a further round's hidden layer once more."""
    found = compiled("data=2,expert=2", MOE)
    forward, again, gradients = 2 + 2 + 2, 2 + 2, 2 * 6 + 1
    calls = {"DEFAULT": forward + TURNS * again, "HIGHEST": TURNS * gradients}
    assert Counter(CALL.findall(found.program.text)) == calls
    assert found.agrees
