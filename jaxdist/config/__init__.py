"""Define every knob of a run, with its default and one line of help. Pure data: this module does not import jax.

The knobs of the model, the optimizer and the pipeline have files of their own, and are imported from here like others.

A TOML file holds only the values that differ from these defaults. The defaults are the shipped config `gpt_tiny`.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from jaxdist.config.mixture import MixtureSource
from jaxdist.config.model import FAMILIES, ModelConfig
from jaxdist.config.optimizer import OptimizerConfig
from jaxdist.config.pipeline import PipelineConfig
from jaxdist.config.precision import (
    PRECISIONS,
    Capability,
    Precision,
    PrecisionName,
    meaning_of_auto,
)
from jaxdist.config.values import (
    Count,
    CountOrZero,
    FilePath,
    FilePaths,
    IdType,
    Learn,
    MicroBatches,
    Minutes,
    MixtureTable,
    NonNegativeFloat32,
    NotOneBit,
    PositiveFloat32,
    PositiveSeconds,
    Resume,
    RowForm,
    Rows,
    Seconds,
    Section,
    Seed,
    Site,
    Stage,
    TextTemplateText,
    WebAddress,
    WholeSeconds,
)
from jaxdist.process import exit_codes

__all__ = [
    "FAMILIES",
    "Busy",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "DataLost",
    "FaultConfig",
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PipelineConfig",
    "ProfileConfig",
    "RequestError",
    "RulesConfig",
    "SampleConfig",
    "TrainConfig",
    "ValidationConfig",
    "leaves",
    "nearest",
]


class RequestError(ValueError):
    """Report invalid options. `problems` holds one sentence for each of them, which commands print."""

    exit_code = exit_codes.REFUSED
    """Exit code of the command that raises it."""

    def __init__(self, *problems: str):
        self.problems = list(problems)
        super().__init__("\n".join(problems))


class Busy(RequestError):
    """Report that the run folder is in use. The condition is temporary: the same request may succeed later."""

    exit_code = exit_codes.BUSY


class Failed(RequestError):
    """Report what went wrong outside the request, such as a full disk: the same request may succeed later."""

    exit_code = exit_codes.FAILED


class DataLost(Failed):
    """Report data that were readable when the run began and are not any more."""


class NotFinite(Failed):
    """Report a result that is NaN or infinite: a failure of the weights or of the arithmetic."""


LISTED = 20
"""Names of one kind that an error lists; the others it counts."""


def listed(sentences: Iterator[str], count: int, rest: str) -> Iterator[str]:
    """Yield the first `LISTED` of `count` sentences, and one about the `rest`; those that are not listed are not made.

    To look for the nearest valid name takes a millisecond, and a file may have many thousand names.
    """
    yield from itertools.islice(sentences, LISTED)
    if count > LISTED:
        yield f"there are {count - LISTED} more {rest}; correct these first"


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return `did you mean 'x'?` for the closest valid name, or the list of valid names when none is close."""
    valid = list(valid)
    close = difflib.get_close_matches(name, valid, n=1)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"valid names are {', '.join(valid)}"


class RulesConfig(Section):
    """Mesh axis that shards each logical axis of the model; empty: not sharded."""

    heads: str = "model"
    """Query heads, and the key/value heads with them."""
    mlp: str = "model"
    """Width of the MLP."""
    vocab: str = "model"
    """Vocabulary: rows of the embedding table, and the logits."""


