"""Write the low-rank adapters of a run as a folder that PEFT loads onto the base. No jax here.

PEFT has for each module a `lora_A` [r, in] and a `lora_B` [out, r]. GPT-2 makes queries, keys and values in one module:
its n pairs become one of rank n r, whose B is zero but for a block for each, and whose alpha is n times as large.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxdist.config import ModelConfig, RequestError
from jaxdist.config.lora_targets import MLP
from jaxdist.files import write_whole
from jaxdist.huggingface.adapter_pairs import PairPlace, pairs_of
from jaxdist.huggingface.families import Leaf, Piece, sizes_of
from jaxdist.huggingface.folder import ADAPTER_WEIGHTS, open_config
from jaxdist.huggingface.merging import check_adapters
from jaxdist.huggingface.parts import shape_of
from jaxdist.huggingface.readable import Readable, Region, read
from jaxdist.huggingface.safetensors_file import SPELLED, Tensor, check_room, write_file
from jaxdist.huggingface.schema import ADAPTER_CONFIG
from jaxdist.huggingface.type_choice import family_of
from jaxdist.huggingface.writing import METADATA, rounded

PREFIX = "base_model.model."
"""How PEFT's names of tensors begin, before the name of the module in the base."""


def write_adapter(
    folder: Path, model: ModelConfig, adapters: Mapping[str, Readable], dtype: str, base: Path | None
) -> dict[str, int]:
    """Write the adapters of `model`, which are arrays by name, into an empty folder, and return what was written.

    `dtype` is a name of `SPELLED`: numbers are rounded once. `base` is the folder of Hugging Face that they stand
    beside, if it is one. Raises `RequestError` where the arrays are not those of the model, or PEFT would not load them
    beside that folder.
    """
    if base is not None and family_of(model, open_config(base).config.get("model_type")).fused:
        raise RequestError(
            f"'{base}' has q_proj, k_proj and v_proj in one tensor, and PEFT would want one pair beside it; leave out "
            f"--adapter, which merges the adapters into the weights"
        )
    check_adapters(model, adapters)
    modules = modules_of(model)
    dense = [pair.target for module in modules for pair in module.pairs if pair.target in MLP]
    if base is not None and dense and model.traits.routed:
        raise RequestError(
            f"the run has adapters beside {', '.join(dict.fromkeys(dense))} of layers without experts, and PEFT, with "
            f"transformers 5, takes these names for those of experts; leave out --adapter, which merges the adapters "
            f"into the weights, or train with model.lora_targets of attention alone"
        )
    halves = {half.name: half for module in modules for half in module.halves(model)}
    tensors = [Tensor(name, SPELLED[dtype], half.shape) for name, half in halves.items()]

    def content(tensor: Tensor) -> memoryview:
        made = halves[tensor.name].made(adapters)
        return rounded(tensor.name, made, np.dtype(dtype)).reshape(-1).view(np.uint8).data

    check_room(folder, tensors)
    write_file(folder / ADAPTER_WEIGHTS, tensors, content, METADATA)
    write_whole(folder / ADAPTER_CONFIG, json.dumps(adapter_config(model, base), indent=2) + "\n")
    return {"tensors": len(tensors), "files": 1, "bytes": sum(tensor.size for tensor in tensors)}


def adapter_config(model: ModelConfig, base: Path | None) -> dict[str, Any]:
    """Return the content of `adapter_config.json`."""
    modules = modules_of(model)
    several = {_short(model, module.piece): len(module.pairs) for module in modules if len(module.pairs) > 1}
    alpha = model.lora_alpha or 2.0 * model.lora_rank
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base) if base else None,
        "r": model.lora_rank,
        "lora_alpha": _number(alpha),
        "lora_dropout": model.lora_dropout,
        "target_modules": list(dict.fromkeys(_short(model, module.piece) for module in modules)),
        "rank_pattern": {name: count * model.lora_rank for name, count in several.items()},
        "alpha_pattern": {name: _number(count * alpha) for name, count in several.items()},
        "fan_in_fan_out": any(module.inputs_first for module in modules),
        "bias": "none",
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _number(value: float) -> int | float:
    """Return a whole number as JSON has it: older versions of PEFT declare alpha as one."""
    return int(value) if value == int(value) else value


