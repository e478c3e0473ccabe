"""What `fit` does not take: one sentence each, before anything compiles, or is written over."""

import threading

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist
from jaxdist.api.fit_options import NAMES
from jaxdist.api.iterator_state import from_json, to_json
from jaxdist.config import RequestError
from jaxdist.request.knobs import KNOBS
from tests.fit.conftest import DATA, SIZE, batch_of, fit, loss_fn, trainer
from tests.fit.forms import Dataset, Skipping, Stateful, generator

WRONG = [
    (DATA, {}, "batches are arrays of all rows; give batch_size"),
    (DATA, {"batch_size": 41}, "batch_size is 41, and batches has 40 rows; give a size from 1 to 40"),
    (DATA | {"y": DATA["y"][:7]}, {"batch_size": 4}, "share no number of rows: x has 40, y has 7"),
    ({"train": Dataset()}, {"batch_size": 4}, "batches is a dict with train, no tree of arrays"),
    (batch_of, {"batch_size": 4}, "batch_size is 4, but batches, a function, makes batches itself"),
    (generator(), {"batch_size": 4}, "batch_size is 4, but batches, a generator, makes batches itself"),
    ([], {}, "batches is empty"),
    ([], {"batch_size": 4}, "batches has no rows; give one row or more"),
    ({"x": np.zeros((0, 4))}, {"batch_size": 4}, "batches has no rows"),
    (3, {}, "batches is int; give a function of the step, arrays, a sequence or an iterator"),
    (batch_of, {"steps": 0}, "steps is 0; give a whole number"),
    (batch_of, {"steps": "5"}, "steps is '5'; give a whole number"),
    (DATA, {"batch_size": 2.5}, "batch_size is 2.5; give a whole number, 1 or more"),
    (DATA, {"batch_size": True}, "batch_size is True; give a whole number"),
    (batch_of, {"seed": 0.5}, "seed is 0.5; give a whole number, 0 or more"),
    (batch_of, {"callbacks": print}, "callbacks is <built-in function print>; give a list of functions"),
    (batch_of, {"callbacks": ["print"]}, "give a list of functions of .step, state, metrics"),
    ("notes.npy", {}, "batches is 'notes.npy'; open it"),
    ({"x": [1.0] * 40}, {"batch_size": 4}, "batches is a dict with x.0, x.1, x.2, no tree of arrays"),
    (batch_of, {"log_evry": 1}, "fit has no option 'log_evry'; did you mean 'log_every'?"),
    (batch_of, {"checkpoint_every": -1}, "checkpoint_every is -1: must be at least 0"),
    (batch_of, {"evaluate": generator()}, "evaluate is a generator, which gives no batch by its number; give a list"),
    (batch_of, {"evaluate": {1, 2}}, "evaluate is a set, which gives no batch by its number"),
    (batch_of, {"validation_every": 5}, "validation_every is 5, but there is no evaluate"),
    (batch_of, {"evaluate": []}, "evaluate is empty"),
    (batch_of, {"evaluate": True}, "no array of the batch .* has rows"),
    (batch_of, {"evaluate": DATA | {"y": DATA["y"][:7]}}, "give arrays that share their leading dim"),
]


@pytest.mark.parametrize(("batches", "options", "sentence"), WRONG, ids=[str(row[2])[:40] for row in WRONG])
def test_one_sentence(batches, options, sentence, four, tmp_path):
    with pytest.raises(ValueError, match=sentence.replace("?", "[?]")):
        fit(tmp_path / "run", batches, four, **options)
    assert not (tmp_path / "run").exists()


def test_what_is_no_trainer_and_a_thread_are_named(four, tmp_path):
    with pytest.raises(ValueError, match=r"give what jaxdist.parallelize returned"):
        fit(tmp_path / "run", batch_of, "four")
    found = []

    def call():
        with pytest.raises(ValueError, match="fit is called in a thread, where Python hears no signals") as caught:
            fit(tmp_path / "run", batch_of, four)
        found.append(caught)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert found


def test_the_loss_is_traced_with_the_first_batch_of_evaluate(four, tmp_path):
    with pytest.raises(KeyError, match="y") as found:
        fit(tmp_path / "run", batch_of, four, evaluate=[{"x": DATA["x"][:7]}])
    assert "first batch of evaluate" in found.value.__notes__[-1]
    assert not (tmp_path / "run").exists()


