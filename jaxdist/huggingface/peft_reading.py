"""Read the low-rank adapters in a folder of PEFT: the knobs of a run that trains them further, and its arrays. No jax.

A run has one rank and one scale. Pairs of a lower rank get zeros beside them, which have no gradient and stay zero; a
pair with another scale has it in its B; a layer without a pair has one of zeros.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxdist.config import ModelConfig, RequestError, lora
from jaxdist.huggingface.folder import ADAPTER_WEIGHTS
from jaxdist.huggingface.peft_adapter import PREFIX, Module, modules_of
from jaxdist.huggingface.safetensors_file import DTYPES, Entry, read_header
from jaxdist.huggingface.schema import ADAPTER_CONFIG, read_file
from jaxdist.huggingface.tensor_checks import LISTED, Tensors
from jaxdist.huggingface.weight_files import WeightFiles

UNDERSTOOD = (
    ("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "eva_config")
    + ("exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern")
    + ("layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core")
    + ("peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config")
    + ("target_modules", "task_type", "use_rslora")
)
"""Keys of `adapter_config.json` that change nothing but what is read here; others change the function where they are
set. Which modules have pairs is seen by the tensors."""

INITIAL = (True, False, None, "gaussian", "eva", "orthogonal", "lora_ga")
"""Ways to begin, `init_lora_weights`, that leave the base as it is; pissa, olora and others change it."""


SHOWN = 40
"""Characters of a value that a refusal shows at most."""


@dataclass(frozen=True)
class PeftAdapter:
    """A folder of PEFT."""

    path: Path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The content of `adapter_config.json`. Raises `RequestError` for an adapter that is not plain LoRA."""
        found = read_file(self.path / ADAPTER_CONFIG)
        wrong = [key for key, value in found.items() if value and key not in UNDERSTOOD]
        if found["peft_type"] != "LORA":
            wrong.append("peft_type")
        if found.get("bias", "none") != "none":
            wrong.append("bias")
        if found.get("init_lora_weights", True) not in INITIAL:
            wrong.append("init_lora_weights")
        if not all(map(_is_pattern, found.get("alpha_pattern") or {})):
            wrong.append("alpha_pattern")
        if wrong:
            asked = ", ".join(f"{key[:SHOWN]} {json.dumps(found[key])[:SHOWN]}" for key in wrong[:LISTED])
            raise RequestError(
                f"'{self.path / ADAPTER_CONFIG}' has {asked}, which is not read; merge the adapters into their base "
                f"with PEFT's merge_and_unload, and begin with that folder"
            )
        return found

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        """The tensors by their names."""
        return read_header(self.path / ADAPTER_WEIGHTS)

    def knobs(self, model: ModelConfig) -> dict[str, Any]:
        """Return the knobs of `model`, which has no adapters, with which a run trains these. No weight is read.

        Raises `RequestError` for tensors that are none of the pairs that it can have.
        """
        self._check(model)
        every = model.model_copy(update={"lora_rank": 1, "lora_targets": ""})
        targets = [pair.target for module, _, _ in self._there(every) for pair in module.pairs]
        rank = max(entry.shape[0] for name, entry in self.entries.items() if name.endswith("lora_A.weight"))
        targets = [target for target in lora.targets_of(model) if target in targets]
        whole = len(targets) == len(lora.targets_of(model))
        return {
            "lora_rank": rank,
            "lora_alpha": rank * self._scale("", self.config["r"]),
            "lora_targets": "" if whole else ",".join(targets),
        }

    def arrays(self, model: ModelConfig) -> dict[str, Float[np.ndarray, "..."]]:
        """Return the arrays of a run of `model`, which has the `knobs`, by their paths, in f32."""
        self._check(model)
        found: dict[str, np.ndarray] = {}
        for module in modules_of(model):
            for pair in module.pairs:
                found |= {path: np.zeros(shape, np.float32) for path, shape in pair.shapes(model).items()}
        tensors = Tensors(self.path, dict.fromkeys(self.entries, self.path / ADAPTER_WEIGHTS), self.entries, {})
        with WeightFiles(tensors) as files:
            for module, layer, name in self._there(model):
                a, b = (self._read(files, f"{name}.lora_{half}.weight") for half in "AB")
                b = b * np.float32(self._scale(name.removeprefix(PREFIX), len(a)) / lora.scale(model))
                for pair in module.pairs:
                    own_a, own_b = found[pair.a][layer], found[pair.b][layer]
                    rows = math.prod(own_b.shape[1:])
                    first = pair.joined[0] * rows if module.fused else 0
                    own_a[..., : len(a)] = a.T.reshape(*own_a.shape[:-1], len(a))
                    own_b[: len(a)] = b[first : first + rows].T.reshape(len(a), *own_b.shape[1:])
        return found

    def _scale(self, module: str, rank: int) -> float:
        """Return alpha / r of a module by its name, or alpha / sqrt(r) with rsLoRA (Kalajdzievski 2023)."""
        alpha = self.config["lora_alpha"]
        for pattern, value in (self.config.get("alpha_pattern") or {}).items():
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                alpha = value
                break
        return alpha / (rank**0.5 if self.config.get("use_rslora") else rank)

    def _there(self, model: ModelConfig) -> Iterator[tuple[Module, int, str]]:
        """Yield (module, layer, name in PEFT's tensors) of each pair that the folder has among those of `model`."""
        for module in modules_of(model):
            for layer in module.layers(model):
                name = module.name(layer)
                if f"{name}.lora_A.weight" in self.entries:
                    yield module, layer, name

    def _check(self, model: ModelConfig) -> None:
        """Raise `RequestError` for tensors that are no pairs of the model, of another shape, or in another dtype."""
        every = model.model_copy(update={"lora_rank": 1, "lora_targets": ""})
        known = set()
        wrong = []
        for module, _, name in self._there(every):
            ends = [half.shape for half in module.halves(every)][:2]
            a, b = (self.entries.get(f"{name}.lora_{half}.weight") for half in "AB")
            known |= {f"{name}.lora_A.weight", f"{name}.lora_B.weight"}
            fits = a and b and a.shape[1:] == ends[0][1:] and b.shape == (ends[1][0], a.shape[0])
            if not (a and b and fits and {a.dtype, b.dtype} <= DTYPES.keys()):
                wrong.append(f"{name} of another shape or dtype")
        wrong += [name for name in self.entries if name not in known]
        if wrong or not known:
            several = f" and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
            what = ", ".join(wrong[:LISTED]) or "no pair"
            raise RequestError(
                f"'{self.path}' holds {what}{several}, which are not adapters of the weights of its base; merge them "
                f"into it with PEFT's merge_and_unload, and begin with that folder"
            )

    def _read(self, files: WeightFiles, name: str) -> Float[np.ndarray, "..."]:
        shape = self.entries[name].shape
        return files.read(name, shape, [(0, size) for size in shape]).astype(np.float32)


def _is_pattern(text: str) -> bool:
    """Return whether a text is a regular expression."""
    try:
        re.compile(text)
    except re.error:
        return False
    return True
