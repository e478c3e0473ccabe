"""The weights of a checkpoint for other programs, as a safetensors file or a folder of Hugging Face."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdist import __version__
from jaxdist.config import Config, ModelConfig
from jaxdist.config.stacks import first_layers, path_to
from jaxdist.config.trained import merged
from jaxdist.files import write_whole
from jaxdist.huggingface.given_tokenizer import GivenTokenizer, read_tokenizer
from jaxdist.huggingface.peft_adapter import write_adapter
from jaxdist.huggingface.readable import Readable, read
from jaxdist.huggingface.safetensors_file import Tensor, check_room, write_file
from jaxdist.huggingface.schema import CONFIG, checked
from jaxdist.huggingface.small_files import kept_dtype, read_kept, small_files, tokenizer_files
from jaxdist.huggingface.writing import write_weights
from jaxdist.parallel.pipeline.stages import BLOCKS
from jaxdist.request import to_toml
from jaxdist.training.checkpoint.manager import Checkpoints, Found
from jaxdist.training.checkpoint.stored_arrays import whole
from jaxdist.training.export_marks import FORMAT
from jaxdist.training.run_dir import RunFolder
from jaxdist.weights.base import base_for, recorded_base
from jaxdist.weights.named import model_folder


@contextmanager
def step_of(config: Config, which: str) -> Iterator[tuple[Checkpoints, Found]]:
    """Open the checkpoints of the run in `config.run_dir`, and yield them with its step `which`, found complete."""
    # Nothing is computed here. The setting has no effect once a device was used.
    jax.config.update("jax_platforms", "cpu")
    with Checkpoints(config.folder, keep=None) as checkpoints:
        found = checkpoints.find(which)
        for note in checkpoints.notes:
            print(f"note: {note}", file=sys.stderr)
        yield checkpoints, found


def write_safetensors(config: Config, which: str, path: Path) -> dict[str, Any]:
    """Write the f32 parameters of step `which` of the run in `config.run_dir`, and return what was written, as numbers.

    Batch statistics, where the model has them, are written too, under `variables.`. Names are taken from our parameter
    tree, with a layer's number after `blocks`: `blocks.3.mlp.up` [D, F]. The metadata hold the run's configuration, so
    that one file is enough to build the model again. Only one tensor at a time is in memory.
    """
    with step_of(config, which) as (checkpoints, found):
        metadata = {
            "format": FORMAT,
            "version": __version__,
            "step": str(found.step),
            "config": to_toml(config.model_copy(update={"model": merged(config.model)})),
        }
        with weights(config, checkpoints, found) as params:
            parts = dict(_by_layer(params, config.model))
            for name, array in checkpoints.arrays(found, "variables").items():
                parts[f"variables.{name}"] = Part(array)
            tensors = [Tensor(name, "F32", parts[name].shape) for name in sorted(parts)]
            check_room(path.parent, tensors)
            write_file(path, tensors, lambda tensor: parts[tensor.name].data(), metadata)
    total = sum(tensor.size for tensor in tensors)
    return {"step": found.step, "tensors": len(tensors), "bytes": total}


def write_folder(config: Config, which: str, path: Path, dtype: str) -> dict[str, Any]:
    """Write step `which` of the run in `config.run_dir` as a folder of Hugging Face, and return what was written.

    `path` is that of a new folder. `dtype` is a `WeightDtype`; empty: that of the folder that the run began with, or
    else of its precision. From precision mixed, the masters are rounded once. Raises `RequestError` where that is not
    possible.
    """
    folder = RunFolder(config.folder)
    run = folder.path
    dtype = dtype or kept_dtype(run) or config.numbers.compute
    files = small_files(read_kept(run), config.model, dtype, _own_tokenizer(folder))
    path.mkdir()
    with step_of(config, which) as (checkpoints, found), weights(config, checkpoints, found) as params:
        model_type = checked(files[CONFIG], path / CONFIG)["model_type"]
        written = write_weights(path, config.model, params, dtype, model_type)
        for name, content in files.items():
            write_whole(path / name, content)
    return {"step": found.step, "dtype": dtype, **written}


def write_adapter_folder(config: Config, which: str, path: Path, dtype: str) -> dict[str, Any]:
    """Write the adapters of step `which` of a LoRA run as a folder that PEFT loads, and return what was written.

    `path` is that of a new folder. `dtype` is a `WeightDtype`; empty: float32. The base is not read. The tokenizer's
    files go with the adapters: their chat template need not be that of the base.
    """
    dtype = dtype or "float32"
    folder = RunFolder(config.folder)
    files = tokenizer_files(read_kept(folder.path), config.model, _own_tokenizer(folder))
    path.mkdir()
    with step_of(config, which) as (checkpoints, found):
        # PEFT loads the base itself, and knows no other form.
        base = model_folder(recorded_base(config, checkpoints.facts(found)).path)
        written = write_adapter(path, config.model, checkpoints.arrays(found, "params"), dtype, base)
        for name, content in files.items():
            write_whole(path / name, content)
    return {"step": found.step, "dtype": dtype, **written}


def _own_tokenizer(folder: RunFolder) -> GivenTokenizer | None:
    """Return the tokenizer of a run; None where its data came as tokens."""
    return read_tokenizer(folder.tokenizer_source) if folder.tokenizer.is_file() else None


@contextmanager
def weights(config: Config, checkpoints: Checkpoints, found: Found) -> Iterator[Mapping[str, Readable]]:
    """Yield the parameters of a step by name, unread; those of a LoRA run are its base with the adapters merged in."""
    base = base_for(config, found.store.step_dir.facts(found.step))
    with base.merged(config.model, checkpoints.arrays(found, "params")) as arrays:
        yield arrays


@dataclass(frozen=True)
class Part:
    """A stored array, or one layer of it."""

    array: Readable
    layer: int | None = None
    """The place in the first dim, which is dropped; None for the whole array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return self.array.shape if self.layer is None else self.array.shape[1:]

    def data(self) -> memoryview:
        """Return its numbers in f32, as bytes in row-major order."""
        region = whole(len(self.array.shape))
        if self.layer is not None:
            region = (slice(self.layer, self.layer + 1), *region[1:])
        return read(self.array, region).astype(np.float32, copy=False).reshape(-1).view(np.uint8).data


def _by_layer(arrays: Mapping[str, Readable], model: ModelConfig) -> Iterator[tuple[str, Part]]:
    """Yield (name, part) of every array; of a decoder, one for each layer of a stack, whose arrays are [L, ...]."""
    firsts = {} if model.images else {path_to(stack): first for stack, first in first_layers(model).items()}
    for name, array in arrays.items():
        stack = next((path for path in firsts if name.startswith(path)), "")
        # Other programs expect a layer by itself, not [L, ...].
        if stack:
            for place in range(array.shape[0]):
                yield f"{BLOCKS}.{firsts[stack] + place}.{name.removeprefix(stack)}", Part(array, place)
        else:
            yield name, Part(array)
