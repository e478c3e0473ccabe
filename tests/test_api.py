"""`jaxdist.parallelize`: every mistake is told in a sentence before anything compiles; what its functions promise."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist.mesh import describe
from tests.parity.modules import MLP, Convolution, cross_entropy, images, vectors
from tests.tiers import thinned


class Named(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Param(0.1 * rngs.params.normal((12, 16)), axes=("embed", "mlp"))
        self.down = nnx.Param(0.1 * rngs.params.normal((16, 8)), axes=("mlp", None))

    def __call__(self, x):
        return jnp.tanh(x @ self.up) @ self.down


class Stores(MLP):
    """Its call changes what it holds."""

    def __init__(self, rngs, call):
        super().__init__(rngs)
        self.call, self.count = call, nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.call(self)
        return super().__call__(x)


class Numbers(MLP):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.order = nnx.Param(jnp.arange(4))


class Keyword(MLP):
    def __init__(self, *, rngs):
        super().__init__(rngs)


class Empty(nnx.Module):
    def __init__(self, rngs):
        pass


def made(model=MLP, loss=cross_entropy, optimizer=None, mesh="4x1x1", **options) -> jaxdist.Parallel:
    return jaxdist.parallelize(model, loss, optimizer or optax.sgd(0.1, momentum=0.9), mesh=mesh, **options)


def batch(make=vectors, rows=16, seed=0):
    return jax.tree.map(lambda a: a[:rows], make(np.random.default_rng(seed)))


def update(after, keeps=lambda state: state):
    """An optimizer that makes `after` of the gradients, and keeps something of its state."""
    init = lambda params: {"m": jax.tree.map(jnp.zeros_like, params)}
    return optax.GradientTransformation(init, lambda grads, state, params=None: (after(grads), keeps(state)))


same = lambda tree: tree
half = lambda tree: jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)
cut = lambda tree: jax.tree.map(lambda a: a[:1], tree)
tensor = dict(model=Named, mesh="2x2x1")
by_rule = lambda *axes: {"mlp": axes}

REQUESTS = [
    (dict(mesh="dat=4"), r"an axis 'dat' that does not exist; did you mean 'data'"),
    (dict(mesh=(4, 1, 1)), r"mesh is \(4, 1, 1\); write it as text"),
    (dict(mesh="context=2"), r"context=2.*set context to 1"),
    (dict(mesh="2x1x2"), r"pipeline=2.*set pipeline to 1"),
    (dict(zero=4), r"zero is 4; use one of \(0, 1, 2, 3\)"),
    (dict(zero="3"), r"zero is '3'; use one of"),
    (dict(precision="fp16"), r"precision is 'fp16'; use one of \('float32', 'bfloat16', 'mixed', 'float16'\)"),
    (dict(scope="row"), r"scope is 'row'; did you mean 'rows'"),
    (dict(accumulation=-1), r"accumulation is -1; give the number of micro-batches, 1 or more"),
    (dict(accumulation=0), r"accumulation is 0"),
    (dict(shard=-1), r"shard is -1; give a least number of elements, 0 or more"),
    (dict(mesh="3x1x1", zero=3, shard=lambda name, a: name == "head.bias"), r"head.bias \(8,\), .* data=3; leave"),
    (dict(model=lambda rngs: 3), r"model_fn returned int; return a flax.nnx.Module"),
    (dict(model=lambda: 3), r"model_fn takes \(\), but is called as model_fn\(rngs\)"),
    (dict(model=Keyword), r"model_fn takes \(\*, rngs\).*wrap it: lambda rngs: Model\(rngs=rngs\)"),
    (dict(model=Empty), r"Empty has no parameters"),
    (dict(model=Numbers), r"parameter order is of int32, which cannot be trained; make it an nnx.Variable"),
    (dict(loss=None), r"loss_fn is None, which cannot be called"),
    (dict(loss=lambda module: 0.0), r"loss_fn takes \(module\), but is called as loss_fn\(module, batch\)"),
    (dict(optimizer=nnx.Optimizer), r"give an optax.GradientTransformation .* not an nnx.Optimizer"),
    (
        dict(optimizer=nnx.Optimizer(MLP(nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param)),
        r"is an nnx.Optimizer, which .*; give .* that it was made of, optimizer.tx",
    ),
    (dict(optimizer=update(half)), r"updates head.bias bfloat16\[8\] of what was float32\[8\]; keep shape and dtype"),
    (dict(optimizer=update(cut)), r"updates head.bias float32\[1\] of what was float32\[8\]"),
    (dict(optimizer=update(cut), zero=3), r"updates head.bias float32\[1\] of what was float32\[8\]"),
    (dict(optimizer=update(same, half)), r"state m.head.bias bfloat16\[8\] of what was float32\[8\]"),
    (dict(optimizer=update(lambda grads: {"a": grads})), r"returned updates of another structure"),
    (dict(optimizer=update(same, lambda state: (state, state))), r"returned state of another structure"),
    (
        dict(optimizer=optax.GradientTransformation(optax.sgd(0.1).init, lambda grads, state, *, own, **_: grads)),
        r"cannot be called as update\(gradients, state, params\): .*",
    ),
    (dict(mesh="2x2x1"), r"model=2 splits nothing: give parameters `axes`, and rules"),
    (
        dict(mesh="data=2,expert=2"),
        r"expert=2 splits nothing: give parameters `axes`, and rules .*'experts': \('expert'",
    ),
    (dict(mesh="data=2,context=2"), r"cuts each row over context=2, but .* module of your own .*; set context to 1"),
    (dict(tensor, rules={"mpl": ("model",)}), r"logical axis 'mpl'; did you mean 'mlp'"),
    (dict(tensor, rules=by_rule("modl")), r"mesh axis 'modl'; did you mean 'model'"),
    (dict(tensor, rules={"mlp": "model"}), r"give a tuple of mesh axes, such as \('model',\)"),
    (dict(tensor, rules=[("mlp", "model")]), r"rules are .*; give a dict"),
    (dict(tensor, rules={"batch": ("model",)}), r"'batch' names the rows"),
    (dict(tensor, rules=by_rule("data")), r"rules split mlp over data.*use model"),
    (dict(tensor, rules=by_rule("model"), scope="rows"), r"rules split model, which scope 'rows' cannot do"),
    (dict(tensor, mesh="1x3x1", rules=by_rule("model")), r"\(12, 16\) has a dim 'mlp' of 16.* divide by model=3|16, 8"),
]


@pytest.mark.parametrize(("options", "told"), REQUESTS, ids=[told[:30] for _, told in REQUESTS])
def test_what_cannot_be_done_is_told_when_it_is_asked_for(options, told):
    with pytest.raises(ValueError, match=told):
        made(**options)


def test_a_module_in_place_of_a_function_is_told():
    with pytest.raises(ValueError, match=r"model_fn is a MLP that is built already; give a function model_fn\(rngs\)"):
        made(MLP(nnx.Rngs(0)))


VALUES = {
    "vector": (lambda m, b: m(b["x"])[:, 0], r"loss: shape \(16,\) and dtype float32; return the mean over the rows"),
    "whole number": (lambda m, b: m(b["x"]).argmax(), r"loss: shape \(\) and dtype int32"),
    "complex": (lambda m, b: m(b["x"]).mean() + 0j, r"loss: shape \(\) and dtype complex64"),
    "nothing": (lambda m, b: None, r"loss: NoneType"),
    "three": (lambda m, b: (m(b["x"]).mean(), {}, {}), r"loss: tuple"),
    "a pair": (lambda m, b: (m(b["x"]).mean(), m(b["x"])), r"a pair whose second part is .*; return a dict of means"),
    "further vector": (lambda m, b: (m(b["x"]).mean(), {"own": m(b["x"])}), r"own: shape \(16, 8\)"),
    "further loss": (lambda m, b: (m(b["x"]).mean(), {"loss": m(b["x"]).mean()}), r"a further mean 'loss'"),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_loss_that_is_no_mean_is_told_when_the_step_is_traced(name):
    loss, told = VALUES[name]
    on_mesh = made(loss=loss)
    with pytest.raises(ValueError, match=told):
        on_mesh.lower(batch())


BATCHES = {
    "15 rows": (batch(rows=15), r"15 rows does not divide by 1 micro-batch x 4 parts.*give 12 or 16 rows"),
    "3 rows": (batch(rows=3), r"3 rows does not divide.*give 4 rows"),
    "no rows": (batch(rows=0), r"label of shape \(0,\), x of shape \(0, 12\); .* one row or more"),
    "nothing": ({}, r"holds nothing"),
    "unequal": ({"x": np.ones((16, 12)), "label": np.ones(8)}, r"label of shape \(8,\), x of shape \(16, 12\)"),
    "a table": ({"x": np.ones((16, 12)), "rate": np.ones(3)}, r"rate of shape \(3,\), .*; give .* by batch_dims which"),
    "lists": ({"x": np.ones((16, 12)).tolist()}, r"no array of the batch \(x.0.0, .*\) has rows"),
    "a list of texts": ({"x": np.ones((16, 12)), "name": ["a"] * 16}, r"name.0 of a batch holds <U1; give numbers"),
    "text": ({"x": np.array(["a"] * 16)}, r"x of a batch holds <U1; give numbers"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_that_does_not_fit_is_told(name):
    rows, told = BATCHES[name]
    with pytest.raises(ValueError, match=told):
        made().lower(rows)


def _remove(module):
    del module.count


def _reshape(module):
    module.count = nnx.Variable(jnp.zeros(3))


def _add(module):
    module.seen = nnx.Variable(jnp.zeros(()))


@pytest.mark.parametrize("scope", ["batch", "rows"])
@pytest.mark.parametrize(
    ("call", "told"),
    [(_add, "adds seen"), (_remove, "removes count"), (_reshape, "changes the shape or dtype of count")],
)
def test_a_call_that_leaves_other_variables_is_told(call, told, scope):
    with pytest.raises(ValueError, match=f"calling the module {told}; a step keeps what a module holds"):
        made(lambda rngs: Stores(rngs, call), scope=scope).lower(batch())


@pytest.fixture(scope="module")
def trained():
    """Two steps of a module with batch norm and dropout, its parameters split over 4 devices."""
    on_mesh = made(Convolution, zero=3)
    state = on_mesh.init(0)
    for seed in (1, 2):
        state, _ = on_mesh.step(state, batch(images, seed=seed))
    return on_mesh, state


def bits(state):
    """Every array of a state, as it is on no mesh."""
    raw = lambda a: jax.random.key_data(a) if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key) else a
    return jax.tree.map(lambda a: np.asarray(raw(a)), state)


@pytest.mark.parametrize(("mesh", "options"), [("2x1x1", dict(zero=1)), ("replica=2,data=2", dict(scope="rows"))])
def test_a_state_goes_to_another_mesh_and_stage_to_the_bit(trained, tmp_path, mesh, options):
    on_mesh, state = trained
    on_mesh.save(tmp_path, state)
    other = made(Convolution, mesh=mesh, **options)
    jax.tree.map(np.testing.assert_array_equal, bits(other.restore(tmp_path)), bits(state))
    assert jax.tree.map(lambda a: a.sharding, other.restore(tmp_path)) == other.shardings


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    there = made(optimizer=optax.adam(0.1), mesh="1x1x1")
    there.save(tmp_path, there.init(0))
    told = r"saved with another optimizer: its state holds 13 arrays and 6 here, optimizer.0.count there and not here"
    with pytest.raises(ValueError, match=told):
        made(mesh="1x1x1").restore(tmp_path)


def test_what_sm3_keeps_in_the_shape_of_a_parameter_lies_as_it_does():
    on_mesh = made(optimizer=optax.sm3(0.1), zero=1)
    kept = on_mesh.shardings.optimizer[0]
    assert jax.tree.map(lambda a: a.spec, kept.nu) == jax.tree.map(lambda a: a.spec, on_mesh.shardings.params)
    assert {a.is_fully_replicated for a in jax.tree.leaves(kept.mu)} == {True}


def test_there_is_nothing_to_restore(tmp_path):
    with pytest.raises(ValueError, match="holds no checkpoint"):
        made().restore(tmp_path)


def test_shardings_are_those_of_the_state(trained):
    on_mesh, state = trained
    assert jax.tree.map(lambda a: a.sharding, state) == on_mesh.shardings
    assert any("data" in jax.tree.leaves(tuple(s.spec)) for s in jax.tree.leaves(on_mesh.shardings.params))


def test_the_module_on_one_device_computes_what_an_evaluation_tells(trained):
    """Of 15 rows, 3 are left over after 4 devices have 3 each: they count once."""
    on_mesh, state = trained
    rows = batch(images, rows=15, seed=3)
    loss, further = cross_entropy(on_mesh.module(state), jax.tree.map(jnp.asarray, rows))
    told = on_mesh.evaluate(state, rows)
    assert told == pytest.approx({"loss": float(loss), "accuracy": float(further["accuracy"])}, rel=1e-5)


def test_a_module_is_gathered_to_the_host_and_is_on_none_of_the_devices(monkeypatch):
    """Each shard is copied by itself; a leaf is whole on no device of the mesh, not even for a while."""
    devices = jax.devices()[1:5]
    on_mesh = made(Convolution, zero=3, devices=devices)
    state = on_mesh.init(0)
    monkeypatch.setattr(
        on_mesh._engine, "whole", lambda a: pytest.fail(f"{a.shape} is whole on a device") if a.ndim else a
    )
    module = on_mesh.module(state)
    assert {device for a in jax.tree.leaves(nnx.state(module)) for device in a.devices()} == {jax.devices()[0]}
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(state.params))
    moved = jax.device_put(module, devices[0])
    assert moved(jnp.ones((2, 8, 8, 1))).devices() == {devices[0]}


def test_a_state_is_used_once_and_on_its_mesh():
    on_mesh, other = made(), made(mesh="2x1x1")
    state = on_mesh.init(0)
    with pytest.raises(ValueError, match="lies on the mesh data=4, not on data=2"):
        other.step(state, batch())
    after, _ = on_mesh.step(state, batch())
    assert all(a.is_deleted() for a in jax.tree.leaves((state.params, state.optimizer)))
    with pytest.raises(ValueError, match="donated to a previous step"):
        on_mesh.step(state, batch())
    with pytest.raises(ValueError, match="state is NoneType; give what init, step or restore returned"):
        on_mesh.evaluate(None, batch())
    assert int(after.step) == 1


def test_a_copy_of_a_state_that_lies_on_no_mesh_is_refused(trained):
    on_mesh, state = trained
    copy = jax.device_get(state)
    with pytest.raises(ValueError, match="this state holds ndarray; give what init"):
        on_mesh.evaluate(copy, batch(images))
    on_one_device = jax.tree.map(jnp.asarray, copy)
    with pytest.raises(ValueError, match=r"lies on no mesh, but on .*0; .* by jax.device_put"):
        on_mesh.step(on_one_device, batch(images))
    back = jax.device_put(on_one_device, on_mesh.shardings)
    assert on_mesh.evaluate(back, batch(images)) == on_mesh.evaluate(state, batch(images))


@pytest.mark.parametrize("scope", ["batch", "rows"])
def test_a_loss_that_is_not_finite_changes_nothing_but_the_counts(scope):
    """Nor batch statistics, nor keys: a later step is as if this one had not been."""
    on_mesh = made(Convolution, zero=1, scope=scope)
    state, _ = on_mesh.step(on_mesh.init(0), batch(images))
    before = bits(state)
    broken = batch(images)
    broken["x"][5] = np.nan
    state, metrics = on_mesh.step(state, broken)
    after = bits(state)
    assert np.isnan(metrics.loss)
    assert (int(state.step), int(state.skipped), int(state.skipped_in_a_row)) == (2, 1, 1)
    for name in ("params", "optimizer", "variables"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(before, name))


def test_parameters_in_bfloat16_keep_their_dtype_and_that_of_the_optimizer():
    class Small(nnx.Module):
        def __init__(self, rngs):
            self.head = nnx.Linear(12, 8, param_dtype=jnp.bfloat16, rngs=rngs)

        def __call__(self, x):
            return self.head(x)

    on_mesh = made(Small, optimizer=optax.adam(1e-3), zero=1)
    state, _ = on_mesh.step(on_mesh.init(0), batch())
    assert {a.dtype for a in jax.tree.leaves((state.params, state.optimizer[0].mu))} == {jnp.bfloat16.dtype}


@pytest.mark.parametrize(("zero", "reductions"), [(1, 1), (3, 2)])
def test_with_rows_gradients_are_reduced_once_in_a_step_or_in_a_micro_batch(zero, reductions):
    on_mesh = made(zero=zero, scope="rows", accumulation=2)
    scattered = sum(c.count for c in on_mesh.collectives(batch()) if c.kind == "reduce-scatter")
    assert scattered == reductions * len(jax.tree.leaves(on_mesh.shardings.params))


@pytest.mark.parametrize("name", thinned([("multi_transform",), ("muon",), ("adafactor",), ("sm3",)], 4))
def test_optimizers_that_keep_something_of_some_parameters_only(name):
    """Or of another shape than the parameter's."""
    rules = {"matrix": optax.sgd(0.1, momentum=0.9), "vector": optax.adam(0.1)}
    label = lambda params: jax.tree.map(lambda a: "matrix" if a.ndim > 1 else "vector", params)
    optimizer = {
        "multi_transform": optax.multi_transform(rules, label),
        "muon": optax.contrib.muon(1e-2),
        "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
        "sm3": optax.sm3(0.1),
    }[name]
    losses = {}
    for mesh in ("1x1x1", "4x1x1"):
        on_mesh = made(optimizer=optimizer, mesh=mesh, zero=3)
        state, _ = on_mesh.step(on_mesh.init(0), batch())
        losses[mesh] = float(on_mesh.step(state, batch(seed=1))[1].loss)
    assert losses["4x1x1"] == pytest.approx(losses["1x1x1"], rel=1e-5)


