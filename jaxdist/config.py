"""Every knob of a run, with its default and one line of help. Pure data: no jax, nothing else of jaxdist.

A TOML file holds only its differences from these defaults, which are the shipped `gpt_tiny`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError


class RequestError(ValueError):
    """A mistake in what was asked for; `problems` holds a sentence each. Commands print them and exit with 2."""

    def __init__(self, *problems: str):
        self.problems = list(problems)
        super().__init__("\n".join(problems))


def nearest(name: str, valid: Iterable[str]) -> str:
    """`did you mean 'x'?`, or the list of what is valid when nothing is near."""
    valid = list(valid)
    close = difflib.get_close_matches(name, valid, n=1)
    return f"did you mean '{close[0]}'?" if close else f"valid names are {', '.join(valid)}"


def _short_names(path: Path) -> Path:
    """Longer names cannot even be looked for."""
    if any(len(os.fsencode(part)) > 255 for part in path.parts):
        raise PydanticCustomError("long_name", "has a name of more than 255 bytes; choose a shorter one")
    return path


Count = Annotated[int, Field(ge=1, lt=2**31)]
CountOrZero = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # jax drops higher bits without a word
FilePath = Annotated[Path, AfterValidator(_short_names)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


class ModelConfig(Section):
    """The decoder's sizes."""

    layers: Count = 4
    """Decoder blocks (L)."""
    embed: Count = 128
    """Width of the residual stream (D)."""
    heads: Count = 4
    """Attention heads (N); must divide embed."""
    mlp: CountOrZero = 0
    """Width of the MLP (F); 0 means 4 x embed."""
    vocab: Count = 2048
    """Rows of the embedding table (V); a tokenizer that is trained here gets this size."""
    sequence: Count = 128
    """Tokens per row (S)."""
    tied: bool = True
    """Use the embedding table as the output projection too."""
    dropout: Fraction = 0.0
    """Probability of dropping an activation, in each block and after the embedding."""
    remat: Literal["none", "dots", "block"] = "none"
    """What the backward pass recomputes: what is cheap; all but the products with weights; whole blocks."""

    @property
    def mlp_size(self) -> int:
        return self.mlp or 4 * self.embed


class DataConfig(Section):
    """Where the tokens come from."""

    path: FilePath | None = None
    """Text (.txt or any other), JSON lines (.jsonl with "text"), or uint16 tokens (.bin); none: Python's library."""
    tokenizer: FilePath | None = None
    """A tokenizer.json to use; none: train a byte-level BPE on the text."""
    validation_path: FilePath | None = None
    """Held-out data of the same kind; none: a fraction of path is held out."""
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """How much of path is held out when there is no validation path."""
    prefetch: Count = 2
    """Batches prepared ahead of the step."""


class OptimizerConfig(Section):
    """The update rule and its schedule."""

    name: Literal["adamw", "lion", "sgd"] = "adamw"
    """Update rule; sgd has momentum."""
    learning_rate: Positive = 4e-3
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after the warm-up; constant decays linearly over the last decay_fraction of the run."""
    warmup: CountOrZero = 20
    """Steps of linear warm-up from 0; where it is not given, no longer than a fifth of the run."""
    final: NonNegative = 0.1
    """Learning rate at the end, as a fraction of the peak."""
    decay_fraction: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Part of the run that decays; used by the constant schedule only."""
    beta1: Fraction = 0.9
    """First-moment decay; the momentum of sgd."""
    beta2: Fraction = 0.95
    """Second-moment decay; not used by sgd."""
    weight_decay: NonNegative = 0.1
    """Decoupled decay of matrices; scales and biases do not decay."""
    clip: NonNegative = 1.0
    """Largest global gradient norm; 0 turns clipping off."""


class TrainConfig(Section):
    """How long, how much at a time."""

    steps: CountOrZero = 150
    """Optimizer steps."""
    epochs: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Passes over the training data, in place of steps; 0 means that steps holds."""
    global_batch_size: Count = 16
    """Rows per optimizer step over the whole mesh."""
    accumulation: Count = 1
    """Micro-batches per step, run one after the other."""
    seed: Seed = 0  # jax drops the higher bits without a word
    """Seed of the parameters, the data order and dropout."""
    max_skipped: Count = 10
    """Stop after this many steps in a row with a loss or gradient that is not finite."""


class ValidationConfig(Section):
    """Loss on the held-out part."""

    every: CountOrZero = 75
    """Steps between validations; 0: only at the end."""
    batches: CountOrZero = 8
    """Batches per validation; 0: the whole held-out part."""


class CheckpointConfig(Section):
    """Saving."""

    every: CountOrZero = 75
    """Steps between checkpoints; 0: only at the end."""
    keep: Count = 3
    """Newest checkpoints kept, beside the one with the best validation loss."""


class LogConfig(Section):
    """What a run tells."""

    every: Count = 10
    """Steps between lines of metrics.jsonl and of the log."""
    tensorboard: bool = True
    """Write TensorBoard files into the run folder."""
    wandb: str = ""
    """Weights & Biases project to report to (needs the extra 'wandb'); empty: none. Never stops a run."""


class Config(Section):
    """Everything about a run."""

    mesh: str = "-1x1x1"
    """data x model x pipeline, such as 4x1x1, or named axes, such as data=4,replica=2; -1 fills one axis."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute in float32, or in bfloat16 over float32 parameters; auto: bfloat16 on GPUs, float32 on CPU."""
    run_dir: FilePath | None = None
    """Folder of the run; none: runs/<config name>."""
    resume: Literal["auto", "never"] = "auto"
    """Go on with the run in run_dir, or refuse to."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()


FREE_ON_RESUME = ("mesh", "run_dir", "resume", "data.prefetch", "validation", "checkpoint", "log")
"""Keys (or whole sections) that may differ when a run goes on: they do not change what is learned."""


def leaves(section: BaseModel, prefix: str = "") -> dict[str, object]:
    """Every knob by its dotted name: `{"mesh": ..., "model.layers": ...}`."""
    found: dict[str, object] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, BaseModel) else {prefix + name: value}
    return found


def differing(old: Config, new: Config) -> list[str]:
    """Dotted names of the knobs that differ and must not when a run goes on."""
    free = lambda name: name in FREE_ON_RESUME or name.split(".")[0] in FREE_ON_RESUME
    old_leaves, new_leaves = leaves(old), leaves(new)
    return [name for name, value in new_leaves.items() if old_leaves[name] != value and not free(name)]
