"""Every knob of a run, with its default and one line of help. Pure data: no jax.

A TOML file holds only its differences from these defaults, which are the shipped `gpt_tiny`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from jaxdist.values import (
    Channels,
    Count,
    CountOrZero,
    FilePath,
    FractionFloat32,
    Layers,
    MicroBatches,
    MicroBatchesOrZero,
    Minutes,
    NonNegativeFloat32,
    Pixels,
    PositiveFloat32,
    PositiveSeconds,
    Resume,
    Rows,
    Seconds,
    Seed,
    Sequence,
    Stage,
    WholeSeconds,
)


class RequestError(ValueError):
    """A mistake in what was asked for; `problems` holds a sentence each. Commands print them."""

    exit_code = 2
    """Of the command."""

    def __init__(self, *problems: str):
        self.problems = list(problems)
        super().__init__("\n".join(problems))


class Busy(RequestError):
    """The run folder is in use. This passes: the same request may be made again."""

    exit_code = 75


class DataLost(RequestError):
    """Data that were there when the run began cannot be read any more: a failure, and no mistake in the request."""

    exit_code = 1


def nearest(name: str, valid: Iterable[str]) -> str:
    """`did you mean 'x'?`, or the list of what is valid when nothing is near."""
    valid = list(valid)
    close = difflib.get_close_matches(name, valid, n=1)
    return f"did you mean '{close[0]}'?" if close else f"valid names are {', '.join(valid)}"


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


class ModelConfig(Section):
    """The family of the model, decoder of text or classifier of images, and its sizes."""

    family: Literal["gpt", "llama", "cnn", "resnet18", "resnet50"] = "gpt"
    """GPT-2's decoder or Llama's, for text; or, for images, a small convolutional network or a ResNet."""
    layers: Layers = 4
    """Decoder blocks (L)."""
    embed: Count = 128
    """Width of the residual stream (D)."""
    heads: Count = 4
    """Attention heads (N); must divide embed."""
    kv_heads: CountOrZero = 0
    """Key/value heads (K) of llama's grouped-query attention; must divide heads; 0 means as many as heads."""
    rope_theta: Annotated[PositiveFloat32, Field(ge=1)] = 500_000.0
    """Base of llama's rotary positions."""
    mlp: CountOrZero = 0
    """Width of the MLP (F); 0 means 4 x embed, or for llama 8/3 x embed rounded up to a multiple of 256."""
    vocab: Count = 2048
    """Rows of the embedding table (V); a tokenizer that is trained here gets this size."""
    sequence: Sequence = 128
    """Tokens per row (S)."""
    documents: Literal["joined", "apart"] = "joined"
    """Whether tokens see the documents before theirs in a row; apart they do not, and positions begin anew in each."""
    tied: bool = True
    """Use the embedding table as the output projection too."""
    dropout: FractionFloat32 = 0.0
    """Probability of dropping an activation: of gpt in each block and after the embedding, of cnn before the head."""
    remat: Literal["none", "dots", "block", "stage", "offload"] = "none"
    """What is recomputed: what is cheap; all but products; blocks; stages; offload: blocks, from inputs in the host."""

    classes: Annotated[int, Field(ge=2, lt=2**31)] = 10
    """Classes of images."""
    image: Pixels = 8
    """Height and width of an image in pixels; those of a folder of pictures are scaled to it."""
    channels: Channels = 1
    """Channels of an image: 1 for grey, 3 for colour."""

    @property
    def images(self) -> bool:
        """Whether it classifies images; it models text otherwise."""
        return self.family not in ("gpt", "llama")

    @property
    def key_value_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def mlp_size(self) -> int:
        """Llama's three matrices of 8/3 weigh what the GPT's two of 4 do (Touvron et al. 2023, section 2.2)."""
        if self.mlp:
            return self.mlp
        return 4 * self.embed if self.family == "gpt" else math.ceil(8 * self.embed / (3 * 256)) * 256


