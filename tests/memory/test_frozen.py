"""Promise 2, the bytes held with frozen parameters (LoRA): a state is predicted to the byte, and only adapters cost."""

import jax
import pytest

from jaxdist import models
from jaxdist.config import Config, ModelConfig, OptimizerConfig, PipelineConfig
from jaxdist.config.matmuls import matmuls_of
from jaxdist.config.trained import all_trained_beside
from jaxdist.planning import memory
from jaxdist.sharding import HOST, Layout
from jaxdist.training.run import Run
from tests.memory.test_prediction import GROUPED, MODEL, ROUTED, config, own_bytes, planned
from tests.planning.sharded import sharded_by
from tests.tiers import exhaustive, thinned

MODELS = {"gpt": MODEL, "llama": GROUPED, "routed": ROUTED}


def adapted(mesh: str, precision: str, zero: int, base: str, model: str = "llama", **sizes) -> Config:
    sizes = {"lora_rank": 4, "lora_base": base} | sizes
    return config(mesh, precision, zero, model=MODELS[model].model_copy(update=sizes))


def bytes_at_rest(asked: Config) -> tuple[int, int]:
    """(on a device, in its host's memory) of arrays as they are going to lie, without a program"""
    run = Run(asked)
    with jax.set_mesh(run.mesh):
        arrays = jax.tree.leaves(run.engine.abstract())
    hosted = sum(own_bytes(a) for a in arrays if a.sharding.memory_kind == HOST)
    return sum(map(own_bytes, arrays)) - hosted, hosted


def predicted(asked: Config) -> memory.Memory:
    run = Run(asked)
    return memory.predict(run.sharded)


ROWS = [
    ("4x2x1", "float32", 3, "llama", "float32"),
    ("1x4x1", "bfloat16", 0, "llama", "bfloat16"),
    ("8x1x1", "mixed", 1, "gpt", "bfloat16"),
    ("replica=2,data=2,model=2", "mixed", 3, "llama", "float32"),
    ("data=2,expert=2", "float32", 2, "routed", "bfloat16"),
    ("2x4x1", "bfloat16", 1, "gpt", "float32"),
    ("4x2x1", "bfloat16", 3, "llama", "nf4"),
    ("replica=2,data=2,model=2", "mixed", 1, "gpt", "int8"),
]


@pytest.mark.parametrize(("mesh", "precision", "zero", "model", "base"), thinned(ROWS, 3, first=1))
def test_bytes_of_the_state_are_predicted_exactly(mesh, precision, zero, model, base):
    asked = adapted(mesh, precision, zero, base, model)
    held = predicted(asked)
    assert bytes_at_rest(asked) == (held.arguments - held.batch, 0)


@pytest.mark.parametrize("precision", ["bfloat16", "mixed"])
def test_frozen_parameters_stay_on_the_device_where_the_rest_waits_in_the_hosts_memory(precision):
    asked = adapted("2x1x2", precision, 1, "bfloat16")
    parallel = asked.parallel.model_copy(update={"offload": "optimizer"})
    update = {
        "parallel": parallel,
        "optimizer": OptimizerConfig(name="lion"),
        "pipeline": PipelineConfig(microbatches=2),
    }
    train = asked.train.model_copy(update={"accumulation": 1})
    asked = asked.model_copy(update={**update, "train": train})
    held = predicted(asked)
    assert bytes_at_rest(asked) == (held.arguments - held.batch, held.host)


@pytest.mark.parametrize(
    ("precision", "base", "frozen", "trained"),
    [("float32", "float32", 4, 12), ("bfloat16", "bfloat16", 2, 12), ("mixed", "bfloat16", 2, 14)],
)
def test_a_frozen_parameter_costs_its_own_dtype_and_an_adapter_what_a_parameter_does(precision, base, frozen, trained):
    """Bytes for each, on one device, with AdamW. Nothing is compiled."""
    layout = Layout((), "cpu", ())
    asked = adapted("1x1x1", precision, 0, base)
    model = models.build(asked.model, layout)
    parameters = sharded_by(asked, model, layout).parameters
    adapters = sum(p.elements for p in parameters if ".lora." in p.name)
    others = sum(p.elements for p in parameters) - adapters
    held = memory.predict(sharded_by(asked, model, layout))
    counters = 20
    assert held.arguments - held.batch - counters == frozen * others + trained * adapters
    assert sum(memory.state(asked, p) for p in parameters) == held.arguments - held.batch - counters


@pytest.mark.parametrize(("base", "bits"), [("int8", 8 + 32 / 64), ("nf4", 4 + 8 / 64 + 32 / 128)])
def test_a_number_of_a_quantized_matrix_costs_its_bits(base, bits):
    """On one device, for D = 128; tables and norms are bfloat16. Nothing is compiled."""
    layout = Layout((), "cpu", ())
    asked = adapted("1x1x1", "bfloat16", 0, base, embed=128)
    model = models.build(asked.model, layout)
    parameters = sharded_by(asked, model, layout).parameters
    held = sum(memory.state(asked, p) for p in parameters if not p.trained)
    matrices = sum(matmul.elements for matmul in matmuls_of(asked.model).values()) * asked.model.layers
    others = models.parameters(model) - matrices - all_trained_beside(asked.model)
    assert held == matrices * bits / 8 + 2 * others


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_grow_with_the_adapters_alone(zero):
    """Nothing is compiled."""
    layout = Layout((("data", 4),), "cpu", (("batch", ("data",)),))
    held = {}
    for rank in (4, 8):
        asked = adapted("4x1x1", "float32", zero, "float32", lora_rank=rank)
        held[rank] = memory.predict(sharded_by(asked, models.build(asked.model, layout), layout)).gradients
    assert held[8] == 2 * held[4] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "zero", "remat", "base"),
    [
        ("1x1x1", 0, "block", "float32"),
        *exhaustive([("8x1x1", 1, "none", "float32"), ("2x4x1", 3, "block", "float32"), ("4x1x1", 3, "none", "int8")]),
    ],
)
def test_temporary_bytes_are_about_as_predicted(mesh, zero, remat, base):
    """An estimate: within 0.6 and 1.4 of what XLA plans on CPU."""
    sizes = dict(layers=8, embed=128, heads=8, vocab=1024, sequence=128, remat=remat, lora_rank=8, lora_base=base)
    found, held = planned(config(mesh, "float32", zero, model=ModelConfig(**sizes), global_batch_size=32))
    assert 0.6 < (held.total - held.arguments) / found.temp_size_in_bytes < 1.4


@pytest.mark.slow
def test_no_more_than_one_quantized_layer_is_ever_whole():
    """Beside what a step with a float32 base makes and drops, on CPU, of 8 layers whose products are all kept."""
    sizes = dict(layers=8, embed=256, heads=8, vocab=96, sequence=16, lora_rank=2)
    temporary = {}
    for base in ("float32", "nf4"):
        model = ModelConfig(**sizes, lora_base=base)
        found, held = planned(config("1x1x1", "float32", 0, model=model, accumulation=1))
        assert found.argument_size_in_bytes == held.arguments
        temporary[base] = found.temp_size_in_bytes
    layer = 4 * sum(matmul.elements for matmul in matmuls_of(model).values())
    assert temporary["nf4"] - temporary["float32"] < 1.2 * layer


def test_dropout_of_adapters_needs_the_numbers_of_the_rows():
    plain = predicted(adapted("1x1x1", "float32", 0, "float32"))
    dropping = predicted(adapted("1x1x1", "float32", 0, "float32", lora_dropout=0.1))
    assert dropping.batch - plain.batch == 4 * 16
