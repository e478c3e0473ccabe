"""Call, on a mesh, what was written for one device: a module's loss, an optimizer's update.

`all_rows` calls the module with all rows of a micro-batch, as one device would. Here `call_on_own_rows` lets every
device call it with its own rows, as torch's DDP does (Li et al. 2020, section 3), and gradients stay partial sums until
they are reduced once. That is right where the loss is a mean over rows and nothing looks across them, except through
collectives over the axes of the batch by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import P
from jax.sharding import auto_axes
from jaxtyping import Array, Int

from jaxdist.parallel.arranged import Arranged
from jaxdist.parallel.dataflow import Dataflow
from jaxdist.parallel.placement import Placements
from jaxdist.parallel.placing import is_axes
from jaxdist.sharding import BATCH, Layout, Params, Tree, Weighted, name_of, named, scale_partial

Mean = jax.Array | Weighted
"""A mean over rows, or a sum that is to be divided by the sum of weights over all rows of a step."""

Outcome = tuple[Mean, Params, dict[str, Mean], Tree]
"""(loss, variables, further means, arrays with rows)."""

Call = Callable[[Params, Params, Tree], Outcome]
"""(weights, variables, batch) -> outcome."""

Agreement = Literal["key", "count", "mean", "same"]
"""How devices that have seen different rows agree on a variable. Each folds its rank into a random key, and all go on
from the key of the first. Of the counts of random numbers they take the largest; statistics they average. Anything else
has to be the same on all devices, and equal to what one device would make of all rows."""


def init(
    make: Callable[[jax.Array], tuple[Params, Params]], places: Placements, variables: Tree, key: jax.Array
) -> tuple[Params, Params]:
    """Return (parameters at rest, variables laid out by specs); each device makes its own shards."""
    held = jax.tree.map(lambda p: p.held, places)
    return auto_axes(make, out_sharding=(held, variables))(key)


def specs_of(layout: Layout, axes: Tree) -> Tree:
    """Return how arrays with these logical axes lie on the mesh."""
    return jax.tree.map(layout.spec, axes, is_leaf=is_axes)


def outcome_specs(layout: Layout, variables: Tree) -> tuple[P, Tree, P, P]:
    """Return how an `Outcome` whose variables have these specs lies on the mesh; means are on every device."""
    return P(), variables, P(), layout.spec((BATCH,))


def rows_of_all(layout: Layout, a: jax.Array) -> jax.Array:
    """Return an array [k, B/k, ...] as [B, ...], split by rows: those of micro-batches in the order of the batch."""
    join = auto_axes(lambda a: a.reshape(-1, *a.shape[2:]), out_sharding=layout.spec((BATCH,)))
    return join(a)


def call_on_own_rows(
    layout: Layout,
    places: Placements,
    agreements: Params,
    call: Call,
    weights: Params,
    variables: Params,
    batch: Arranged,
) -> Outcome:
    """Call the module on every device with the device's own rows, and with all of what has no rows.

    `agreements` holds an `Agreement` for each variable. Raises `ValueError` for a variable that has to be the same on
    all devices and depends on their rows.
    """
    axes = layout.split("batch")
    if not axes:
        return call(weights, variables, batch)
    use = jax.tree.map(lambda p: p.use, places)
    sums = jax.tree.map(lambda p: p.partial, places)
    # Loss and gradient come out of one manual region that does not check which value varies over which axis: a module
    # written for one device, with a loop that begins from zeros, has no use for such types.
    region = jax.shard_map(
        partial(_local, call, axes, layout.ranks, agreements),
        in_specs=(use, P(), Arranged(P(axes), P())),
        out_specs=((P(), P(), P(), P(axes)), sums),
        check_vma=False,
    )

    @jax.custom_vjp
    def value(weights: Params) -> Outcome:
        return region(weights, variables, batch)[0]

    def forward(weights: Params) -> tuple[Outcome, Params]:
        return region(weights, variables, batch)

    def backward(sums: Params, cotangents: tuple[Mean, Tree, Tree, Tree]) -> tuple[Params]:
        # No gradient goes through weights.
        factor = _differentiated(cotangents[0])
        return (jax.tree.map(lambda g: scale_partial(g, factor), sums),)

    value.defvjp(forward, backward)
    return value(weights)


def _local(
    call: Call,
    axes: tuple[str, ...],
    ranks: int,
    agreements: Params,
    weights: Params,
    variables: Params,
    batch: Arranged,
) -> tuple[Outcome, Params]:
    """Return (the outcome, this device's part of the gradient), from its own rows.

    The gradient is that of the mean, or of the sum where the loss is `Weighted`.
    """
    rank = jax.lax.axis_index(axes)
    own = jax.tree.map(partial(_own_key, rank), variables)

    def loss_of(weights: Params) -> tuple[jax.Array, Outcome]:
        outcome = call(weights, own, batch)
        return _differentiated(outcome[0]), outcome

    (_, (loss, after, further, aux)), grads = jax.value_and_grad(loss_of, has_aux=True)(weights)
    _check_same(call, ranks, agreements, after, weights, own, batch)
    after = jax.tree.map(partial(_agree, axes, rank), agreements, variables, own, after)
    if not isinstance(loss, Weighted):
        # A mean over the device's rows: dividing by the ranks makes the sum of all parts the global mean.
        grads = jax.tree.map(lambda g: g / ranks, grads)
    over_devices = partial(_over_devices, axes)
    loss, further = jax.tree.map(over_devices, (loss, further), is_leaf=lambda a: isinstance(a, Weighted))
    return (loss, after, further, aux), grads


def _differentiated(loss: Mean) -> jax.Array:
    """Return the number of a loss that gradients are taken of."""
    return loss.total if isinstance(loss, Weighted) else loss


def _over_devices(axes: tuple[str, ...], value: Mean) -> Mean:
    """Return the mean over the devices, or both sums."""
    if isinstance(value, Weighted):
        return jax.lax.psum(value, axes)
    return jax.lax.pmean(value, axes)


def _own_key(rank: Int[Array, ""], variable: jax.Array) -> jax.Array:
    """Fold the rank into random keys, so that every device draws its own numbers; return other variables unchanged."""
    if not _is_key(variable):
        return variable
    return jax.vmap(lambda key: jax.random.fold_in(key, rank))(variable.ravel()).reshape(variable.shape)


def _agree(
    axes: tuple[str, ...],
    rank: Int[Array, ""],
    agreement: Agreement,
    before: jax.Array,
    own: jax.Array,
    after: jax.Array,
) -> jax.Array:
    """Return the value of a variable that all devices go on with; this one began the call with `own`."""
    if after is own:
        return before
    if agreement == "mean":
        return jax.lax.pmean(after, axes)
    if agreement == "count":
        return jax.lax.pmax(after, axes)
    if agreement == "key":
        return _key_of_first(axes, rank, before, own, after)
    return after


def _key_of_first(
    axes: tuple[str, ...], rank: Int[Array, ""], before: jax.Array, own: jax.Array, after: jax.Array
) -> jax.Array:
    """Return the key `before` where the first device has kept its own; else the new key of the first device."""
    old, began, now = map(jax.random.key_data, (before, own, after))
    kept = jnp.all(now == began, axis=-1, keepdims=True)
    of_first = jnp.where(rank == 0, jnp.where(kept, old, now), 0)
    return jax.random.wrap_key_data(jax.lax.psum(of_first, axes), impl=jax.random.key_impl(before))


def _check_same(
    call: Call, ranks: int, agreements: Params, after: Params, weights: Params, own: Params, batch: Arranged
) -> None:
    """Raise `ValueError` for a variable that has to be the same on all devices and depends on their rows.

    It depends on them if the program that computes it reads the rows, or a key that each device has made its own, or is
    another program for the rows of all devices, such as one that counts `x.shape[0]`.
    """
    began = jax.tree.leaves(own)
    now = jax.tree.leaves(after)
    to_be_same = [i for i, agreement in enumerate(jax.tree.leaves(agreements)) if agreement == "same"]
    if all(now[i] is began[i] for i in to_be_same):
        return

    def variables_after(weights: Params, variables: Params, batch: Tree) -> Params:
        return call(weights, variables, batch)[1]

    def of_all_devices(a: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((ranks * a.shape[0], *a.shape[1:]), a.dtype)

    rows_of_all = batch._replace(rows=jax.tree.map(of_all_devices, batch.rows))
    # A program that counts rows has another text for more rows, though it reads none of them.
    here = Dataflow(variables_after, weights, own, batch)
    of_all = Dataflow(variables_after, weights, own, rows_of_all)
    # Inputs are numbered: first the weights, then the variables, then the batch.
    first = len(jax.tree.leaves(weights))
    keys = {first + i for i, variable in enumerate(began) if _is_key(variable)}
    rows = {first + len(began) + i for i in range(len(jax.tree.leaves(batch.rows)))}
    names = list(named(own))
    for i in to_be_same:
        if here.keeps(i, first + i):
            continue
        program = here.program(i)
        if program.inputs & (keys | rows) or not program.equals(of_all.program(i)):
            raise ValueError(
                f"calling the module computes {names[i]} from the rows, but under scope 'rows' or 'device' each device "
                f"sees only its own: use scope 'batch', or, for a mean over the rows, an nnx.BatchStat of floats, "
                f"which is averaged over the devices"
            )


def _is_key(a: jax.Array) -> bool:
    return jnp.issubdtype(a.dtype, jax.dtypes.prng_key)


def on_shards(
    optimizer: optax.GradientTransformation, places: Placements, abstract: Params
) -> optax.GradientTransformationExtraArgs:
    """Wrap an update rule that knows nothing of the mesh; its state for a parameter lies as the parameter does.

    Gradients reach the rule in the dtype of their parameters, as on one device. Raises `ValueError` for an `optimizer`
    that is no update rule, and for one that changes the shape or dtype of updates or state.
    """
    _check_update(check_optimizer(optimizer), abstract)
    held = jax.tree.map(lambda p: p.held, places)
    specs = _specs_of_state(optimizer, abstract, held)
    rule = optax.with_extra_args_support(optimizer)

    def update(updates: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        arrays = {name: value for name, value in extra.items() if not callable(value)}
        functions = {name: value for name, value in extra.items() if callable(value)}

        def call(grads: Params, state: Tree, params: Params | None, arrays: dict[str, Any]) -> tuple[Tree, Tree]:
            return rule.update(grads, state, params, **arrays, **functions)

        grads = jax.tree.map(lambda g, a: g.astype(a.dtype), updates, abstract)
        return auto_axes(call, out_sharding=(held, specs))(grads, state, params, arrays)

    return optax.GradientTransformationExtraArgs(auto_axes(optimizer.init, out_sharding=specs), update)


def arguments_of(optimizer: optax.GradientTransformation, abstract: Params) -> tuple[str, ...]:
    """Return the further arguments without which the update of an optimizer cannot be called, of those that optax has.

    Raises `ValueError` for one that cannot be called with them either.
    """
    state = jax.eval_shape(optimizer.init, abstract)
    first: TypeError | None = None
    for names in ((), ("value",), ("value", "grad", "value_fn")):
        try:
            jax.eval_shape(partial(_try_update, optimizer, names), abstract, state, abstract)
        except TypeError as error:
            first = first or error
        else:
            return names
    raise ValueError(f"the optimizer cannot be called as update(gradients, state, params): {first}") from first


def _try_update(
    optimizer: optax.GradientTransformation, names: tuple[str, ...], grads: Params, state: Tree, params: Params
) -> Any:
    """Call an update with further arguments of these names, for the shapes of its results."""

    def value(params: Params) -> jax.Array:
        return jnp.asarray(optax.tree.sum(params), jnp.float32)

    extra = {"value": jnp.zeros(()), "grad": grads, "value_fn": value}
    # Not a rule that optax has wrapped: it would let any further argument pass.
    return optimizer.update(grads, state, params, **{name: extra[name] for name in names})


def _specs_of_state(optimizer: optax.GradientTransformation, abstract: Params, held: Params) -> Tree:
    """Return the specs of the state, where what is kept of a parameter lies as `held` says of the parameter.

    An array is kept of the parameter in whose place in a tree it is; optax's own way, placeholders in the place of
    parameters, does not work for all rules.
    """
    places = [path for path, _ in jax.tree.leaves_with_path(abstract)]
    parameters = list(zip(places, jax.tree.leaves(abstract), jax.tree.leaves(held), strict=True))
    # A name may end another one: the longest is meant.
    parameters.sort(key=lambda parameter: len(parameter[0]), reverse=True)

    def spec_of(path: tuple[Any, ...], kept: Any) -> P:
        for place, parameter, spec in parameters:
            if path[-len(place) :] != place:
                continue
            # A history of several steps has a dim before those of the parameter.
            further = kept.ndim - parameter.ndim
            if further >= 0 and kept.shape[further:] == parameter.shape:
                return P(*(None,) * further, *spec.partitions)
            return P()
        return P()

    return jax.tree.map_with_path(spec_of, jax.eval_shape(optimizer.init, abstract))


def check_optimizer(optimizer: Any) -> optax.GradientTransformation:
    """Return `optimizer`; raise `ValueError` if it is no update rule."""
    if isinstance(optimizer, nnx.Optimizer):
        raise ValueError(
            "optimizer is an nnx.Optimizer, which keeps the state of one device; give the optax.GradientTransformation "
            "that it was made of, optimizer.tx, and its wrt to parallelize as a function of a parameter's path"
        )
    if isinstance(optimizer, type) or not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise ValueError(
            f"optimizer is {optimizer!r}; give an optax.GradientTransformation such as optax.adamw(1e-3), not an "
            f"nnx.Optimizer"
        )
    return optimizer


def _check_update(optimizer: optax.GradientTransformation, abstract: Params) -> None:
    """Try the update on shapes alone, and raise `ValueError` for what does not work."""
    state = jax.eval_shape(optimizer.init, abstract)
    names = arguments_of(optimizer, abstract)
    returned = jax.eval_shape(partial(_try_update, optimizer, names), abstract, state, abstract)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ValueError(
            f"the optimizer's update returned {type(returned).__name__}; return a pair (updates, state), as optax does"
        )
    _check_unchanged("updates", abstract, returned[0])
    _check_unchanged("state", state, returned[1])


def _check_unchanged(what: str, before: Tree, after: Tree) -> None:
    """Raise `ValueError` unless `after` has the structure, shapes and dtypes of `before`."""
    # As objects, because JAX's annotations do not say what a structure is.
    structure_before: object = jax.tree.structure(before)
    structure_after: object = jax.tree.structure(after)
    if structure_before != structure_after:
        raise ValueError(
            f"the optimizer's update returned {what} of another structure, {_structure_text(after)} in place of "
            f"{_structure_text(before)}; return what it got, changed in values only"
        )
    for (path, a), b in zip(jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(
                f"the optimizer's update makes {what} {name_of(path)} {b.dtype}{list(b.shape)} of what was "
                f"{a.dtype}{list(a.shape)}; keep shape and dtype"
            )


def _structure_text(tree: Tree) -> str:
    text = str(jax.tree.structure(tree)).removeprefix("PyTreeDef(").removesuffix(")")
    if len(text) < 100:
        return text
    return text[:100] + " ..."