class RulesConfig(Section):
    """The mesh axis that splits each logical axis of the model; empty: none, it stays whole."""

    heads: str = "model"
    """Query heads, and with them the key/value heads."""
    mlp: str = "model"
    """Width of the MLP."""
    vocab: str = "model"
    """Rows of the embedding table, and the logits."""


class ParallelConfig(Section):
    """How the work is split over the mesh."""

    zero: Stage = 0
    """ZeRO over data: 1 splits optimizer and parameters at rest; 2 the gradients too; 3 gathers layer by layer."""
    sequence: bool = False
    """Split the residual stream along the sequence over model (sequence parallelism)."""
    micro_batches: Literal["inside", "outside"] = "inside"
    """Where ZeRO 2 and 3 accumulate: inside each layer; or outside, which holds fewer activations and moves more."""
    offload: Literal["none", "optimizer"] = "none"
    """What rests in the host's memory between steps: the moments, and with them the masters of precision mixed."""
    rules: RulesConfig = RulesConfig()


class PipelineConfig(Section):
    """The order of work where the layers are split over the pipeline axis of the mesh."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-u", "pipedream"] = "1f1b"
    """Which micro-batch goes when; gpipe holds all, the next ones wait less, pipedream never, with older gradients."""
    microbatches: MicroBatchesOrZero = 0
    """Micro-batches per step (M), in place of train.accumulation; 0 means 8, and for pipedream 1: it has no others."""
    virtual_stages: CountOrZero = 0
    """Parts of the model on each device (v); 0 means 2 for interleaved, and 1 for the others."""

    @property
    def asynchronous(self) -> bool:
        """Whether the next step begins before the last one has ended."""
        return self.schedule == "pipedream"

    @property
    def micro(self) -> int:
        return self.microbatches or (1 if self.asynchronous else 8)

    @property
    def virtual(self) -> int:
        return self.virtual_stages or (2 if self.schedule == "interleaved" else 1)


class DataConfig(Section):
    """Where the tokens, or the images, come from."""

    path: FilePath | None = None
    """Text, .jsonl with "text", or uint16 tokens (.bin); images: .npz, or a folder; none: Python's library, digits."""
    tokenizer: FilePath | None = None
    """A tokenizer.json to use; none: train a byte-level BPE on the text."""
    validation_path: FilePath | None = None
    """Held-out data of the same kind; none: a fraction of path is held out."""
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """How much of path is held out when there is no validation path."""
    augment: Literal["none", "crop", "crop-flip"] = "none"
    """Training images: shifted by up to an eighth of their size, and mirrored half of the time."""
    prefetch: Annotated[int, Field(ge=1, le=2**10)] = 2
    """Batches prepared ahead of the step."""


class OptimizerConfig(Section):
    """The update rule and its schedule."""

    name: Literal["adamw", "lion", "sgd"] = "adamw"
    """Update rule; sgd has momentum."""
    learning_rate: PositiveFloat32 = 4e-3
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after the warm-up; constant decays linearly over the last decay_fraction of the run."""
    warmup: CountOrZero = 20
    """Steps of linear warm-up from 0; where it is not given, no longer than a fifth of the run."""
    final: NonNegativeFloat32 = 0.1
    """Learning rate at the end, as a fraction of the peak."""
    decay_fraction: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Part of the run that decays; used by the constant schedule only."""
    beta1: FractionFloat32 = 0.9
    """First-moment decay; the momentum of sgd."""
    beta2: FractionFloat32 = 0.95
    """Second-moment decay; not used by sgd."""
    weight_decay: NonNegativeFloat32 = 0.1
    """Decoupled decay of matrices; scales and biases do not decay."""
    clip: NonNegativeFloat32 = 1.0
    """Largest global gradient norm; 0 turns clipping off."""

    def decay_steps(self, steps: int) -> int:
        """How many of the last of `steps` steps decay in the constant schedule."""
        after_warmup = max(steps - min(self.warmup, steps) - 1, 1)
        return min(round(steps * self.decay_fraction), after_warmup)


