"""A mixture of experts (MoE) in the place of an MLP: a router chooses k of E experts for each token.

Nothing that a result depends on is counted per device, or per micro-batch: the choice is each token's own, the
load-balancing loss each row's own (DeepSeek-V3, 2024, eq. 17-20), the z-loss each token's (ST-MoE, Zoph et al. 2022,
eq. 5), and the load that moves the balance is a number of tokens of the whole batch (DeepSeek-V3, section 2.1.2).

Losses leave a layer by a side door: they are attached to the residual stream (`attach`). The load, and numbers to
report, are outputs of the layer beside it (aux).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxdist.config import ModelConfig
from jaxdist.config.matmuls import matmuls_of
from jaxdist.models.activations import Gating, gating_of
from jaxdist.models.decoder import Aux
from jaxdist.models.inputs import NO_INPUTS, BlockInputs
from jaxdist.models.parameters import bias_of, constant, weight_of
from jaxdist.parallel import region
from jaxdist.parallel.experts import ROUTING, Dispatch, ExpertWeights, rounds_for
from jaxdist.parallel.tensor import einsum, enter, leave
from jaxdist.sharding import RESIDUAL, STEERED, Layout, Params, spread

METERS = ("balance_loss", "z_loss", "dispatch_rounds")
"""What a layer reports, in the order of its `meter`: each summed over tokens."""

BEST_OF_GROUP = {"none": 0, "best": 1, "best-two": 2}
"""How many of the best scores in a group of experts make the score of the group, by `model.router_group_score`."""


@dataclass(frozen=True)
class Router:
    """How a token's experts are chosen and weighted."""

    experts: int
    """E"""
    per_token: int
    """k"""
    sigmoid: bool
    """Whether the score of an expert is a sigmoid of its own; otherwise a softmax over all experts."""
    renormalize: bool
    scale: float
    balance_loss: float
    z_loss: float
    balance_rate: float = 0.0
    groups: int = 1
    groups_kept: int = 1
    best_of_group: int = 0
    """How many of the best scores in a group are added up to its own; 0: groups have no effect."""

    @classmethod
    def of(cls, config: ModelConfig) -> Router:
        """Return the router that `config` asks for."""
        return cls(
            experts=config.experts,
            per_token=config.experts_per_token,
            sigmoid=config.router == "sigmoid",
            renormalize=config.router_renormalize,
            scale=config.router_scale,
            balance_loss=config.balance_loss,
            z_loss=config.z_loss,
            balance_rate=config.balance_rate,
            groups=config.router_groups,
            groups_kept=config.router_groups_kept,
            best_of_group=BEST_OF_GROUP[config.router_group_score],
        )


class Routes(NamedTuple):
    """What the router says of tokens, and of the rows that they are in."""

    p: Float[Array, "b s k"]
    """The weights of the chosen experts."""
    choice: Int[Array, "b s k"]
    load: Float[Array, " E"]
    """How many of the tokens chose each expert."""
    balance_loss: Float[Array, ""]
    """The sum over rows of S sum_e f_e P_e: a row with an even load has S."""
    z_loss: Float[Array, ""]
    """The sum over tokens of the square of log sum_e exp(logit_e)."""


