"""What the tests of generation compare with: random weights on any mesh, and a whole pass on one device."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist import models
from jaxdist.config import Config
from jaxdist.mesh import devices_asked, parse_mesh
from jaxdist.parallel.partial_trees import joined
from jaxdist.planning.hardware import GPUS
from jaxdist.training.decoding import Choice, Decoding
from jaxdist.training.run import Run
from tests.kinds import written_out

SEQUENCE, VOCAB = 24, 97
GREEDY = Choice(temperature=0.0, top_k=0)
PROMPTS = [[5, 40, 7], [1, 2, 3, 90, 11, 33, 60, 2, 9], [8], list(range(4, 21))]
"""Of unequal length: the short ones share a row of the prefill (packed)."""

FAMILIES = {
    "gpt": {"family": "gpt", "layers": 5},
    "llama": {"family": "llama", "kv_heads": 2},
    "window": {"family": "llama", "kv_heads": 4, "window": 5},
    "kinds": {"family": "llama", "kv_heads": 4, "window": 5, "layers": 7},
    "parts": {
        **{"family": "llama", "kv_heads": 4, "window": 5, "layers": 6, "period": "sliding,full-nope", "norms": "after"},
        **{"sliding_theta": 100.0, "head_dim": 4, "rotary_fraction": 0.5, "activation": "xielu", "gate": "off"},
        **{"qkv_bias": True, "out_bias": True, "mlp_bias": True, "logits_divisor": 2.0, "attention_multiplier": 0.4},
    },
    "branches": {"family": "llama", "norm": "layer", "residual": "parallel", "activation": "gelu-erf", "gate": "off"},
    "gemma": {
        **{"family": "gemma", "kv_heads": 4, "window": 5, "layers": 6, "period": "sliding,full", "norms": "both"},
        **{"sliding_theta": 100.0, "attention_cap": 2.0, "logit_cap": 5.0, "attention_multiplier": 0.4},
    },
    "lora": {"family": "llama", "kv_heads": 2, "lora_rank": 2, "lora_dropout": 0.5},
    "moe": {"family": "moe", "kv_heads": 2, "experts": 4, "mlp": 16},
    "latent": {
        **{"family": "moe", "layers": 3, "dense_layers": 1, "experts": 4, "expert_mlp": 16, "shared_experts": 1},
        **{"head_dim": 6, "kv_latent": 12, "q_latent": 10, "rope_dim": 4, "value_dim": 8, "rope_pairs": "neighbours"},
        **{"rope_scaling": "yarn,factor=4,original=8,mscale=1,mscale_all=0.7", "router": "sigmoid", "lora_rank": 2},
    },
    "gpt-oss": {
        **{"family": "moe", "kv_heads": 4, "experts": 4, "mlp": 16, "window": 5, "layers": 5, "period": "sliding,full"},
        **{"sinks": True, "mlp_bias": True, "qkv_bias": True, "out_bias": True, "activation": "clamped-swiglu"},
    },
    "forms": {"family": "moe", "kv_heads": 2, "experts": 4, "expert_mlp": 16, "layers": 4, "window": 7},
}


def config_of(family: str, mesh: str = "1x1x1", **more: object) -> Config:
    """Layers that no two stages hold evenly."""
    sizes = {"layers": 3, "embed": 16, "heads": 8, "vocab": VOCAB, "sequence": SEQUENCE, "tied": False, "mlp": 32}
    return Config(mesh=mesh, model=sizes | FAMILIES[family], **more)


SEEDS = {"moe": 1}
"""Where the weights of 0 would repeat a few tokens."""


@cache
def weights(family: str) -> dict:
    """Weights, as a checkpoint holds them, so large that the next token depends on all before it."""
    rng = np.random.default_rng(SEEDS.get(family, 0))

    def drawn(path: tuple, a: jax.ShapeDtypeStruct) -> np.ndarray:
        name = jax.tree_util.keystr(path)
        scale = 0.03 if "bias" in name else 1.0 if "table" in name else 0.4
        return rng.normal(0.0, scale, a.shape).astype(np.float32)

    return jax.tree.map_with_path(drawn, models.build_decoder(config_of(family).model).abstract)


def decoding_of(family: str, mesh: str = "1x1x1", **more: object) -> Decoding:
    config = config_of(family, mesh, **more)
    run = Run(config, devices=jax.devices()[: devices_asked(parse_mesh(mesh))], batch=False)
    with jax.set_mesh(run.mesh):
        abstract = run.engine.abstract_logical().params
        if run.config.model.lora_rank:
            abstract = joined(run.engine.abstract_frozen(), abstract)
        shardings = jax.tree.map(lambda a: a.sharding, abstract)
        params = run.step.folded(jax.device_put(weights(family), shardings))
    return Decoding(run, params)


@cache
def whole_pass(family: str):
    """`logits(texts)` of every position by one device, without a cache; texts are [B, SEQUENCE]."""
    run = Run(config_of(family), devices=jax.devices()[:1], batch=False)
    model = run.model

    @jax.jit
    def logits(params, texts):
        return model.logits(params, written_out(model, params, model.embed(params, texts)))

    def on_one_device(texts):
        with jax.set_mesh(run.mesh):
            return np.asarray(logits(weights(family), jnp.asarray(texts)))

    return on_one_device


def continued(decoding: Decoding, prompts: list[list[int]]) -> tuple[list[list[int]], list[np.ndarray]]:
    """(the prompts, continued greedily until all are full; the logits that each next token was chosen by)."""
    key = jax.random.key(0)
    texts = [list(prompt) for prompt in prompts]
    logits: list[list[np.ndarray]] = [[] for _ in prompts]
    drawn = decoding.start(prompts, GREEDY, key)
    for number in range(1, SEQUENCE):
        found, tokens = np.asarray(drawn.logits)[:, :VOCAB], np.asarray(drawn.tokens)
        for row, text in enumerate(texts):
            if len(text) < SEQUENCE:
                logits[row].append(found[row])
                text.append(int(tokens[row]))
        if all(len(text) == SEQUENCE for text in texts):
            break
        drawn = decoding.step(drawn, GREEDY, key, number)
    return texts, [np.stack(rows) for rows in logits]


def lowered_step(devices: list[jax.Device]) -> jax.stages.Lowered:
    """The step of 8 rows and 1,024 slots by a Llama on absent H100s, whose weights and cache take most of its time."""
    sizes = {"family": "llama", "layers": 3, "embed": 1024, "heads": 8, "kv_heads": 2, "mlp": 4096, "vocab": 512}
    config = Config(mesh=f"{len(devices)}x1x1", model=sizes | {"sequence": 1024, "tied": False}, precision="bfloat16")
    decoding = Decoding(Run(config, devices=devices, gpu=GPUS["h100"], batch=False))
    rows, one = (jax.ShapeDtypeStruct(shape, np.int32) for shape in ((8,), ()))
    prompts = jax.ShapeDtypeStruct((8, 16), np.int32)
    with jax.set_mesh(decoding.run.mesh):
        key = jax.eval_shape(lambda: jax.random.key(0))
        weights = jax.eval_shape(decoding.forward.ready, decoding.run.engine.abstract_logical().params)
        given = (weights, key, prompts, None, rows, rows, None)
        cache = jax.eval_shape(lambda *given: decoding.prefill(GREEDY, 1024, *given), *given)[0]
        return decoding.extend.lower(GREEDY, 1024, weights, cache, rows, rows, key, one, None)
