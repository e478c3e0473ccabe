"""Runs that hold the weights of a golden folder as a checkpoint, and what is read of folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from jaxdist.config import Config, ModelConfig
from jaxdist.huggingface.families import sizes_of
from jaxdist.huggingface.folder import open_folder
from jaxdist.huggingface.model_config import longest_sequence, model_values
from jaxdist.huggingface.parts import shape_of
from jaxdist.huggingface.reading import read_parameters
from jaxdist.huggingface.schema import SMALL_FILES
from jaxdist.huggingface.type_choice import family_of
from jaxdist.request import to_toml
from jaxdist.training.checkpoint.manager import Checkpoints
from jaxdist.training.checkpoint.stored_arrays import StoredArray
from jaxdist.training.forward.step import TrainState

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


def model_of(folder: Path) -> ModelConfig:
    return ModelConfig(**model_values(open_folder(folder)))


def abstract(model: ModelConfig) -> dict[str, Any]:
    """The parameters of a model on one device."""
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree: dict[str, Any] = {}
    for leaf in family_of(model).leaves:
        *parents, last = leaf.path.split(".")
        inner = tree
        for key in parents:
            inner = inner.setdefault(key, {})
        inner[last] = jax.ShapeDtypeStruct(shape_of(leaf, sizes_of(model)), jnp.float32, sharding=there)
    return tree


def save(run: Path, params: dict[str, Any], step: int = 1, **facts: Any) -> None:
    count = jnp.int32(step)
    with Checkpoints(run, keep=1) as checkpoints:
        checkpoints.save(step, TrainState(count, params, (), count, count, variables={}), {"step": step, **facts})


def stored(run: Path) -> dict[str, StoredArray]:
    with Checkpoints(run, keep=None) as checkpoints:
        return dict(checkpoints.arrays(checkpoints.find(), "params"))


def run_from(golden: Path, run: Path, **changed: Any) -> ModelConfig:
    """A run that began with the folder and has not changed its weights; `changed` are further knobs."""
    model = model_of(golden)
    save(run, read_parameters(golden, model, abstract(model)))
    config = Config(model=model, run_dir=run, **{"precision": "bfloat16"} | changed)
    (run / "config.toml").write_text(to_toml(config))
    kept = run / "huggingface"
    kept.mkdir()
    for name in SMALL_FILES:
        if (golden / name).exists():
            shutil.copy(golden / name, kept / name)
    source = {"dtype": "bfloat16", "maximum": longest_sequence(open_folder(golden), model_values(open_folder(golden)))}
    (kept / "source.json").write_text(json.dumps(source))
    return model


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, as the library of the format reads them."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found