class Odd(nnx.Module):
    """Two matrices of which 4 divides no dim, and a bias of 12."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Param(jnp.ones((15, 9))), nnx.Param(jnp.ones((9, 15)))
        self.bias = nnx.Param(jnp.ones(12))


def test_much_that_zero_leaves_whole_is_a_warning_with_sizes_that_work():
    with pytest.warns(UserWarning, match="to split") as warned:
        trainer = made(Odd, zero=1)
    (told,) = warned
    sentence = (
        "data=4 finds no dim to split in down (9x15), up (15x9): 95.74% of the parameters are left to every device"
    )
    assert str(told.message) == sentence + "; set data to 3 or 5"
    assert told.filename == __file__
    assert repr(trainer) == f"282 parameters on {describe(trainer.mesh.shape)}, ZeRO 1; {sentence}"


@pytest.mark.parametrize("options", [dict(zero=0), dict(zero=3, mesh="3x1x1"), dict(zero=3, mesh="1x1x1")])
def test_nothing_that_could_be_split_is_left_whole(options, recwarn):
    assert "no dim" not in repr(made(Odd, **options))
    assert not recwarn.list


def test_what_is_to_stay_whole_is_no_warning(recwarn):
    assert "no dim" not in repr(made(Odd, zero=3, shard=lambda name, a: name == "bias"))
    assert not recwarn.list


def test_little_that_zero_leaves_whole_is_named_and_no_warning(recwarn):
    class Mostly(nnx.Module):
        def __init__(self, rngs):
            self.matrix, self.bias = nnx.Param(jnp.ones((64, 64))), nnx.Param(jnp.ones(7))

    told = "; data=4 finds no dim to split in bias (7): 0.17% of the parameters are left to every device"
    assert repr(made(Mostly, zero=2)).endswith(told)
    assert not recwarn.list
