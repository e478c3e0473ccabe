"""Running the train step on a mesh from the same weights and rows, and comparing two runs as docs/design.md says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdist import models
from jaxdist.config import Config, ModelConfig, ParallelConfig, PipelineConfig, RulesConfig
from jaxdist.config.lora import is_adapter
from jaxdist.config.spikes import WINDOW
from jaxdist.mesh import devices_asked, make_mesh, parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.parallel.crossing.codes import Compression
from jaxdist.parallel.crossing.compressed import Compressed
from jaxdist.parallel.pipeline.stages import stages_of
from jaxdist.parallel.placing import ZeroOptions
from jaxdist.sharding import Layout, name_of
from jaxdist.training.forward.base import ForwardOptions
from jaxdist.training.forward.decoder import DecoderForward
from jaxdist.training.forward.pipeline import PipelineForward
from jaxdist.training.forward.step import Step
from tests import program_cache
from tests.parity import loop_order

ROWS, SEQUENCE, VOCAB = 32, 16, 96
MODEL = ModelConfig(layers=3, embed=32, heads=4, vocab=VOCAB, sequence=SEQUENCE)
LLAMA = ModelConfig(
    family="llama", layers=3, embed=32, heads=8, kv_heads=2, mlp=64, rope_theta=100.0, vocab=VOCAB, sequence=SEQUENCE
)
"""Fewer key/value heads than a model axis of 4 or 8 has devices."""


@dataclass
class Outcome:
    """Three steps: losses, gradient norms, the first gradient, the weights before and after.

    Of a routed model, `counts` are the sums of the first step's routers, layer by layer (`models.decoder.Aux`). The
    rounds of the dispatch depend on the mesh. `frozen` are the parameters that are not trained, after the steps."""

    losses: list[float]
    norms: list[float]
    gradient: dict
    before: dict
    after: dict
    counts: dict[str, np.ndarray] = field(default_factory=dict)
    frozen: dict = field(default_factory=dict)
    scales: list[tuple[float, int, int]] = field(default_factory=list)
    """After each step: the scale of the loss, the good steps since it has changed, and the skipped steps."""
    spikes: list[tuple[int, int, int]] = field(default_factory=list)
    """After each step: the skipped steps, the spikes among them, and the updates that were made."""
    optimizers: list[Any] = field(default_factory=list)
    """After each step: the state of the optimizer, where it is asked for."""

    @property
    def change(self):
        return jax.tree.map(np.subtract, self.after, self.before)


def rows(
    seed: int = 0, padded: bool = True, count: int = ROWS, vocab: int = VOCAB, length: int = SEQUENCE
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and labels of a global batch; rows have unequal numbers of labels that count, those beyond ROWS none."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, vocab, (ROWS, length + 1), dtype=np.int32)
    tokens, labels = text[:, :-1], text[:, 1:].copy()
    if padded:
        labels[np.arange(length) >= rng.integers(1, length + 1, (ROWS, 1))] = -1
    further = np.full((count - ROWS, length), -1, np.int32)
    return np.concatenate([tokens, -further]), np.concatenate([labels, further])


def starts(seed: int = 0, count: int = ROWS, length: int = SEQUENCE) -> np.ndarray:
    """Of documents of about four tokens, where in its row that of each position starts."""
    return starts_of(np.random.default_rng(seed).random((count, length)) < 0.25)


def starts_of(begins: np.ndarray) -> np.ndarray:
    """The same of documents that begin where `begins` [B, S] is true, and where a row does."""
    length = begins.shape[1]
    return np.maximum.accumulate(np.where(begins, np.arange(length, dtype=np.int32), 0), axis=1)


def on_mesh(
    mesh, layout: Layout, tokens: np.ndarray, labels: np.ndarray, accumulation: int = 1, **further: np.ndarray
) -> dict:
    """A global batch, split into micro-batches, on the devices of `mesh`."""

    def put(a: np.ndarray) -> jax.Array:
        if a.ndim == 2:
            a = a[:, layout.order(np.arange(a.shape[1]), a.shape[1])]
        a = a.reshape(accumulation, -1, *a.shape[1:])
        spec = layout.spec((None, "batch", "sequence")[: a.ndim])
        return jax.device_put(a, jax.sharding.NamedSharding(mesh, spec))

    numbers = np.arange(len(tokens), dtype=np.int32)
    return {name: put(a) for name, a in dict(tokens=tokens, labels=labels, rows=numbers, **further).items()}


def train(
    mesh: str = "1x1x1",
    accumulation: int = 1,
    model: ModelConfig = MODEL,
    optimizer: optax.GradientTransformation | None = None,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    max_norm: float = 0.0,
    steps: int = 3,
    stage: int = 0,
    inside: bool = True,
    keep: bool = False,
    sequence: bool = False,
    pipeline: PipelineConfig | None = None,
    count: int = ROWS,
    apart: bool = False,
    platform: str = "cpu",
    replica_zero: bool = True,
    compression: Compression | None = None,
    context: str = "auto",
    documents: Callable[[int, int, int], np.ndarray] = starts,
    rules: RulesConfig | None = None,
    batches: Callable[[int], dict[str, np.ndarray]] | None = None,
    scales: tuple[float, ...] = (),
    usual: tuple[tuple[float, float], ...] = (),
    float8: bool = False,
    optimizers: bool = False,
) -> Outcome:
    """`accumulation` micro-batches of `count` rows; those of the `pipeline`, if the mesh has stages. Documents of a row
    are `apart`, where `documents` of a step's number, B and S says, or joined. `batches` gives other rows, by a step's
    number. What is written otherwise for a `platform` runs here too. `scales` of the loss are those that the first
    steps begin with, in place of their own. `usual` are the loss and the norm of all updates before the first steps, of
    a run that skips spikes. `optimizers` asks for the states of the optimizer."""
    shape = parse_mesh(mesh)
    devices = make_mesh(shape, jax.devices()[: devices_asked(shape)])
    pipeline = pipeline or PipelineConfig()
    parallel = ParallelConfig(zero=stage, sequence=sequence, context=context, rules=rules or RulesConfig())
    precision = "fp8" if float8 else "auto"
    config = Config(precision=precision, model=model, parallel=parallel, pipeline=pipeline)
    split = Split(config, shape)
    layout = replace(Layout.of(split, devices), platform=platform)
    optimizer = optax.chain(remember(), optimizer or optax.sgd(0.5))
    options = replace(ForwardOptions.of(config, dtype), seed=0)
    zero = replace(ZeroOptions.of(split), replica_zero=replica_zero and compression is None)
    if stages := stages_of(split):
        inner = models.build(model, replace(layout, manual=True))
        forward = PipelineForward(inner, layout, stages, pipeline.schedule, zero, options)
    else:
        forward = DecoderForward(models.build(model, layout), layout, zero, options, inside)
    # In the place of what is reported of them.
    counted = forward.model.counted
    forward.reported = lambda aux, batch: {"blocks": counted.alone(aux)} if aux else {}
    crossing = Compressed(compression, shape["replica"]) if compression else None
    step = Step(forward, optimizer, max_norm=max_norm, keep=keep, crossing=crossing, scales=bool(scales))
    step.spike = 6.0 if usual else 0.0
    initial = weights(model.model_copy(update={"remat": "none", "unroll_layers": False}))
    with jax.set_mesh(devices):
        dtypes = jax.tree.map(lambda a: param_dtype if a.dtype == jnp.float32 else a.dtype, initial)
        params = jax.tree.map(lambda a, to: jax.device_put(a.astype(to), replicated(devices)), initial, dtypes)
        start = jax.jit(lambda params: step.start(step.place(params)))(step.folded(params))
        take: Callable[..., Any] = jax.jit(step.train)
        states, losses, norms, reported = [start], [], [], []
        scaled: list[tuple[float, int, int]] = []
        spikes: list[tuple[int, int, int]] = []
        for number in range(steps):
            if batches:
                arrays = batches(number)
            else:
                arrays = {"starts": documents(number, count, model.sequence)} if apart else {}
                named = rows(number, count=count, vocab=model.vocab, length=model.sequence)
                arrays |= zip(("tokens", "labels"), named, strict=True)
            batch = on_mesh(devices, layout, accumulation=accumulation, **arrays)
            state = states[-1]
            if number < len(scales):
                scale = jax.device_put(np.float32(scales[number]), replicated(devices))
                state = state._replace(loss_scale=state.loss_scale._replace(scale=scale))
            if number < len(usual):
                rings = [jax.device_put(np.full(WINDOW, of, np.float32), replicated(devices)) for of in usual[number]]
                made = jax.device_put(np.int32(WINDOW + number), replicated(devices))
                state = state._replace(recent=state.recent._replace(losses=rings[0], norms=rings[1], made=made))
            if (stages or model.unroll_layers) and number == 0:
                with program_cache.not_kept():
                    take = take.lower(state, batch).compile()
                assert not loop_order.not_awaited(take.as_text())
            state, metrics = take(state, batch)
            states.append(state)
            losses.append(float(metrics.loss))
            norms.append(float(metrics.grad_norm))
            reported.append(metrics.further)
            if scales:
                now = state.loss_scale
                scaled.append((float(now.scale), int(now.good), int(state.skipped)))
            if usual:
                spikes.append((int(state.skipped), int(state.recent.spikes), int(state.recent.made)))
        # As a checkpoint holds all that is compared: one program.
        kept = [state.optimizer[1] for state in states[1:]] if optimizers else []
        found = start.params, states[1].optimizer[0], state.params, state.frozen, reported[0], kept
        before, gradient, after, frozen, sums, kept = jax.device_get(jax.jit(step.unfolded)(found))
        counts = counted.of(sums["blocks"]) if "blocks" in sums else {}
        return Outcome(losses, norms, gradient, before, after, counts, frozen, scaled, spikes, kept)


@cache
def weights(model: ModelConfig) -> dict:
    """The initial weights; `tests/models` proves that they are the same on every mesh. B of adapters is not zero, so
    that both halves have a gradient."""
    rng = np.random.default_rng(0)

    def stirred(path: tuple, a: np.ndarray) -> np.ndarray:
        is_b = is_adapter(name_of(path)) and path[-1].key == "b"
        return rng.normal(0, 0.1, a.shape).astype(a.dtype) if is_b else a

    return jax.tree.map_with_path(stirred, jax.device_get(jax.jit(models.build(model).init)(jax.random.key(0))))


def remember() -> optax.GradientTransformation:
    """Keeps the gradient (after clipping) as its state."""
    return optax.GradientTransformation(lambda params: optax.tree.zeros_like(params), lambda g, *_: (g, g))


def replicated(mesh) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(mesh, jax.P())


def moved(outcome: Outcome) -> float:
    """How far the weights went, as a fraction of their norm."""
    return _norm(outcome.change) / _norm(outcome.before)


def assert_equal(got: Outcome, wanted: Outcome, tolerance: float = 1e-5) -> None:
    """Norms over each leaf: |a - b| <= tolerance x max(|b|, 1e-3 |all leaves|); scalars likewise.

    A weight near 1 stores its change with the rounding of a number near 1: half a unit in the last place of the
    weight, each step, is allowed for.
    """
    np.testing.assert_allclose(got.losses, wanted.losses, rtol=tolerance)
    np.testing.assert_allclose(got.norms, wanted.norms, rtol=tolerance)
    for name in ("gradient", "change"):
        a, b = getattr(got, name), getattr(wanted, name)
        floor = 1e-3 * _norm(b)
        stored = jax.tree.leaves(wanted.after) if name == "change" else [np.zeros(1)] * len(jax.tree.leaves(b))
        for (path, wanted_leaf), leaf, weight in zip(
            jax.tree.leaves_with_path(b), jax.tree.leaves(a), stored, strict=True
        ):
            error = np.linalg.norm(leaf - wanted_leaf)
            rounding = len(wanted.losses) * np.finfo(weight.dtype).eps / 2 * np.linalg.norm(weight)
            bound = tolerance * max(np.linalg.norm(wanted_leaf), floor) + rounding
            assert error <= bound, f"{name} of {jax.tree_util.keystr(path)}: {error:.3g} is over {bound:.3g}"


def _norm(tree) -> float:
    return float(np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(tree))))
