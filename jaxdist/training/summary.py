"""What a run says before its first step, so that nothing has to be guessed from the log."""

from __future__ import annotations

from importlib.metadata import version

from jaxdist import __version__, models
from jaxdist.cluster.runtime import capacity
from jaxdist.mesh import describe
from jaxdist.models.attention import attention_kernel
from jaxdist.planning import memory
from jaxdist.planning.timing import FLOPS_FORMULA, flops_per_token
from jaxdist.training.run import Run


def summary(run: Run, folder: object, resume: str) -> list[str]:
    """Lines of the summary, in the order in which people ask."""
    config, device = run.config, run.mesh.devices.flat[0]
    train, count = config.train, run.mesh.devices.size
    model = config.model
    rows = train.global_batch_size // train.accumulation
    queries = (rows, model.sequence, model.heads, model.embed // model.heads)
    held = memory.predict(config, run.model, run.layout.ranks)
    told = [
        ("versions", f"jaxdist {__version__}, jax {version('jax')}, flax {version('flax')}, optax {version('optax')}"),
        ("devices", f"{count} x {device.device_kind} ({device.platform})"),
        ("mesh", f"{describe(run.mesh.shape)}; precision {config.precision}"),
        ("model", f"{models.parameters(run.model):,} parameters"),
        (
            "batch",
            f"{train.global_batch_size} rows x {config.model.sequence} = "
            f"{train.global_batch_size * config.model.sequence:,} tokens per step, "
            f"{train.accumulation} micro-batch(es), {run.steps} steps",
        ),
        ("arithmetic", f"{flops_per_token(config.model):,} FLOPs per token = {FLOPS_FORMULA}"),
        ("memory", _memory(held, capacity(device), count if device.platform == "cpu" else 1)),
        ("attention", attention_kernel(run.layout, queries, run.step.dtype)),
        ("data", run.corpus.source),
        ("run folder", f"{folder}; {resume}"),
    ]
    return [f"{name:<11} {text}" for name, text in told]


def _memory(held: memory.Memory, bytes_there: int | None, sharing: int) -> str:
    """Predicted bytes per device beside what there is; `sharing` devices have one memory."""
    there = "unknown capacity" if bytes_there is None else f"{_size(bytes_there / sharing)}"
    activations = _size(held.activations + held.working)
    return (
        f"{_size(held.total)} of {there} per device predicted: parameters {_size(held.parameters)}, optimizer "
        f"{_size(held.optimizer)}, gradients {_size(held.gradients)}, activations about {activations}"
    )


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
