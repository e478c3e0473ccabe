"""The folders of `golden/`, made by `scripts/golden_huggingface.py`, and our logits of their weights on a mesh."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
from jax.sharding import reshard

from jaxdist.config import Config
from jaxdist.huggingface.reading import read_parameters
from jaxdist.request import load
from jaxdist.training.run import Run

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.name for path in GOLDEN.iterdir())
MXFP4 = "gpt_oss in MXFP4"
"""A folder beside them, whose tensors hold some of our parameters in another form."""
ROUTED = ("deepseek_v2", "deepseek_v3", "gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Those with experts."""

DENSE = [name for name in NAMES if name not in ROUTED]

MESHES = {"1x1x1": {}, "2x2x1": {"parallel.zero": "3"}, "1x8x1": {}, "1x1x2": {}}
"""Mesh -> what is asked for beside it. Two key/value heads are dealt to the eight devices of 1x8x1."""

ROUTED_MESHES = {
    "1x1x1": {},
    "data=2,expert=4": {"parallel.zero": "3"},
    "expert=2,model=2": {},
    "expert=2,pipeline=2": {},
}
"""The same for models with experts."""


def folder_of(name: str) -> Path:
    return GOLDEN.parent / "golden_mxfp4" if name == MXFP4 else GOLDEN / name


def expected(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [B, S], and the logits [B, S, V] that transformers computes."""
    with np.load(folder_of(name) / "expected.npz") as arrays:
        return arrays["tokens"], arrays["logits"]


def config_of(name: str, mesh: str = "1x1x1", **model: object) -> Config:
    """The configuration of a run that begins with a folder; `model` replaces what the folder says."""
    tokens, _ = expected(name)
    asked = {"init_from": folder_of(name), "data.tokenizer": GOLDEN / "llama31", "model.sequence": tokens.shape[1]}
    config = load(
        None, {"mesh": mesh, **{knob: str(value) for knob, value in asked.items()}, **(MESHES | ROUTED_MESHES)[mesh]}
    )
    return config.model_copy(update={"model": config.model.model_copy(update=model)})


def imported(config: Config) -> tuple[Run, dict]:
    """The run, and its parameters as the folder has them."""
    run = Run(config, batch=False)
    with jax.set_mesh(run.mesh):
        params = read_parameters(config.init_from, config.model, run.engine.abstract_logical().params)
        return run, run.step.folded(params)


def logits(config: Config, tokens: np.ndarray) -> np.ndarray:
    """Our logits [B, S, V] in float32."""
    run, params = imported(config)
    with jax.set_mesh(run.mesh):

        @jax.jit
        def compute(params, tokens):
            tokens = reshard(tokens, run.layout.activation("BS"))
            return run.forward.logits(run.forward.weights(params), tokens)

        return np.asarray(compute(params, tokens))[..., : config.model.vocab]
