"""Take the model, and by default the tokenizer, from the folder of Hugging Face that a request begins with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdist.config import Config, ModelConfig, RequestError, trained
from jaxdist.huggingface.folder import KEPT, is_adapters, open_config
from jaxdist.huggingface.model_config import differing, longest_sequence, maximum_of, model_values
from jaxdist.huggingface.schema import TOKENIZER
from jaxdist.weights.named import model_folder

RUNS = Path("runs")
"""Where the folders of runs are by default."""

USUAL_SEQUENCE = 1024
"""Tokens per row where nothing is given and the model is for as many: the longest ones cost too much by default."""

BALANCE = ("balance_rate", "balance_loss", "z_loss", "capacity_factor")
"""Knobs of how a run trains a model with experts; a folder gives some of them, and a request may change them."""

OWN = (
    "sequence",
    "documents",
    "dropout",
    "remat",
    "unroll_layers",
    "attention",
    "classes",
    "image",
    "channels",
    *trained.KNOBS,
    *BALANCE,
)
"""Knobs of `model` that are up to a run; a folder determines the others."""

MODEL_KNOBS = frozenset(f"model.{name}" for name in ModelConfig.model_fields)
"""Knobs that depend on the folder."""

GIVEN = MODEL_KNOBS - {f"model.{name}" for name in OWN}
"""Knobs that the folder gives, whatever else does."""


def model_of(folder: Path, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the knobs of `model` by their dotted names, and a sentence for each problem.

    `given` are the knobs of the request; those of `model` must be as in the folder. `model.sequence` is up to them.
    """
    try:
        opened = open_config(folder)
        found = model_values(opened)
    except RequestError as error:
        return {}, error.problems
    problems = _differences(folder, found, given)
    values = {f"model.{name}": value for name, value in found.items()}
    values.update({name: value for name, value in given.items() if name.removeprefix("model.") in BALANCE})
    adapters = given.get("init_from")
    if adapters and is_adapters(adapters):
        # It imports numpy, which most requests do not need.
        from jaxdist.huggingface.peft_reading import PeftAdapter

        try:
            asked = PeftAdapter(adapters).knobs(ModelConfig(**found))
        except RequestError as error:
            return values, [*problems, *error.problems]
        problems += _other_adapters(adapters, asked, given)
        values |= {f"model.{name}": value for name, value in asked.items()}
    longest = longest_sequence(opened, found)
    sequence = given.get("model.sequence")
    if sequence is None:
        values["model.sequence"] = min(USUAL_SEQUENCE, maximum_of(opened))
    # A table of learned positions has a check of its own.
    elif sequence > longest and not found.get("positions"):
        problems.append(
            f"model.sequence {sequence} is more than the {longest} tokens that the model in '{folder}' is for "
            f"(max_position_embeddings); lower it"
        )
    return values, problems


def default_run_dir(init_from: Path | None) -> Path | None:
    """Return the folder of a run that begins with a folder of Hugging Face, where no config gives the run a name."""
    if init_from is None:
        return None
    run = RUNS / name_of(init_from)
    return run if model_folder(init_from, run) else None


def name_of(folder: Path) -> str:
    """Return the name of a folder, which may be written as `.` too."""
    return Path(os.path.abspath(folder)).name


def with_tokenizer(folder: Path, given: Mapping[str, Any], default: bool) -> dict[str, Any]:
    """Return `data.tokenizer` where it is that of the folder, else nothing.

    It is where a request names the folder itself, or, with `default`, where it names none and the folder has one.
    """
    tokenizer = given.get("data.tokenizer")
    if tokenizer is None and default and (folder / TOKENIZER).is_file():
        return {"data.tokenizer": folder}
    if tokenizer is not None and tokenizer == given.get("init_from"):
        return {"data.tokenizer": folder}
    return {}


def _other_adapters(adapters: Path, found: dict[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each given knob that is not as in a folder of PEFT."""
    return [
        f"model.{name} is {given[f'model.{name}']}, but the adapters in '{adapters}' have {value}; leave it out"
        for name, value in found.items()
        if given.get(f"model.{name}", value) != value
    ]


def _differences(folder: Path, found: dict[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each given knob of `model` that is not as in the folder."""
    names = [name for name in ModelConfig.model_fields if name not in OWN and f"model.{name}" in given]
    ours = {name: given[f"model.{name}"] for name in names}
    theirs = ModelConfig(**found)
    return [
        f"model.{name} is {ours[name]}, but the model in '{folder}' has {getattr(theirs, name)}; leave it out"
        for name in differing(found, ours)
    ]


def as_asked(config: Config) -> Config:
    """Return `config` with the folder that it begins with as `data.tokenizer`, instead of what the run keeps of it.

    So the configuration of a run is the same whether or not that folder is still there.
    """
    if config.data.tokenizer != config.folder / KEPT:
        return config
    return config.with_knobs({"data.tokenizer": config.init_from})
