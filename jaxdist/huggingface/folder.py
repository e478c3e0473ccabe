"""Find what a folder of Hugging Face holds: its `config.json`, and the file of every tensor. No weight is read.

The files may be symbolic links, as in the cache of the Hub.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxdist.config import RequestError
from jaxdist.files.json_files import json_object
from jaxdist.huggingface.safetensors_file import read_header
from jaxdist.huggingface.schema import ADAPTER_CONFIG, CONFIG, INDEX, read_content, read_file

SINGLE = "model.safetensors"

ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""The file with low-rank adapters by themselves, as PEFT has them."""

KEPT = "huggingface"
"""The folder in that of a run with the small files of the folder of Hugging Face that the run began with."""

PREDICTING = "num_nextn_predict_layers"
"""The key of how many layers of multi-token prediction (DeepSeek-V3) stand behind the others."""

OF_LAYER = re.compile(r"model\.layers\.(\d+)\.")
"""How the name of a layer's tensor begins."""

OTHER_FORMS = (".bin", ".pth", ".pt", ".ckpt", ".h5", ".msgpack", ".gguf")
"""Endings of files of weights that are not read."""

PICKLE = ".bin"
"""The ending of files that transformers wrote before safetensors: programs, in the form of Python's pickle."""


@dataclass(frozen=True)
class Folder:
    """A folder of Hugging Face."""

    path: Path
    config: dict[str, Any]
    """The content of `config.json`."""
    files: dict[str, Path] = field(default_factory=dict)
    """The safetensors file of each tensor, by the tensor's name."""


def is_folder(path: Path) -> bool:
    """Return whether `path` is meant as a folder of Hugging Face: it has a `config.json`, and is not that of a run."""
    return os.path.isfile(path / CONFIG) and not any(
        os.path.lexists(path / name) for name in ("config.toml", "run.json")
    )


def open_config(path: Path) -> Folder:
    """Return the folder with its `config.json` alone: predictions need no weights. Raises `RequestError`."""
    if not path.is_dir():
        raise RequestError(f"'{path}' is not a folder; name a folder with {CONFIG} and *.safetensors")
    if not os.path.lexists(path / CONFIG):
        raise RequestError(f"'{path}' has no {CONFIG}, so it is not a folder of Hugging Face; name one that has it")
    problem = other_form(path)
    if problem:
        raise RequestError(problem)
    config = read_file(path / CONFIG)
    return Folder(path, config)


def is_adapters(path: Path) -> bool:
    """Return whether `path` is a folder of PEFT: adapters beside weights that are elsewhere."""
    return os.path.lexists(path / ADAPTER_CONFIG)


def other_form(path: Path) -> str:
    """Return why the weights in a folder cannot be read as they are; empty for any other folder."""
    if not is_adapters(path):
        return ""
    return (
        f"'{path}' holds adapters of PEFT ({ADAPTER_CONFIG}), which are no weights by themselves; begin a run with "
        f"them by --init-from, where base_model_name_or_path in that file is the folder of their base"
    )


def base_of_adapters(path: Path) -> Path | None:
    """Return the folder of Hugging Face that adapters of PEFT name as their base; None where they name none."""
    try:
        # All of it is checked where the adapters are read.
        base = json_object(read_content(path / ADAPTER_CONFIG), str(path)).get("base_model_name_or_path")
    except RequestError:
        return None
    return Path(base) if isinstance(base, str) and is_folder(Path(base)) else None


def open_folder(path: Path) -> Folder:
    """Return the folder with its `config.json` and the file of each tensor.

    A single file counts, and not an index beside it. Raises `RequestError` where it has no weights in safetensors
    files, or where its index does not fit them.
    """
    folder = open_config(path)
    if os.path.lexists(path / SINGLE):
        return Folder(path, folder.config, dict.fromkeys(read_header(path / SINGLE), path / SINGLE))
    if os.path.lexists(path / INDEX):
        return Folder(path, folder.config, _files_of_index(path))
    raise RequestError(_without_weights(path))


def twofold(path: Path) -> str:
    """Return a sentence about a folder that holds its weights twice, as a single file and by an index; else nothing."""
    if not os.path.lexists(path / SINGLE) or not os.path.lexists(path / INDEX):
        return ""
    return f"'{path}' holds {SINGLE} and {INDEX}: the weights are those of {SINGLE}, as in transformers"


def layers_left_out(path: Path) -> str:
    """Return a sentence about layers of multi-token prediction (DeepSeek-V3) in a folder; nothing where it has none."""
    config = open_config(path).config
    if not config.get(PREDICTING) or not any(predicts_further(config, name) for name in open_folder(path).files):
        return ""
    layers = config["num_hidden_layers"]
    return f"'{path}' holds layers of multi-token prediction behind its {layers} layers, which are not read"


def predicts_further(config: Mapping[str, Any], name: str) -> bool:
    """Return whether a tensor is of a layer of multi-token prediction: config.json counts these behind the others."""
    layer = OF_LAYER.match(name)
    layers, further = config.get("num_hidden_layers"), config.get(PREDICTING)
    if layer is None or not isinstance(layers, int) or not isinstance(further, int):
        return False
    return layers <= int(layer[1]) < layers + further


def _files_of_index(path: Path) -> dict[str, Path]:
    """Return the file of each tensor as the index gives it. Raises `RequestError` with a sentence for each problem."""
    index = path / INDEX
    weight_map = read_file(index)["weight_map"]
    names = sorted(set(weight_map.values()))
    # A name with a slash would lead out of the folder.
    wrong = [name for name in names if not name.endswith(".safetensors") or "/" in name]
    problems = [
        f"'{index}' names '{name}', which is not a *.safetensors file beside it; copy it again" for name in wrong
    ]
    missing = [name for name in names if name not in wrong and not os.path.isfile(path / name)]
    if missing:
        problems.append(f"'{index}' names files that are not there: {', '.join(missing)}; copy them too")
    if problems:
        raise RequestError(*problems)
    return {tensor: path / name for tensor, name in weight_map.items()}


def _without_weights(path: Path) -> str:
    """Return a sentence for a folder with neither an index nor a single safetensors file."""
    names = sorted(os.listdir(path))
    parts = [name for name in names if name.endswith(".safetensors")]
    if parts:
        return f"'{path}' holds {', '.join(parts[:3])}, but neither {SINGLE} nor {INDEX}; copy the index too"
    others = [name for name in names if name.endswith(OTHER_FORMS)]
    if others:
        how = "load it with transformers, and write it with save_pretrained"
        if others[0].endswith(PICKLE):
            how = (
                'where torch and transformers are installed, python -c "from transformers import AutoModelForCausalLM '
                f"as M; M.from_pretrained('{path}', dtype='auto').save_pretrained('{path}')\""
            )
        return (
            f"'{path}' holds its weights as {', '.join(others[:3])}, and only *.safetensors are read; convert it: {how}"
        )
    return f"'{path}' has a {CONFIG}, but no weights; copy its *.safetensors too"
