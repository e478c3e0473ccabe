"""float16 is refused with what its scaled loss does not go with, and is what a plan takes for GPUs without bfloat16."""

import pytest

from jaxdist.config import Config, ModelConfig, RequestError
from jaxdist.planning.clusters import cluster
from jaxdist.planning.hardware import GPUS
from jaxdist.planning.search.plan import search
from jaxdist.planning.search.text import changes
from jaxdist.request import load
from jaxdist.training.run import Run

REPLICAS = {"mesh": "replica=2", "parallel.replica_zero": "true"}

REFUSED = {
    "train.local_steps 10": REPLICAS | {"train.local_steps": "10"},
    "parallel.delayed_gradients": REPLICAS | {"parallel.delayed_gradients": "true"},
    "pipeline.schedule pipedream": {"mesh": "1x1x2", "pipeline.schedule": "pipedream", "optimizer.clip": "0"},
    "model.balance_loss is 0.01": {"model.family": "moe", "model.balance_loss": "0.01"},
    "model.z_loss is 0.001": {"model.family": "moe", "model.z_loss": "0.001"},
    "model.lora_base nf4": {"model.lora_rank": "4", "model.lora_base": "nf4"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_a_scaled_loss_does_not_go_with_is_refused(words):
    with pytest.raises(RequestError) as caught:
        load(None, REFUSED[words] | {"precision": "float16"})
    (problem,) = (one for one in caught.value.problems if "precision is float16" in one)
    assert words in problem
    assert "; set " in problem
    assert problem.endswith("or precision to float32")


def test_a_plan_for_gpus_without_bfloat16_takes_float16_as_a_run_does():
    where = cluster("v100-nvlink")
    base = Config(model=ModelConfig(layers=2, embed=64, heads=4))
    best = search(base, 1, where).ranked[0]
    assert best.config.precision == "float16"
    assert "precision" not in changes(best, base)
    with pytest.raises(RequestError, match="precision is mixed, but these GPUs have no bfloat16; set precision to flo"):
        search(base.model_copy(update={"precision": "mixed"}), 1, where)
    assert "precision" not in changes(search(base, 1, cluster("a100-hdr")).ranked[0], base)


def on(gpu: str, **knobs) -> Run:
    return Run(Config(mesh="1x1x1").with_knobs(knobs), dry=True, gpu=GPUS[gpu])


def test_a_run_on_gpus_without_bfloat16_takes_float16_where_the_precision_is_left_open():
    assert [on(gpu).config.precision for gpu in ("t4", "a100")] == ["float16", "bfloat16"]
    assert on("t4", precision="float32").config.precision == "float32"
    with pytest.raises(RequestError, match="precision is bfloat16, but these GPUs have no bfloat16; set precision to"):
        on("t4", precision="bfloat16")
    with pytest.raises(RequestError, match=r"precision is float16, but with parallel\.delayed_gradients"):
        on("t4", **{"parallel.delayed_gradients": True})
