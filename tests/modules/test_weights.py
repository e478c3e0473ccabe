"""Parameters that come from elsewhere and go elsewhere: `init(params=)`, `export` and the average of `ema`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import jaxdist
from jaxdist.sharding import named
from tests.parity.modules import MLP, Convolution, cross_entropy, images, vectors
from tests.tiers import thinned
from tests.training.test_staged import Decoder


def made(model=MLP, loss=cross_entropy, mesh="4x1x1", optimizer=None, **options) -> jaxdist.Parallel:
    return jaxdist.parallelize(model, loss, optimizer or optax.adam(0.01), mesh=mesh, **options)


def plain(tree) -> dict[str, np.ndarray]:
    return {name: np.asarray(a) for name, a in named(jax.device_get(tree)).items()}


def equal(got, wanted) -> None:
    got, wanted = plain(got), plain(wanted)
    assert got.keys() == wanted.keys()
    for name, a in wanted.items():
        np.testing.assert_array_equal(got[name], a, err_msg=name)


@pytest.fixture(scope="module")
def trained():
    trainer = made(Convolution, zero=3)
    state, _ = trainer.step(trainer.init(0), images(np.random.default_rng(0)))
    return trainer, state


def in_form(form, trainer, state, folder):
    module = trainer.module(state)
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    if form == "export":
        trainer.export(folder / "a.safetensors", state)
        return folder / "a.safetensors"
    if form == "save":
        trainer.save(folder, state)
        return folder
    if form == "orbax":
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "orbax", {"params": params})
        return folder / "orbax"
    return {"tree": params, "module": module, "state": nnx.state(module, nnx.Param)}[form]


@pytest.mark.parametrize("form", ["export", "save", "orbax", "tree", "module", "state"])
def test_a_state_begins_with_given_parameters_on_any_mesh(form, trained, tmp_path, recwarn):
    trainer, state = trained
    other = made(Convolution, mesh="2x1x1", zero=1)
    begun = other.init(1, params=in_form(form, trainer, state, tmp_path))
    equal(begun.params, state.params)
    assert int(begun.step) == 0
    assert jax.tree.map(lambda a: a.sharding, begun.params) == other.shardings.params
    if form in ("export", "save", "module"):
        np.testing.assert_array_equal(begun.variables["norm"]["mean"], state.variables["norm"]["mean"])
    assert not [w for w in recwarn if "params" in str(w.message)]


def test_the_exported_file_is_read_by_others(trained, tmp_path):
    trainer, state = trained
    trainer.export(tmp_path / "a.safetensors", state)
    found = load_file(tmp_path / "a.safetensors")
    wanted = plain(state.params) | {f"variables.norm.{name}": state.variables["norm"][name] for name in ("mean", "var")}
    assert found.keys() == wanted.keys()
    for name, a in wanted.items():
        np.testing.assert_array_equal(found[name], a)


def test_each_device_reads_its_own_shards_alone():
    trainer = made(zero=3)
    read = []

    class Watched:
        def __init__(self, a):
            self.a, self.shape, self.ndim, self.dtype = a, a.shape, a.ndim, a.dtype

        def __getitem__(self, index):
            read.append(self.a[index].size / self.a.size)
            return self.a[index]

    params = jax.tree.map(lambda a: Watched(np.asarray(a)), jax.device_get(trainer.init(0).params))
    begun = trainer.init(1, params=params)
    equal(begun.params, trainer.init(0).params)
    assert max(read) == 0.25


def test_what_is_missing_and_what_is_left_over_is_told():
    trainer = made()
    given = jax.device_get(trainer.init(0).params)
    some = {"layers": given["layers"], "head": {"kernel": given["head"]["kernel"]}, "old": {"w": np.ones(3)}}
    told = "^head.bias is missing in params and drawn by the seed; old.w of params is left over$"
    with pytest.warns(UserWarning, match=told) as warned:
        begun = trainer.init(1, params=some)
    assert warned[0].filename == __file__
    equal(begun.params["layers"], given["layers"])


MISTAKES = [
    ({"head": {"bias": np.ones(3)}}, r"head.bias is \(3,\) in params and \(8,\) in the module"),
    ({"old": np.ones(3)}, r"params holds none of the module's parameters: it has old, the module head.bias, head.k"),
    (3, r"params is int; give a nested dict"),
    ("nowhere.safetensors", r"params is nowhere.safetensors, which does not exist"),
]


@pytest.mark.parametrize(("given", "told"), MISTAKES)
def test_parameters_that_do_not_fit_are_told(given, told):
    with pytest.raises(ValueError, match=told):
        made().init(0, params=given)


def test_a_folder_and_a_file_that_hold_no_weights_are_told(tmp_path):
    with pytest.raises(ValueError, match="holds no checkpoint of jaxdist, and no item of Orbax"):
        made().init(0, params=tmp_path)
    save_file({"head.bias": np.arange(8)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"holds head.bias in I64; give F32, BF16, F16"):
        made().init(0, params=tmp_path / "a.safetensors")


def test_an_optimizer_begins_with_the_given_parameters():
    trainer = made(ema=0.9, zero=1)
    given = jax.device_get(trainer.init(0).params)
    equal(trainer.init(1, params=given).optimizer.ema, given)


@pytest.mark.slow
def test_stages_begin_with_parameters_of_another_mesh(tmp_path):
    options = dict(scope="rows", accumulation=2, zero=1)
    there = made(Decoder, jaxdist.staged, "1x1x1", **options)
    there.export(tmp_path / "a.safetensors", there.init(0))
    here = made(Decoder, jaxdist.staged, "2x1x2", **options)
    begun = here.init(1, params=tmp_path / "a.safetensors")
    here.export(tmp_path / "b.safetensors", begun)
    equal(load_file(tmp_path / "b.safetensors"), load_file(tmp_path / "a.safetensors"))


AVERAGES = [("4x1x1", dict(zero=3)), ("2x1x1", dict(zero=1, precision="mixed", scope="rows"))]


@pytest.mark.parametrize(("mesh", "options"), thinned(AVERAGES, 2))
def test_an_average_is_that_of_the_parameters_after_each_step(mesh, options, tmp_path):
    trainer = made(mesh=mesh, ema=0.75, optimizer=optax.sgd(0.3), **options)
    state = trainer.init(0)
    wanted = plain(state.params)
    for seed in range(3):
        state, _ = trainer.step(state, vectors(np.random.default_rng(seed)))
        wanted = {name: 0.75 * wanted[name] + 0.25 * a for name, a in plain(state.params).items()}
    for name, a in plain(state.optimizer.ema).items():
        np.testing.assert_allclose(a, wanted[name], rtol=1e-6, atol=1e-7)
    assert jax.tree.map(lambda a: a.sharding, state.optimizer.ema) == trainer.shardings.params
    broken = vectors(np.random.default_rng(0)) | {"x": np.full((16, 12), np.nan, "f")}
    state, metrics = trainer.step(state, broken)
    assert int(metrics.skipped) == 1
    module = trainer.module(state, ema=True)
    np.testing.assert_allclose(module.head.kernel[...], wanted["head.kernel"], rtol=1e-6, atol=1e-7)
    rows = vectors(np.random.default_rng(9))
    loss = float(cross_entropy(module, jax.tree.map(jnp.asarray, rows))[0])
    tolerance = 1e-5 if "precision" not in options else 2e-2
    assert trainer.evaluate(state, rows, ema=True)["loss"] == pytest.approx(loss, rel=tolerance)
    assert trainer.evaluate(state, rows)["loss"] != pytest.approx(loss, rel=1e-4)
    bias = trainer.apply(state, lambda module: module.head.bias.astype("float32"), ema=True)
    np.testing.assert_allclose(bias, wanted["head.bias"], rtol=tolerance, atol=1e-7)
    trainer.save(tmp_path, state)
    other = made(mesh="1x1x1", ema=0.75, optimizer=optax.sgd(0.3)).restore(tmp_path)
    equal(other.optimizer.ema, state.optimizer.ema)


def test_an_average_that_is_not_kept_is_told():
    trainer = made(mesh="1x1x1")
    with pytest.raises(ValueError, match="ema=True, but this state holds no average; give parallelize a decay"):
        trainer.module(trainer.init(0), ema=True)
    with pytest.raises(ValueError, match="ema is 1; give the decay of the average, from 0 to less than 1"):
        made(ema=1)