def test_integers_of_numpy_are_integers(four, tmp_path):
    fit(tmp_path / "run", DATA, four, batch_size=np.int64(SIZE), steps=np.int32(2), seed=np.int64(1))
    assert (tmp_path / "run/checkpoints/2").is_dir()


def test_an_evaluation_returns_numbers_and_a_callback_leaves_the_state(four, tmp_path):
    with pytest.raises(ValueError, match=r"evaluate returned loss as array\(.*; return numbers, by name"):
        fit(tmp_path / "a", batch_of, four, steps=1, evaluate=lambda state: {"loss": np.ones(3)})

    def step(now, state, metrics):
        four.step(state, batch_of(now))

    with pytest.raises(ValueError, match="a callback donated the state, by step or update"):
        fit(tmp_path / "b", batch_of, four, steps=2, callbacks=[step])


def test_every_option_is_a_knob():
    assert set(NAMES.values()) <= set(KNOBS)


def test_a_batch_that_does_not_divide(four, tmp_path):
    with pytest.raises(ValueError, match="a batch of 6 rows does not divide by 1 micro-batch x 4 parts"):
        fit(tmp_path, DATA, four, batch_size=6)


def test_what_ends_too_early(four, tmp_path):
    with pytest.raises(ValueError, match="batches ended after 2 steps"):
        fit(tmp_path, iter([batch_of(0), batch_of(1)]), four)


@pytest.fixture(scope="module")
def there(four, tmp_path_factory):
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("there") / "run"
    fit(folder, DATA, four, batch_size=SIZE, steps=2)
    return folder


@pytest.mark.parametrize(
    ("batches", "options", "sentence"),
    [
        (DATA, {"batch_size": 4}, r"batch_size \(8 there, 4 here\); give the same, or name another run_dir"),
        (DATA, {"batch_size": 8, "seed": 1}, r"seed \(0 there, 1 here\)"),
        (DATA | {"x": 2 * DATA["x"]}, {"batch_size": 8}, r"digest of batches \(\w+ there, \w+ here\)"),
        (batch_of, {}, r"form of batches \(RowsOfArrays there, Function here\)"),
        (DATA, {"batch_size": 8, "resume": "never"}, "holds a run already and resume is never"),
        (DATA, {"batch_size": 8, "resume": 1}, "holds no step 1; it has 2"),
    ],
)
def test_another_run_is_not_gone_on_with(batches, options, sentence, there, four):
    with pytest.raises(RequestError, match=sentence):
        fit(there, batches, four, steps=4, **options)


def test_another_optimizer_is_not_gone_on_with(there):
    with pytest.raises(RequestError, match="was saved with another optimizer"):
        fit(there, DATA, trainer(optimizer=optax.sgd(0.1)), batch_size=SIZE, steps=4)


def test_another_module_is_told_from_another_optimizer(there):
    class Other(nnx.Module):
        def __init__(self, rngs):
            self.only = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return self.only(x)

    other = jaxdist.parallelize(Other, loss_fn, optax.adam(1e-2), mesh="4x1x1", devices=jax.devices()[:4])
    with pytest.raises(RequestError, match=r"does not fit this model: .* there and .* give the model that was trained"):
        fit(there, DATA, other, batch_size=SIZE, steps=4)


def test_the_folder_of_train_is_left_alone(four, tmp_path):
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(RequestError, match=r"holds a run of jaxdist.train; name another run_dir"):
        fit(tmp_path, batch_of, four)


def test_an_iterator_needs_its_state(four, tmp_path):
    """Iterators of both kinds are given in the same form."""
    fit(tmp_path, Skipping(), four, steps=1)
    with pytest.raises(RequestError, match="the checkpoint of step 1 holds no state of batches"):
        fit(tmp_path, Stateful(), four)


def test_a_state_comes_back_as_it_was():
    state = {"a": [1, (2.5, None)], 3: b"\xff", "n": np.arange(6, dtype="i2").reshape(2, 3), "__bytes__": True}
    found = from_json(to_json(state))
    np.testing.assert_array_equal(found.pop("n"), state.pop("n"))
    assert found == state
    with pytest.raises(ValueError, match="the state of batches holds object, which a checkpoint cannot"):
        to_json({"a": object()})