class Experts(nnx.Module):
    """E gated MLPs of which each token goes through k, and one that all go through if `shared_experts` asks for it."""

    def __init__(self, config: ModelConfig, layout: Layout, rngs: nnx.Rngs):
        matmuls = matmuls_of(config)
        shared = config.shared_experts > 0
        self.layout = layout
        self.router_rule = Router.of(config)
        self.gating = gating_of(config)
        self.capacity_factor = config.capacity_factor
        self.router = weight_of(rngs, matmuls["mlp.router"])
        self.router_bias = bias_of(matmuls["mlp.router"])
        self.balance = constant(0.0, (config.experts,), (STEERED,), exact=True)
        self.gate_up = weight_of(rngs, matmuls["mlp.gate_up"])
        self.gate_up_bias = bias_of(matmuls["mlp.gate_up"])
        self.down = weight_of(rngs, matmuls["mlp.down"])
        self.down_bias = bias_of(matmuls["mlp.down"])
        self.shared_gate_up = weight_of(rngs, matmuls["mlp.shared_gate_up"]) if shared else None
        self.shared_down = weight_of(rngs, matmuls["mlp.shared_down"]) if shared else None
        self.shared_gate = weight_of(rngs, matmuls["mlp.shared_gate"]) if config.gates_shared else None

    @property
    def aux_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what `__call__` returns beside its result."""
        return {"load": (self.router_rule.experts,), "meter": (len(METERS),)}

    def steered(self, aux: Aux) -> Params:
        """Return the balance after a step with this load of the whole batch: it moves against the load.

        This is DeepSeek-V3's b_e <- b_e - u sign(load_e - mean load) (2024, section 2.1.2). All arrays may be stacked.
        """
        load = aux["load"]
        step = -self.router_rule.balance_rate * direction(load).astype(load.dtype)
        balance = self.balance[...]
        return {"balance": (balance + step).astype(balance.dtype)}

    def __call__(self, x: Float[Array, "B s D"], inputs: BlockInputs = NO_INPUTS) -> tuple[Float[Array, "B s D"], Aux]:
        """Return (the weighted sum of the results of each token's experts, sums over tokens); there is no dropout.

        The sums are the load of each expert, and METERS; of each device they are its own, until they are reduced.
        """
        weights = nnx.to_pure_dict(nnx.state(self, nnx.Param))
        if self.layout.manual:
            return self._on_device(x, weights)
        specs = {name: jax.typeof(w).sharding.spec for name, w in weights.items()}
        stream = self.layout.activation("BsD")

        axes = self.layout.partial(("norm",))
        partial_sums = self.layout.spec([None], unreduced=axes)

        def on_device(x: jax.Array, weights: Params) -> tuple[jax.Array, Aux]:
            weights = {name: region.vary(w, specs[name].reduced) for name, w in weights.items()}
            y, aux = self._on_device(x, weights)
            return y, {name: region.partial_sum(a, axes) for name, a in aux.items()}

        # A region of its own, of what runs in a pipeline's.
        out = stream, dict.fromkeys(self.aux_shapes, partial_sums)
        return jax.shard_map(on_device, in_specs=(stream, specs), out_specs=out)(x, weights)

    def _on_device(self, x: Float[Array, "b s D"], weights: Params) -> tuple[Float[Array, "b s D"], Aux]:
        """Do the work of `__call__` on one device's part of the residual stream and of the weights, by their names."""
        layout = replace(self.layout, manual=True)
        rule = self.router_rule
        stream = layout.split(RESIDUAL)
        # The router reads what this device holds of the stream. Behind `enter`, its gradient would count once for each
        # device that splits the experts' width.
        routes = route(rule, stream, x, weights["router"], weights["balance"], weights.get("router_bias"))
        # One by one: where the sequence is split, a device has all of the former loss, and its own part of the latter.
        x = attach(x, rule.balance_loss * routes.balance_loss)
        x = attach(x, rule.z_loss * routes.z_loss)
        # Read where the router reads, for the same reason.
        gates = [weights["shared_gate"]] if self.shared_gate is not None else []
        opened = [jax.nn.sigmoid(jnp.einsum("bsd,di->bsi", x, gate)) for gate in gates]
        own_tokens = x.shape[0] * x.shape[1]
        own = region.varying(x)

        x = enter(layout, x, "mlp")
        p = enter(layout, routes.p.astype(x.dtype), "mlp")
        choice = routes.choice
        if layout.sequence_parallel:
            choice = lax.all_gather(choice, layout.sequence_parallel, axis=1, tiled=True)
        b, s, d = x.shape
        k = rule.per_token
        rounds = rounds_for(b * s, k, rule.experts, self.capacity_factor)
        dispatch = Dispatch(layout, rounds, self.gating, alone=not self.layout.manual)
        of_experts = ExpertWeights(weights["gate_up"], weights["down"], weights.get("gate_up_bias"))
        y, taken = dispatch(x.reshape(-1, d), p.reshape(-1, k), choice.reshape(-1, k), of_experts)
        y = y.reshape(b, s, d)
        if self.shared_down is not None:
            own_gates = [enter(layout, g, "mlp") for g in opened]
            y = y + _shared_expert(
                layout, self.gating, x, weights["shared_gate_up"], weights["shared_down"], *own_gates
            )
        y = leave(layout, y, layout.split("mlp"))
        if self.down_bias is not None:
            # On the residual stream, where it is added once, and not by each device that splits the experts' width.
            y = y + _biases_of_chosen(routes, weights["down_bias"])

        # A row's loss is whole on each device that holds a part of the row.
        own_loss = routes.balance_loss / layout.size(*stream)
        meter = jnp.stack([own_loss, routes.z_loss, own_tokens * taken.astype(own_loss.dtype)])
        aux = {"load": routes.load, "meter": meter}
        return y, {name: region.vary(lax.stop_gradient(a), own) for name, a in aux.items()}


@partial(
    jax.checkpoint,
    prevent_cse=False,
    policy=jax.checkpoint_policies.save_only_these_names(ROUTING),
    static_argnums=(0, 1),
)
def route(
    rule: Router,
    stream: tuple[str, ...],
    x: Float[Array, "b s D"],
    router: Float[Array, "D E"],
    balance: Float[Array, " E"],
    bias: Float[Array, " E"] | None = None,
) -> Routes:
    """Choose the experts of each token, in f32 at least; `stream` are the axes that split the sequence of `x`."""
    dtype = router.dtype
    logits = jnp.einsum("bsd,de->bse", x.astype(dtype), router, precision=lax.Precision.HIGHEST)
    if bias is not None:
        logits = logits + spread(bias, logits)
    scores = jax.nn.sigmoid(logits) if rule.sigmoid else jax.nn.softmax(logits)
    # The balance steers the choice and nothing else. Of equal scores, the expert with the lowest number is chosen.
    steered = lax.stop_gradient(scores + balance[None, None])
    _, choice = lax.top_k(within_best_groups(rule, steered), rule.per_token)
    # Never chosen again in the backward pass: fused otherwise, a near tie might fall to another expert there.
    choice = checkpoint_name(choice, ROUTING)
    chosen = choice[..., None] == jnp.arange(rule.experts)[None, None, None]
    p = jnp.sum(jnp.where(chosen, scores[:, :, None], 0), -1)
    if rule.renormalize:
        p = p / jnp.sum(p, -1, keepdims=True)

    load = jnp.sum(chosen, 2, dtype=dtype)
    shares = scores / jnp.sum(scores, -1, keepdims=True)
    # Sums over a whole row; its sequence may be split.
    length = region.add_up(region.vary(jnp.full((), x.shape[1], dtype), stream), stream)
    row_load, row_shares = (region.add_up(jnp.sum(a, 1), stream) for a in (load, shares))
    # Kept, so that the backward pass adds nothing up again.
    row_load = checkpoint_name(row_load, ROUTING)
    f = row_load * (rule.experts / rule.per_token) / length
    balance_loss = jnp.sum(f * row_shares)
    z_loss = jnp.sum(jnp.square(jax.nn.logsumexp(logits, -1)))
    return Routes(rule.scale * p, choice, jnp.sum(load, (0, 1)), balance_loss, z_loss)


def within_best_groups(rule: Router, scores: Float[Array, "b s E"]) -> Float[Array, "b s E"]:
    """Return the scores of the experts in each token's best groups, and minus infinity for all others.

    This is node-limited routing (DeepSeek-V3, 2024, section 2.1.2). Of equal groups, those with the lowest numbers are
    the best.
    """
    if not rule.best_of_group:
        return scores
    by_group = scores.reshape(*scores.shape[:2], rule.groups, -1)
    best, _ = lax.top_k(by_group, rule.best_of_group)
    _, kept = lax.top_k(jnp.sum(best, -1), rule.groups_kept)
    is_kept = jnp.any(kept[..., None] == jnp.arange(rule.groups)[None, None, None], 2)
    return jnp.where(is_kept[..., None], by_group, -jnp.inf).reshape(scores.shape)


@partial(jax.checkpoint, prevent_cse=False)
def _biases_of_chosen(routes: Routes, bias: Float[Array, "E D"]) -> Float[Array, "b s D"]:
    """Return the weighted sum of the biases of each token's experts."""
    chosen = routes.choice[..., None] == jnp.arange(len(bias))[None, None, None]
    p = jnp.sum(jnp.where(chosen, routes.p[..., None], 0), 2)
    return jnp.einsum("bse,ed->bsd", p.astype(bias.dtype), bias, preferred_element_type=p.dtype).astype(bias.dtype)


def _shared_expert(
    layout: Layout,
    gating: Gating,
    x: Float[Array, "b s D"],
    gate_up: Float[Array, "D 2 F"],
    down: Float[Array, "F D"],
    *opened: Float[Array, "b s 1"],
) -> Float[Array, "b s D"]:
    """Return the result of the MLP that every token goes through: a partial sum over the axes that split F.

    A gate that is `opened` so far multiplies it.
    """
    h = einsum(layout, "BSD,DCF->BSCF", x, gate_up)
    return _gate_and_contract(layout, gating, h, down, *opened)


@partial(jax.checkpoint, prevent_cse=False, static_argnums=(0, 1))
def _gate_and_contract(layout: Layout, gating: Gating, h: jax.Array, down: jax.Array, *opened: jax.Array) -> jax.Array:
    hidden = gating(h[:, :, 0], h[:, :, 1])
    # Before the product, whose result the backward pass then does not need.
    for factor in opened:
        hidden = hidden * factor
    return einsum(layout, "BSF,FD->BSD", hidden, down)


def direction(load: Float[Array, "... E"]) -> Int[Array, "... E"]:
    """Return 1 for an expert whose load is above the mean, -1 for one below it, and 0 for one that has just the mean.

    Loads are whole tokens, up to 2^31 of all experts together. As floats, a sum or a mean would be rounded, and an
    expert at the mean would move one way on one mesh, and the other way on another.
    """
    tokens = load.astype(jnp.int32)
    mean, rest = jnp.divmod(jnp.sum(tokens, -1, keepdims=True), load.shape[-1])
    at_mean = (tokens == mean) & (rest == 0)
    return jnp.where(at_mean, 0, jnp.where(tokens > mean, 1, -1))


@jax.custom_vjp
def attach(x: Float[Array, "..."], loss: Float[Array, ""]) -> Float[Array, "..."]:
    """Return `x`; the gradient of `loss` is 1, as if it had been added to the sum that is differentiated."""
    return x


def _attach_forward(x: jax.Array, loss: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, loss


def _attach_backward(loss: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    return g, region.vary(jnp.ones((), loss.dtype), region.varying(loss))


attach.defvjp(_attach_forward, _attach_backward)
