"""A decoder of small layers, x + tanh(norm(x) up + bias) down + shift, that compiles in seconds: piped, and alone."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models import Stack
from jaxdist.models.dropout import dropout
from jaxdist.models.loss import cross_entropy
from jaxdist.parallel.pipeline.stages import Stages
from jaxdist.parallel.placing import ZeroOptions
from jaxdist.parallel.tensor import einsum, enter, lookup
from jaxdist.sharding import ONE_DEVICE, RULES, Layout, spread
from jaxdist.training.forward.base import ForwardOptions
from jaxdist.training.forward.decoder import DecoderForward
from jaxdist.training.forward.pipeline import PipelineForward

ROWS, SEQUENCE, VOCAB, EMBED, MLP = 4, 8, 24, 8, 16


AXES = dict(
    table=("vocab", "embed"),
    blocks=dict(
        scale=("layers", "norm"),
        up=("layers", "embed", "mlp"),
        bias=("layers", "mlp"),
        down=("layers", "mlp", "embed"),
        shift=("layers", "norm"),
    ),
)
"""Logical axes of the parameters."""

ACTIVATIONS = (jnp.tanh, jax.nn.silu, jnp.sin)
"""Those of the kinds of layers in a period: each keeps something else for its backward pass."""


class Toy:
    """What a `PipelineForward` or `DecoderForward` asks of a model."""

    vocab = VOCAB

    def __init__(self, layout: Layout, layers: int, rate: float = 0.0, period: int = 1):
        self.layout, self.rate, self.axes, self.period = layout, rate, AXES, period
        self.stacks = [Stack("", 0, range(period), {})]
        blocks = dict(scale=(EMBED,), up=(EMBED, MLP), bias=(MLP,), down=(MLP, EMBED), shift=(EMBED,))
        shapes = dict(table=(VOCAB, EMBED), blocks={name: (layers, *shape) for name, shape in blocks.items()})
        is_shape = lambda a: isinstance(a, tuple)
        self.abstract = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=is_shape)

    def cast(self, params, dtype, products=True):
        return jax.tree.map(lambda w: w.astype(dtype), params)

    def embed(self, params, tokens, inputs):
        return dropout(self.layout, lookup(self.layout, params["table"], tokens), self.rate, inputs.keys, site=0)

    def block(self, w, x, inputs, kind=0):
        y = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5)
        y = enter(self.layout, y * spread(w["scale"], y), "mlp")
        h = einsum(self.layout, "BSD,DF->BSF", y, w["up"])
        h = ACTIVATIONS[kind](h + spread(w["bias"], h))
        y = einsum(self.layout, "BSF,FD->BsD", h, w["down"])
        return x + dropout(self.layout, y + spread(w["shift"], y), self.rate, inputs.keys, site=1), {}

    def loss(self, params, x, labels):
        return cross_entropy(self.layout, x, params["table"], labels)


def batch(micro: int, rows: int = ROWS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = micro, rows, SEQUENCE
    tokens, labels = rng.integers(0, VOCAB, shape, np.int32), rng.integers(-1, VOCAB, shape, np.int32)
    return dict(tokens=tokens, labels=labels, rows=np.arange(micro * rows, dtype=np.int32).reshape(shape[:2]))


def weights(layers: int) -> dict:
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda a: rng.normal(0, 0.3, a.shape).astype(a.dtype), Toy(ONE_DEVICE, layers).abstract)


@cache
def alone(layers: int, micro: int, rate: float = 0.0, period: int = 1):
    """(summed loss, its gradients) of one device."""
    forward = DecoderForward(
        Toy(ONE_DEVICE, layers, rate, period), ONE_DEVICE, options=ForwardOptions(dropout=rate > 0)
    )
    gradients = jax.jit(lambda w, b: forward.gradients(w, {}, b, jnp.asarray(0))[:2])
    with jax.set_mesh(make_mesh(parse_mesh("1x1x1"), jax.devices()[:1])):
        return jax.device_get(gradients(weights(layers), batch(micro)))


class Piped:
    """The toy on a mesh: `PipelineForward`, and how to call it."""

    def __init__(
        self,
        mesh,
        schedule,
        micro=4,
        v=1,
        zero=0,
        sequence=False,
        remat="none",
        layers=4,
        rate=0.0,
        rows=ROWS,
        period=1,
    ):
        shape = parse_mesh(mesh)
        self.mesh = make_mesh(shape, jax.devices()[: int(np.prod(list(shape.values())))])
        self.layout = Layout.on(self.mesh, RULES | {"residual": ("model",) if sequence else ()})
        stages = Stages.cut(layers, shape["pipeline"], v, period)
        toy = Toy(replace(self.layout, manual=True), layers, rate, period)
        options = ForwardOptions(remat=remat, dropout=rate > 0)
        zero = ZeroOptions(zero, defers=schedule != "pipedream")
        self.forward = PipelineForward(toy, self.layout, stages, schedule, zero, options)
        self.stages, self.layers, self.micro, self.rate, self.rows = stages, layers, micro, rate, rows
        self.period = period

    def call(self, transform):
        """`transform` of the function that gives loss and gradients, of weights and batch."""
        gradients = lambda w, b: self.forward.gradients(w, {}, b, jnp.asarray(0))[:2]
        rest = jax.tree.map(lambda p: p.rest, self.forward.places)
        with jax.set_mesh(self.mesh):
            folded = jax.tree.map(np.asarray, self.forward.stages.fold(weights(self.layers)))
            parts = self.put(batch(self.micro, self.rows))
            return transform(gradients, jax.tree.map(self.place, rest, folded), parts)

    def place(self, spec, a):
        return jax.device_put(a, jax.NamedSharding(self.mesh, spec))

    def put(self, parts):
        return jax.tree.map(partial(self.place, self.layout.spec([None, "batch"])), parts)

    def program(self) -> core.Jaxpr:
        """What is traced for one device."""
        traced = self.call(lambda f, *arguments: jax.make_jaxpr(f)(*arguments))
        (region,) = (e for e in traced.jaxpr.eqns if e.primitive.name == "shard_map")
        return region.params["jaxpr"]

    def compiled(self):
        return self.call(lambda f, *arguments: jax.jit(f).lower(*arguments).compile())

    def error(self, compiled=None) -> float:
        """The largest of loss and gradients against one device, of a leaf's norm, but at least 1e-3 of them all."""
        found = self.call(lambda f, *arguments: (compiled or jax.jit(f))(*arguments))
        loss, grads = jax.tree.map(np.asarray, jax.device_get(found))
        padded = grads["blocks"]
        grads = grads | {"blocks": jax.tree.map(lambda a: np.asarray(self.stages._unfold(a)), padded)}
        assert all((a[~self.stages.valid] == 0).all() for a in jax.tree.leaves(padded)), "padding has a gradient"
        wanted_loss, wanted = alone(self.layers, self.micro, self.rate, self.period)
        norm = lambda tree: float(np.sqrt(sum(np.sum(np.square(a, dtype=float)) for a in jax.tree.leaves(tree))))
        floor = 1e-3 * norm(wanted)
        off = jax.tree.map(lambda a, b: norm(a - b) / max(norm(b), floor), grads, wanted)
        return float(np.max([abs(loss - wanted_loss) / wanted_loss, *jax.tree.leaves(off)]))  # NaN, if one is


def count(program: core.Jaxpr, *names: str) -> int:
    """How many equations of these names a program has, in loops and branches too."""
    return sum(
        (equation.primitive.name in names)
        + sum(count(inner, *names) for inner in core.jaxprs_in_params(equation.params))
        for equation in program.eqns
    )


def loops(program: core.Jaxpr) -> list[tuple[int, core.Jaxpr]]:
    """(length, body) of the loops over ticks, in order."""
    scans = [e for e in program.eqns if e.primitive.name == "scan"]
    return [(e.params["length"], e.params["jaxpr"].jaxpr) for e in scans]