class ParallelConfig(Section):
    """Sharding of parameters, gradients and optimizer state over the mesh."""

    zero: Stage = 0
    """ZeRO over data, expert, context: 1 shards optimizer, parameters at rest; 2 gradients; 3 (FSDP) gathers layers."""
    sequence: bool = False
    """Sequence parallelism: shard the residual stream along the sequence over the model axis."""
    context: Literal["auto", "ring", "ulysses"] = "auto"
    """Attention over the axis context: ring sends keys and values round, ulysses exchanges heads; auto: fewer bytes."""
    replica_zero: bool = True
    """From ZeRO 1 on, shard masters and optimizer state over replica too; weights are gathered once per step."""
    gradient_compression: Annotated[Literal["exact", "bfloat16", "int8", "topk-int8", "powersgd"], NotOneBit] = "exact"
    """Gradients over replica in fewer bits, with error feedback; all but exact change the loss, by mesh and ZeRO."""
    compression_density: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Of topk-int8: the fraction of a gradient's numbers, the largest, that is sent exactly."""
    compression_rank: Annotated[int, Field(ge=1, le=2**10)] = 4
    """Of powersgd: the rank of the approximation of each matrix."""
    delayed_gradients: bool = False
    """Gradients cross replica during the next step, and update the weights at its end; this changes the loss."""
    micro_batches: Literal["inside", "outside"] = "inside"
    """Gradient accumulation of ZeRO 2 and 3: inside each layer, or outside (fewer activations, more communication)."""
    offload: Literal["none", "optimizer"] = "none"
    """optimizer: keep the moments, and the master weights of precision mixed, in host memory between steps."""
    rules: RulesConfig = RulesConfig()


class DataConfig(Section):
    """Source of the tokens or images, and the data loader."""

    path: FilePaths | None = None
    """Text, JSON lines, Parquet, Arrow, tokens; folder, *.txt or a,b; images: .npz, folder; none: Python's library."""
    mixture: MixtureTable | None = None
    """Sources mixed by weight, instead of path: a table of paths and weights, or paths with *weight, also in path."""
    changed: bool = False
    """Let a run that is resumed go on with another mixture: its rows so far stay, new weights hold from there on."""
    tokenizer: FilePath | None = None
    """A tokenizer.json, or the folder of a tokenizer (Hugging Face), for its BOS too; none: train a byte-level BPE."""
    validation_path: FilePaths | None = None
    """Validation data of the same kind, named as in path; none: a fraction of path is held out."""
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Fraction of path that is held out when there is no validation path."""
    text: TextTemplateText = "text"
    """Where the text of a row (JSON, Parquet, Arrow) is: a key, a.b for one inside another, or as {title}: {body}."""
    form: RowForm = "auto"
    """What rows hold: text, conversations as messages, sharegpt, prompt, alpaca, or preference; auto: by their keys."""
    learn: Learn = "assistant"
    """Which tokens of conversations are learned: all answers, the last answer of each, or every token."""
    long: Literal["drop", "cut"] = "drop"
    """Conversations longer than a row. drop: leave them out, counted; cut: keep what fits, if something is learned."""
    on_error: Literal["refuse", "skip"] = "refuse"
    """Rows without a text that can be read. refuse: name the first; skip: count them, up to 100 or one in 100."""
    dtype: IdType = "auto"
    """Type of the ids in a headerless .bin, little-endian; auto: uint32 if the content shows it, else uint16."""
    pack: Literal["cut", "best-fit"] = "cut"
    """How rows are filled. cut: one stream is cut, a conversation has its own; best-fit: with whole documents."""
    augment: Literal["none", "crop", "crop-flip"] = "none"
    """Augmentation of training images. crop: shift by up to an eighth of the size; flip: mirror half of the time."""
    skip: str = ""
    """Batches to leave out, such as 1200-1450,2000: batch n is that of step n where none is left out; empty: none."""
    prefetch: Annotated[int, Field(ge=1, le=2**10)] = 2
    """Batches that the data loader prepares ahead of the step."""

    @property
    def skips(self) -> bool:
        """Whether rows without a text that can be read are left out."""
        return self.on_error == "skip"

    def of_source(self, source: MixtureSource) -> DataConfig:
        """Return what is asked of one source of the mixture, as of a path alone."""
        text = source.text or self.text
        return self.model_copy(update={"path": source.path, "validation_path": None, "text": text})


class TrainConfig(Section):
    """Length of the run and size of a step."""

    steps: CountOrZero = 150
    """Optimizer steps."""
    epochs: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Passes over the training data, instead of steps; 0: use steps."""
    global_batch_size: Rows = 16
    """Rows per optimizer step over the whole mesh."""
    accumulation: MicroBatches = 1
    """Gradient accumulation: micro-batches per step, run in sequence; saves activations if run outside the layers."""
    objective: Literal["cross-entropy", "dpo", "orpo"] = "cross-entropy"
    """Loss: cross-entropy of tokens; dpo, orpo: of pairs of a better and a worse answer, each pair two rows."""
    dpo_beta: PositiveFloat32 = 0.1
    """Of dpo: the weight of log-probabilities against the reference; large: the model stays near it."""
    orpo_lambda: PositiveFloat32 = 0.1
    """Of orpo: the weight of the odds ratio of both answers beside the cross-entropy of the better one."""
    local_steps: CountOrZero = 0
    """Steps (H) that each replica takes by itself before all average their weights, which changes the loss; 0: none."""
    seed: Seed = 0
    """Seed of the parameters, the data order and dropout."""
    max_skipped: Count = 10
    """Stop after this many consecutive steps that are skipped: not finite, or, with spike, a spike."""
    spike: NonNegativeFloat32 = 0.0
    """Skip updates whose loss or norm is so many standard deviations above the last 128; 6 is common; 0: none."""
    max_raised: CountOrZero = 0
    """Stop after this many consecutive steps with a loss above 1.5 times the median of the last 128; 0: never."""
    deterministic: bool = False
    """On GPUs: compute the same bits in each run of the same program, at some cost; CPUs do so anyway."""

    @property
    def learns_pairs(self) -> bool:
        """Whether rows are pairs of a better and a worse answer."""
        return self.objective != "cross-entropy"

    @property
    def refers(self) -> bool:
        """Whether the loss compares the model with the one that the run begins with."""
        return self.objective == "dpo"

    @property
    def rows_together(self) -> int:
        """The rows next to each other that must be on the same devices: two where they are a pair."""
        return 2 if self.learns_pairs else 1


