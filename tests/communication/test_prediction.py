"""Promise 2: what the formulas say crosses the mesh is what the program moves, axis by axis, to the element."""

from collections import Counter

import pytest

from jaxdist.config import ModelConfig, ParallelConfig, RulesConfig
from jaxdist.planning import communication
from tests.communication.reading import collectives
from tests.communication.steps import compiled, run
from tests.parity import cases
from tests.tiers import exhaustive, thinned

GPT, LLAMA = cases.MODEL, cases.LLAMA
UNTIED = LLAMA.model_copy(update={"tied": False, "kv_heads": 4})
QWEN = LLAMA.model_copy(update={"head_dim": 8, "qkv_bias": True, "qk_norm": "head", "window": 5})
OLMO = QWEN.model_copy(update={"qk_norm": "full"})
AFTER = OLMO.model_copy(update={"layers": 4, "norms": "after", "period": "sliding,full-nope", "sliding_theta": 100.0})
BRANCHES = LLAMA.model_copy(
    update={
        "norm": "layer",
        "residual": "parallel",
        "gate": "off",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
    }
)
LEARNED = QWEN.model_copy(update={"norms": "both", "activation": "xielu", "gate": "off", "mlp_bias": True})
GEMMA = QWEN.model_copy(
    update=dict(family="gemma", layers=4, norms="both", period="sliding,full", sliding_theta=10.0)
    | dict(attention_cap=2.0, logit_cap=3.0)
)
LONG = GPT.model_copy(update={"positions": 24})
"""More learned positions than a row has tokens."""
BLOCK, APART = {"remat": "block"}, {"documents": "apart"}

ROWS = [
    ("8x1x1", 1, GPT, dict(zero=0)),
    ("replica=2,data=4", 4, GPT, dict(zero=2)),
    ("2x4x1", 4, LLAMA, dict(zero=1, sequence=True)),
    ("4x2x1", 4, UNTIED, dict(zero=3, sequence=True)),
    ("8x1x1", 4, GPT, dict(zero=2, micro_batches="outside")),
    ("replica=2,data=2,model=2", 1, GPT, dict(zero=3, sequence=True)),
    ("2x4x1", 1, GPT.model_copy(update=BLOCK), dict(zero=3, sequence=True)),
    ("1x4x1", 1, GPT, dict(zero=0, sequence=True, rules=RulesConfig(vocab=""))),
    ("2x2x1", 4, GPT.model_copy(update=APART), dict(zero=3, sequence=True, rules=RulesConfig(vocab=""))),
    ("4x1x1", 4, GPT, dict(zero=3, micro_batches="outside")),
    ("replica=2,model=4", 4, LLAMA, dict(zero=0)),  # copies of key/value heads
    ("2x2x1", 1, UNTIED.model_copy(update={"vocab": 97}), dict(zero=3, sequence=True)),
    ("2x4x1", 4, QWEN, dict(zero=3, sequence=True)),
    ("2x4x1", 4, OLMO.model_copy(update=BLOCK), dict(zero=1, sequence=True)),
    ("1x4x1", 1, BRANCHES.model_copy(update=BLOCK), dict(zero=0)),
    ("2x2x1", 1, AFTER.model_copy(update=BLOCK), dict(zero=1, sequence=True)),
    ("2x2x1", 1, LEARNED, dict(zero=3)),
    ("2x2x1", 1, GEMMA, dict(zero=3, sequence=True)),
]

OTHERS = [
    ("replica=2,data=4", 1, LLAMA, dict(zero=0)),
    ("1x8x1", 1, LLAMA, dict(zero=0)),
    ("replica=2,data=2,model=2", 4, UNTIED, dict(zero=2)),
    ("1x4x1", 1, GPT, dict(zero=0, rules=RulesConfig(vocab=""))),
    ("1x4x1", 1, GPT.model_copy(update=APART), dict(zero=0, sequence=True)),
    ("4x1x1", 4, GPT.model_copy(update={"layers": 1}), dict(zero=3, micro_batches="outside")),
    ("replica=2,data=4", 4, GPT, dict(zero=3, micro_batches="outside")),
    ("replica=2,data=2,model=2", 1, LLAMA, dict(zero=1, replica_zero=False)),
    ("2x2x1", 1, LONG, dict(zero=3, sequence=True)),
    ("8x1x1", 4, GPT, dict(zero=1)),
    ("8x1x1", 4, GPT, dict(zero=3)),
    ("2x4x1", 1, LLAMA, dict(zero=3)),
    ("2x2x1", 4, GPT, dict(zero=3, sequence=True)),
    ("2x4x1", 1, GPT.model_copy(update=BLOCK), dict(zero=0)),
    ("1x4x1", 1, GPT, dict(zero=0, sequence=True)),
    ("replica=2,model=4", 1, LLAMA, dict(zero=1)),
]
"""Each has the stage, the axes and the accumulation of rows above, one by one."""


@pytest.mark.parametrize(
    ("mesh", "accumulation", "model", "parallel"), [*thinned(ROWS, 9, first=4), *exhaustive(OTHERS)], ids=str
)
def test_elements_are_those_of_the_program(mesh: str, accumulation: int, model: ModelConfig, parallel: dict):
    asked = mesh, accumulation, model, ParallelConfig(**parallel)
    one = run(*asked)
    predicted, moved = Counter(), Counter()
    for transfer in communication.predict(one.sharded):
        predicted[transfer.kind, transfer.axes] += transfer.elements
        assert transfer.payload_bytes == 4 * transfer.elements
    for found in collectives(compiled(*asked).as_text(), one.mesh):
        moved[found.kind, found.axes] += found.array_elements * found.count
    assert +moved == predicted


@pytest.mark.parametrize(("zero", "gathers"), [(2, 1), (3, 4)])
def test_each_of_four_groups_of_micro_batches_moves_what_layers_need(zero, gathers):
    """Outside the layers each micro-batch is a group of its own; inside, all of them are one. Nothing is compiled."""
    moved = {}
    for where in ("inside", "outside"):
        one, found = run("4x1x1", 4, GPT, ParallelConfig(zero=zero, micro_batches=where)), Counter()
        for transfer in communication.predict(one.sharded):
            found[transfer.what] += transfer.elements
        moved[where] = [found[f"{what} of layers"] for what in ("weights", "gradients")]
    weights, gradients = moved["inside"]
    assert moved["outside"] == [gathers * weights, 4 * gradients]