def _short(model: ModelConfig, piece: Piece) -> str:
    """Return the end of a module's name by which PEFT finds it in every layer, and no other."""
    names = [other.name.removesuffix(".weight").split(".") for leaf in family_of(model).leaves for other in leaf.pieces]
    *_, parent, last = piece.name.removesuffix(".weight").split(".")
    alike = {tuple(name[-2:]) for name in names if name[-1] == last}
    return last if len(alike) == 1 else f"{parent}.{last}"


@dataclass(frozen=True)
class Module:
    """A module of the base with the pairs beside it: one, or one for each weight that it has fused."""

    leaf: Leaf
    piece: Piece
    pairs: tuple[PairPlace, ...]

    @property
    def fused(self) -> bool:
        """Whether the module has weights of several targets."""
        return len(self.pairs[0].matmul.parts) > len(self.leaf.pieces)

    @property
    def inputs_first(self) -> bool:
        """Whether their weight is [in, out], as those of GPT-2 are (Conv1D), and not [out, in]."""
        return self.piece.dims[0] == self.pairs[0].matmul.inputs

    def name(self, layer: int) -> str:
        """Return how the names of PEFT's two tensors of a layer begin."""
        return PREFIX + self.piece.name_at((layer,)).removesuffix(".weight")

    def layers(self, model: ModelConfig) -> range:
        """Return the layers of its stack, from 0."""
        return range(self.leaf.sizes(sizes_of(model))["L"])

    def halves(self, model: ModelConfig) -> Iterator[Half]:
        """Yield PEFT's two tensors of each layer."""
        for layer in self.layers(model):
            name = self.name(layer)
            yield Half(f"{name}.lora_A.weight", self, model, layer, first=True)
            yield Half(f"{name}.lora_B.weight", self, model, layer, first=False)


@dataclass(frozen=True)
class Half:
    """One tensor of PEFT: A or B of a module in a layer."""

    name: str
    module: Module
    model: ModelConfig
    layer: int
    first: bool
    """Whether it is A."""

    @property
    def shape(self) -> tuple[int, int]:
        """The shape [r, in] of A, or [out, r] of B."""
        pairs = self.module.pairs
        rank = len(pairs) * self.model.lora_rank
        shapes = pairs[0].shapes(self.model)
        if self.first:
            return rank, math.prod(shapes[pairs[0].a][1:-1])
        if self.module.fused:
            return math.prod(shape_of(self.module.leaf, sizes_of(self.model))[1 + pairs[0].inputs :]), rank
        return math.prod(shapes[pairs[0].b][2:]), rank

    def made(self, adapters: Mapping[str, Readable]) -> Float[np.ndarray, "..."]:
        """Return the tensor in f32."""
        numbers = np.zeros(self.shape, np.float32)
        rank = self.model.lora_rank
        for number, pair in enumerate(self.module.pairs):
            own = slice(number * rank, (number + 1) * rank)
            if self.first:
                numbers[own] = self._layer(adapters[pair.a]).reshape(-1, rank).T
                continue
            block = self._layer(adapters[pair.b]).reshape(rank, -1).T
            # Targets that are fused have as many outputs each.
            start = pair.joined[0] * len(block) if self.module.fused else 0
            numbers[start : start + len(block), own] = block
        return numbers

    def _layer(self, array: Readable) -> Float[np.ndarray, "..."]:
        """Return what an array [L, ...] has of the layer."""
        region: Region = (slice(self.layer, self.layer + 1), *[slice(None)] * (len(array.shape) - 1))
        return read(array, region)[0]


def modules_of(model: ModelConfig) -> list[Module]:
    """Return the modules with adapters."""
    modules: dict[tuple[str, int], Module] = {}
    for pair in pairs_of(model):
        piece = pair.leaf.pieces[0]
        if len(pair.leaf.pieces) > 1:
            names = [part.name for part in pair.matmul.parts]
            piece = pair.leaf.pieces[names.index(pair.target)]
        # The stacks of a model have modules of the same names in layers of different numbers.
        key = piece.name, piece.first
        before = modules[key].pairs if key in modules else ()
        modules[key] = Module(pair.leaf, piece, (*before, pair))
    return list(modules.values())