class ValidationConfig(Section):
    """Loss on the held-out data."""

    every: CountOrZero = 75
    """Steps between validations; 0: only at the end."""
    batches: CountOrZero = 8
    """Batches per validation; 0: all held-out data."""


class CheckpointConfig(Section):
    """When to save checkpoints, and which to keep."""

    every: CountOrZero = 75
    """Steps between checkpoints; 0: only at the end."""
    minutes: Minutes = 0.0
    """Also save after this many minutes; 0: never. Checked after each step; with several processes every log.every."""
    epochs: bool = False
    """Also save at the end of every epoch."""
    keep: Count = 3
    """Number of newest checkpoints to keep, in addition to the one with the best validation loss."""
    keep_every: CountOrZero = 0
    """Keep checkpoints of steps that are multiples of this permanently; 0: none."""
    grace_seconds: PositiveSeconds = 60.0
    """Longest time from a stop signal to the end of the run, saved or not: the scheduler's delay before it kills."""


class LogConfig(Section):
    """Where metrics are written, and how often."""

    every: Count = 10
    """Steps between lines of metrics.jsonl and of the log."""
    norms: bool = False
    """Also write the gradient norm of each group of parameters: attention, mlp, norms, embedding table, head."""
    tensorboard: bool = True
    """Write TensorBoard files into the run folder."""
    wandb: str = ""
    """Weights & Biases project to log to (needs the extra 'wandb'); empty: none. Its failures never stop a run."""


class SampleConfig(Section):
    """Text that a run writes while it trains."""

    every: CountOrZero = 0
    """Steps between samples; 0: none."""
    prompts: str = ""
    """Texts to continue, one a line; what is written goes into the log and TensorBoard."""


class ProfileConfig(Section):
    """Profile of the devices during a few steps."""

    steps: str = ""
    """Steps to trace, such as 10-12: writes a Perfetto trace and lists the longest kernels; empty: none."""

    @property
    def numbers(self) -> range:
        """Numbers of the steps to trace, counted from 1.

        `steps` is "" for none, "7" for one step, or "5-8", which includes both ends.
        """
        first, _, last = self.steps.partition("-")
        if not first:
            return range(0)
        return range(int(first), int(last or first) + 1)


class ClusterConfig(Section):
    """Place of this process in its job; by default read from the environment (torchrun, mpirun, Slurm)."""

    coordinator: str = ""
    """HOST:PORT at which all processes reach process 0; empty: from the environment."""
    processes: CountOrZero = 0
    """Number of processes; 0: from the environment, or 1."""
    process_id: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    """Index of this process, from 0; -1: from the environment."""
    site: Site = ""
    """Name of the site of this process; slurm: the switch below the top of Slurm's topology; empty: one site."""