class TrainConfig(Section):
    """How long, how much at a time."""

    steps: CountOrZero = 150
    """Optimizer steps."""
    epochs: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Passes over the training data, in place of steps; 0 means that steps holds."""
    global_batch_size: Rows = 16
    """Rows per optimizer step over the whole mesh."""
    accumulation: MicroBatches = 1
    """Micro-batches per step, run one after the other; saves activations where they run outside the layers."""
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
    minutes: Minutes = 0.0
    """Minutes after which to save too; 0: never. Looked at after each step; by several processes each log.every."""
    epochs: bool = False
    """Save at the end of every epoch too."""
    keep: Count = 3
    """Newest checkpoints kept, beside the one with the best validation loss."""
    keep_every: CountOrZero = 0
    """Checkpoints of steps that this divides are kept for good; 0: none."""
    grace_seconds: PositiveSeconds = 60.0
    """From a signal to the end of the run at the latest, saved or not: what a scheduler gives before it kills."""


class LogConfig(Section):
    """What a run tells."""

    every: Count = 10
    """Steps between lines of metrics.jsonl and of the log."""
    tensorboard: bool = True
    """Write TensorBoard files into the run folder."""
    wandb: str = ""
    """Weights & Biases project to report to (needs the extra 'wandb'); empty: none. Never stops a run."""


class ProfileConfig(Section):
    """A look at what the devices do in a few steps."""

    steps: str = ""
    """Steps to trace, such as 10-12: a file for Perfetto, and the longest kernels; empty: none."""

    @property
    def numbers(self) -> range:
        """The numbers of these steps, counted from 1."""
        first, _, last = self.steps.partition("-")
        return range(int(first), int(last or first) + 1) if first else range(0)


class ClusterConfig(Section):
    """Which of several processes this one is; by default as the environment tells (torchrun, mpirun, Slurm)."""

    coordinator: str = ""
    """HOST:PORT where process 0 is reached by all; empty: as the environment tells."""
    processes: CountOrZero = 0
    """How many there are; 0: as the environment tells, or 1."""
    process_id: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    """Which this is, from 0; -1: as the environment tells."""


class FaultConfig(Section):
    """When to give up on what does not go on."""

    hang_seconds: Seconds = 0.0
    """End the job when a step takes longer, or 10 times as long to start; 0: 10 usual steps, at least 5 minutes."""
    heartbeat_seconds: WholeSeconds = 30
    """A process that has not been heard of for so long is lost, and with it the job."""
    start_seconds: WholeSeconds = 300
    """How long the processes wait for each other at the start."""


class Config(Section):
    """Everything about a run."""

    mesh: str = "-1x1x1"
    """data x model x pipeline, such as 4x1x1, or names: data=4,replica=2; -1 fills one axis; auto: train plans it."""
    precision: Literal["auto", "float32", "bfloat16", "mixed"] = "auto"
    """bfloat16 keeps float32 parameters, mixed only float32 masters in the optimizer; auto: bfloat16 on GPUs."""
    run_dir: FilePath | None = None
    """Folder of the run; none: runs/<config name>."""
    resume: Resume = "auto"
    """auto goes on with the run in run_dir, never refuses to; a number goes back to the checkpoint of that step."""
    init_from: FilePath | None = None
    """A run, or a checkpoint of one, whose weights a new run begins with; same model, and for text same tokenizer."""
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    pipeline: PipelineConfig = PipelineConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    profile: ProfileConfig = ProfileConfig()
    cluster: ClusterConfig = ClusterConfig()
    fault: FaultConfig = FaultConfig()


def leaves(section: BaseModel, prefix: str = "") -> dict[str, object]:
    """Every knob by its dotted name: `{"mesh": ..., "model.layers": ...}`."""
    found: dict[str, object] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, BaseModel) else {prefix + name: value}
    return found
