"""Text from weights, token by token: greedy is the argmax of the model's own logits, and draws follow the softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import Config
from jaxdist.mesh import devices_asked, parse_mesh
from jaxdist.training.restore import Trained
from jaxdist.training.run import Run
from jaxdist.training.sampling import Choice, sample

SEQUENCE, VOCAB = 6, 97
GREEDY = Choice(temperature=0.0, top_k=0)


def made(mesh: str = "1x1x1", sequence: int = SEQUENCE, **more: dict) -> Trained:
    """A model of random weights so large that the next token depends on all of the window: it hardly repeats itself."""
    model = dict(layers=2, embed=16, heads=2, vocab=VOCAB, sequence=sequence, tied=False)
    run = Run(Config(mesh=mesh, model=model, **more), devices=jax.devices()[: devices_asked(parse_mesh(mesh))])
    with jax.set_mesh(run.mesh):
        params = jax.jit(run.step.init)(jax.random.key(0)).params
        params = jax.tree.map(lambda a: 10 * a, params)
    return Trained(run, 1, params, {}, "")


@pytest.fixture(scope="module")
def trained() -> Trained:
    return made()


def greedy_by_hand(trained: Trained, text: list[int], start: int) -> list[int]:
    """The likeliest token after each prefix of `text` from `start` tokens on, each in a window of its own."""
    windows = [text[max(0, end - SEQUENCE) : end] for end in range(start, len(text))]
    # No token sees those after it, so the padding may be anything. `sample` pads with 0.
    rows = np.array([window + [1] * (SEQUENCE - len(window)) for window in windows])
    forward = trained.run.forward
    with jax.set_mesh(trained.run.mesh):
        logits = jax.jit(lambda params, ids: forward.logits(forward.weights(params), ids))(trained.params, rows)
    return [int(jnp.argmax(logits[number, len(window) - 1])) for number, window in enumerate(windows)]


@pytest.mark.parametrize("prompt", [[5, 40, 7], [5, 40, 7, 1, 2, 3, 90, 11]], ids=["short", "longer than the window"])
def test_greedy_is_the_argmax_of_the_models_logits_within_the_window_and_past_it(trained, prompt):
    tokens = 12
    (text,) = sample(trained, prompt, tokens, 1, GREEDY, seed=0)
    assert text[: len(prompt)] == prompt
    assert text[len(prompt) :] == greedy_by_hand(trained, text, len(prompt))
    written = text[len(prompt) :]
    assert len(set(written)) >= 9, "a text that repeats itself would hide a window that stands still, or is shifted"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ("context=2,model=2", {"parallel": {"context": "ring", "sequence": True}}),
        ("context=2,pipeline=2", {"parallel": {"context": "ulysses"}, "pipeline": {"microbatches": 2}}),
    ],
    ids=["ring with sequence parallelism", "Ulysses in a pipeline"],
)
def test_greedy_is_the_same_where_devices_share_the_window(mesh, more):
    """In whatever order its tokens lie, within the window and past it."""
    one, shared = (sample(each, [5, 40, 7], 9, 1, GREEDY, seed=0) for each in (made(sequence=8), made(mesh, 8, **more)))
    assert shared == one
    assert len(set(one[0][3:])) > 5


def test_the_likeliest_one_is_greedy(trained):
    prompt, one = [5, 40, 7], Choice(temperature=0.8, top_k=1)
    assert sample(trained, prompt, 12, 2, one, seed=0) == sample(trained, prompt, 12, 2, GREEDY, seed=0)


def test_tokens_and_samples_are_drawn_apart_and_by_the_seed(trained):
    """Of a model to which all tokens are alike, so that only the random keys can make a difference."""
    even = trained._replace(params=jax.tree.map(jnp.zeros_like, trained.params))
    drawn = np.array(sample(even, [0], 12, 8, Choice(temperature=1.0, top_k=0), seed=0))[:, 1:]
    assert len(np.unique(drawn, axis=0)) == 8
    assert len(np.unique(drawn, axis=1).T) == 12
    assert 50 < len(np.unique(drawn)) <= VOCAB  # 96 draws of 97 tokens: 61 are expected
    again = np.array(sample(even, [0], 12, 8, Choice(temperature=1.0, top_k=0), seed=1))[:, 1:]
    assert (drawn != again).mean() > 0.9


@pytest.mark.parametrize("choice", [Choice(0.0, 0, entries=9), Choice(9.0, 0, entries=9), Choice(9.0, 50, entries=9)])
def test_rows_beyond_the_tokenizer_are_never_drawn(trained, choice):
    drawn = np.array(sample(trained, [5, 40, 7], 12, 8, choice, seed=0))[:, 3:]
    assert drawn.max() < 9
    assert len(np.unique(drawn)) > 1


def test_the_top_k_are_chosen_among_the_tokenizers_entries():
    """The likeliest of all is no entry, and takes no place."""
    logits = jnp.tile(jnp.array([0.5, 2.0, -1.0, 9.0]), (200, 1))
    assert set(np.unique(Choice(1.0, 2, entries=3)(jax.random.key(0), logits))) == {0, 1}


def test_a_continuation_ends_before_a_stop_and_others_go_on(trained):
    choice = Choice(temperature=2.0, top_k=0)
    whole = sample(trained, [5, 40, 7], 12, 3, choice, seed=0)
    stops = (whole[0][6], whole[1][9])
    ended = sample(trained, [5, 40, 7], 12, 3, choice, seed=0, stops=stops)
    firsts = [min([place for place in range(3, 15) if text[place] in stops], default=15) for text in whole]
    assert ended == [text[:first] for text, first in zip(whole, firsts, strict=True)]
    assert len(set(firsts)) > 1


def test_a_stop_in_the_prompt_ends_nothing(trained):
    text = sample(trained, [5, 40, 7], 4, 1, GREEDY, seed=0)
    assert sample(trained, [5, 40, 7], 4, 1, GREEDY, seed=0, stops=(40,)) == text
    assert 40 not in text[0][3:]


def test_nothing_is_computed_after_all_have_stopped(trained):
    moves = []
    written = sample(trained, [5, 40, 7], 8, 1, GREEDY, seed=0)[0][3:]
    stop = max(written, key=written.index)
    sample(trained, [5, 40, 7], 8, 1, GREEDY, seed=0, stops=(stop,), moving=lambda: moves.append(1))
    assert len(moves) == written.index(stop) + 1
    assert len(moves) > 3


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("top_k", [0, 2, 3, 4, 5])
def test_frequencies_are_those_of_the_softmax(temperature, top_k):
    """Of the logits divided by the temperature, over the `top_k` likeliest."""
    logits, rows = np.array([0.5, 2.0, -1.0, 1.0]), 20_000
    drawn = Choice(temperature, top_k)(jax.random.key(0), jnp.tile(logits.astype(np.float32), (rows, 1)))
    kept = np.argsort(-logits)[: top_k or None]
    wanted = np.zeros(4)
    wanted[kept] = np.exp(logits[kept] / temperature)
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / rows, wanted / wanted.sum(), atol=0.015)