class FaultConfig(Section):
    """When to end a job that makes no progress (fault tolerance)."""

    hang_seconds: Seconds = 0.0
    """End the job if a step takes longer, or start-up 10 times as long; 0: 10 usual steps, at least 5 minutes."""
    heartbeat_seconds: WholeSeconds = 30
    """Seconds without a heartbeat after which a process counts as lost, and the job ends."""
    compare: CountOrZero = 0
    """Steps between comparisons of what devices hold copies of, made at each save too (corrupted data); 0: none."""
    rollbacks: CountOrZero = 0
    """Times a run that is started again goes back before repeated spikes, and leaves out their batches; 0: never."""
    notify: WebAddress = ""
    """Web address to which process 0 posts a JSON when the run fails or stops early; empty: none. It is not saved."""
    start_seconds: WholeSeconds = 300
    """Seconds that the processes wait for each other at start-up (rendezvous)."""


class Config(Section):
    """Complete configuration of a run."""

    mesh: str = "-1x1x1"
    """data x model x pipeline, such as 4x1x1, or by name: data=4,replica=2; -1 fills an axis; auto: train plans it."""
    precision: Literal["auto", PrecisionName] = "auto"
    """bfloat16, float16, fp8 (matmuls): f32 parameters; mixed: f32 masters in the optimizer; auto: by device."""
    run_dir: FilePath | None = None
    """Folder of the run; none: runs/ and the name of the configuration, or of the folder of Hugging Face."""
    resume: Resume = "auto"
    """auto: resume the run in run_dir; never: fail if the run exists; a number: go back to that step's checkpoint."""
    init_from: FilePath | None = None
    """Weights to start from: a run or a checkpoint, of the same model; or a folder of Hugging Face, which gives it."""
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    pipeline: PipelineConfig = PipelineConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    sample: SampleConfig = SampleConfig()
    profile: ProfileConfig = ProfileConfig()
    cluster: ClusterConfig = ClusterConfig()
    fault: FaultConfig = FaultConfig()

    @property
    def folder(self) -> Path:
        """The folder of the run, which every request has: one that names none gets `runs/<config name>`."""
        assert self.run_dir is not None
        return self.run_dir

    @property
    def keeps_reference(self) -> bool:
        """Whether the log-probabilities that a loss refers to are computed before the first step, and kept."""
        return self.train.refers and not self.model.frozen

    @property
    def refers_in_step(self) -> bool:
        """Whether each step computes them: the reference of adapters is the frozen base beside them."""
        return self.train.refers and self.model.frozen

    def with_knobs(self, values: Mapping[str, object]) -> Config:
        """Return the configuration with these values of knobs, by name as in `leaves`. They are not checked."""
        update: dict[str, Any] = {}
        sections: dict[str, dict[str, object]] = {}
        for name, value in values.items():
            section, _, knob = name.rpartition(".")
            if section:
                sections.setdefault(section, {})[knob] = value
            else:
                update[name] = value
        for section, knobs in sections.items():
            update[section] = update.get(section, getattr(self, section)).model_copy(update=knobs)
        return self.model_copy(update=update)

    @property
    def numbers(self) -> Precision:
        """The row of the precision; `auto` counts as bfloat16."""
        return PRECISIONS["bfloat16" if self.precision == "auto" else self.precision]

    def with_precision(self, cpu: bool, capability: Capability = ()) -> Config:
        """Return the configuration with the precision that `auto` stands for on CPUs, or else on GPUs.

        `capability` is the CUDA compute capability of the GPUs, where it is known. Raises `RequestError` for a
        precision that they do not have. Where `auto` becomes float16, `scaled_loss.check` looks at the other knobs.
        """
        if self.precision == "auto":
            return self.model_copy(update={"precision": meaning_of_auto(cpu, capability)})
        problem = "" if cpu else self.numbers.missing(capability)
        if problem:
            raise RequestError(problem)
        return self


def leaves(section: BaseModel, prefix: str = "") -> dict[str, object]:
    """Return every knob by its dotted name: `{"mesh": ..., "model.layers": ...}`."""
    values: dict[str, object] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            values.update(leaves(value, f"{prefix}{name}."))
        else:
            values[prefix + name] = value
    return values
