"""Generation with a key-value cache is generation by whole passes: the same logits and the same tokens, on any mesh."""

import itertools

import jax
import numpy as np
import pytest

from jaxdist import generate
from jaxdist.config import RequestError
from jaxdist.planning import cache_memory
from jaxdist.planning.cache_memory import cache_bytes, weight_bytes
from jaxdist.programs import target
from jaxdist.programs.cross_compile import compile_apart
from jaxdist.programs.kernels import kernels
from jaxdist.training.decoding import Choice, Decoding, check_fits
from jaxdist.training.forward.cached import CachedForward
from jaxdist.training.run import Run
from tests.huggingface.golden import GOLDEN
from tests.tiers import exhaustive, thinned
from tests.training.decoding import (
    GREEDY,
    PROMPTS,
    SEQUENCE,
    VOCAB,
    config_of,
    continued,
    decoding_of,
    lowered_step,
    whole_pass,
)


@pytest.fixture(scope="module")
def alone() -> Decoding:
    return decoding_of("llama")


def assert_as_whole_passes(family: str, decoding: Decoding, prompts: list[list[int]], atol: float = 1e-5) -> None:
    texts, logits = continued(decoding, prompts)
    wanted = whole_pass(family)(texts)
    for prompt, text, found, expected in zip(prompts, texts, logits, wanted, strict=True):
        expected = expected[len(prompt) - 1 : -1]
        np.testing.assert_allclose(found, expected, atol=atol)
        assert text[len(prompt) :] == list(np.argmax(expected, axis=-1))
    assert len(set(texts[0])) >= 8, "a text that repeats itself would hide a cache that is not read"


def test_cached_tokens_and_logits_are_those_of_whole_passes(alone):
    """At every position, of prompts that are packed into shared rows."""
    assert_as_whole_passes("llama", alone, PROMPTS)
    assert_as_whole_passes("llama", alone, PROMPTS[:1] + PROMPTS[3:])


@pytest.mark.parametrize(
    ("family", "mesh", "more"),
    thinned(
        [
            ("llama", "1x8x1", {}),
            ("gpt", "2x2x1", {"parallel": {"sequence": True, "zero": 1}}),
            ("moe", "expert=2,model=2", {}),
            ("gpt", "1x1x2", {"pipeline": {"schedule": "interleaved"}, "parallel": {"zero": 3}}),
            ("llama", "replica=2,context=2", {"parallel": {"zero": 3, "replica_zero": True}}),
            ("window", "context=2,model=2", {"parallel": {"context": "ring", "sequence": True}}),
            ("parts", "2x2x1", {}),
            ("branches", "model=2,pipeline=2", {}),
            ("lora", "1x8x1", {}),
            ("latent", "context=2,expert=2,model=2", {"parallel": {"zero": 3}}),
            ("gemma", "context=2,model=2", {"parallel": {"context": "ring", "sequence": True}}),
        ],
        8,
    )
    # The last rows train otherwise, and hold the same weights.
    + exhaustive(
        [
            ("gpt", "data=2,context=2", {"parallel": {"zero": 3}}),
            ("llama", "data=2,pipeline=2", {"parallel": {"zero": 2}}),
            ("latent", "expert=2,pipeline=2", {"parallel": {"zero": 3}}),
            ("window", "1x1x2", {}),
            ("lora", "2x1x2", {"parallel": {"zero": 3}}),
            ("latent", "1x1x1", {}),
            ("gemma", "1x1x1", {}),
            ("gpt-oss", "context=2,model=2", {"parallel": {"context": "ring", "sequence": True}}),
            ("llama", "2x1x1", {"train": {"local_steps": 2}}),
            ("llama", "1x1x2", {"pipeline": {"schedule": "pipedream"}}),
        ]
    ),
    ids=str,
)
def test_a_mesh_generates_what_one_device_does(family, mesh, more, monkeypatch):
    """Tokens and logits; and its cache and weights take the predicted bytes. At ZeRO 3, each layer gathers its own."""
    monkeypatch.setattr(cache_memory, "keeps_whole", lambda *_: False)
    decoding = decoding_of(family, mesh, **more)
    assert_as_whole_passes(family, decoding, PROMPTS)
    cache = decoding.start(PROMPTS, GREEDY, jax.random.key(0)).cache
    assert own_bytes(cache) == decoding.cache_bytes(len(PROMPTS))
    assert own_bytes(decoding.weights) == weight_bytes(decoding.run.sharded, decoding.run.capacity)


@pytest.mark.parametrize(
    ("family", "mesh", "more"),
    [
        ("gemma", "2x2x1", {"parallel": {"zero": 3}}),
        pytest.param("latent", "context=2,expert=2,model=2", {}, marks=pytest.mark.slow),
        *exhaustive([("gemma", "context=2,model=2", {"parallel": {"context": "ring", "sequence": True}})]),
        *exhaustive([("lora", "1x8x1", {}), ("parts", "1x1x1", {}), ("gpt-oss", "2x1x1", {})]),
    ],
    ids=str,
)
def test_layers_that_are_written_out_generate_the_same(family, mesh, more, monkeypatch):
    """As on GPUs, where each layer has weights and a cache of its own."""
    monkeypatch.setattr(CachedForward, "apart", True)
    decoding = decoding_of(family, mesh, **more)
    assert_as_whole_passes(family, decoding, PROMPTS)
    cache = decoding.start(PROMPTS, GREEDY, jax.random.key(0)).cache
    assert len(cache) == decoding.run.config.model.layers
    assert own_bytes(cache) == decoding.cache_bytes(len(PROMPTS))
    assert own_bytes(decoding.weights) == weight_bytes(decoding.run.sharded, decoding.run.capacity)


@pytest.mark.slow
@pytest.mark.skipif(not target.available(), reason="JAX's CUDA plug-in is not installed: jaxdist[target]")
def test_a_step_on_a_gpu_reads_weights_and_cache_once():
    """A loop over the layers would cut them out of stacks first, and move three times as much."""
    program = compile_apart(lowered_step, "h100", 1)
    assert program.argument_bytes < kernels(program.text).bytes < 1.25 * program.argument_bytes


@pytest.mark.parametrize("mesh", ["2x2x1", pytest.param("data=2,pipeline=2", marks=pytest.mark.slow)])
def test_weights_of_zero_3_are_gathered_once_where_they_fit(mesh, monkeypatch):
    """A step gathers none."""
    decoding = decoding_of("gpt", mesh, parallel={"zero": 3})
    assert_as_whole_passes("gpt", decoding, PROMPTS)
    assert own_bytes(decoding.weights) == weight_bytes(decoding.run.sharded, decoding.run.capacity)
    assert not step_gathers(decoding)
    monkeypatch.setattr(Run, "capacity", 2 * own_bytes(decoding.weights) - 1)
    layered = decoding_of("gpt", mesh, parallel={"zero": 3})
    assert own_bytes(layered.weights) < own_bytes(decoding.weights)
    assert step_gathers(layered)


def step_gathers(decoding: Decoding) -> int:
    """How many all-gathers are written in the program of a step."""
    drawn = decoding.start(PROMPTS, GREEDY, jax.random.key(0))
    arguments = (drawn.cache, drawn.tokens, drawn.lengths, jax.random.key(0), np.int32(1), drawn.seen)
    with jax.set_mesh(decoding.run.mesh):
        traced = decoding.extend.trace(GREEDY, drawn.room, decoding.weights, *arguments)
    return str(traced.jaxpr).count("all_gather")


def own_bytes(tree) -> int:
    """What the first device holds."""
    return sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(tree))


def test_the_bytes_of_a_cache_are_those_of_the_papers_formula(alone):
    """2 L S K H numbers for each row."""
    assert alone.cache_bytes(3) == 2 * 3 * SEQUENCE * 2 * 2 * 4 * 3
    assert own_bytes(alone.start(PROMPTS[:3], GREEDY, jax.random.key(0)).cache) == alone.cache_bytes(3)


def test_the_rows_that_make_a_batch_divide_have_a_cache():
    run = Run(config_of("llama", "8x1x1"), dry=True, batch=False)
    whole = Run(config_of("llama"), dry=True, batch=False)
    assert cache_bytes(run.sharded, 9) == 2 * cache_bytes(whole.sharded, 1)


def test_devices_share_a_cache():
    """Rows over data, slots over context, heads over model until each device has one, layers over stages."""
    alone = Run(config_of("llama"), dry=True)

    def on(mesh: str) -> float:
        run = Run(config_of("llama", mesh), dry=True, batch=False)
        return cache_bytes(run.sharded, 8) / cache_bytes(alone.sharded, 8)

    shares = {"2x1x1": 1 / 2, "context=2": 1 / 2, "1x2x1": 1 / 2, "1x8x1": 1 / 2, "1x1x3": 1 / 3, "1x1x2": 2 / 3}
    assert {mesh: on(mesh) for mesh in shares} == pytest.approx(shares)


@pytest.mark.parametrize(
    ("family", "mesh"),
    [("llama", "1x1x1"), ("gemma", "1x1x1"), pytest.param("llama", "context=2", marks=pytest.mark.slow)],
)
def test_a_cache_holds_what_will_be_drawn_and_no_more(family, mesh):
    """Two prompts of which 3 tokens are drawn need 12 slots of the 24; the tokens are the same."""
    decoding = decoding_of(family, mesh)
    whole = list(itertools.islice(decoding.draw(PROMPTS[:2], GREEDY, seed=0), 3))
    few = list(decoding.draw(PROMPTS[:2], GREEDY, seed=0, most=3))
    np.testing.assert_array_equal(few, whole)
    drawn = decoding.start(PROMPTS[:2], GREEDY, jax.random.key(0), most=3)
    assert drawn.room == 12
    assert own_bytes(drawn.cache) == decoding.cache_bytes(2, 12) < decoding.cache_bytes(2)


def test_there_is_one_program_for_each_bucket_and_one_for_steps():
    decoding = decoding_of("llama")
    for prompts in (PROMPTS[:1], [[1, 2]], [list(range(14))], [list(range(17))], [list(range(20))]):
        assert len(list(decoding.draw(prompts, GREEDY, seed=0))) == SEQUENCE - len(prompts[0])
    assert decoding.prefill._cache_size() == 2  # of 16 and of 24 tokens
    assert decoding.extend._cache_size() == 1


def test_a_step_writes_into_the_cache_that_it_gets(alone):
    """There is never a second one."""
    key = jax.random.key(0)
    drawn = alone.start(PROMPTS, GREEDY, key)
    with jax.set_mesh(alone.run.mesh):
        arguments = (drawn.cache, drawn.tokens, drawn.lengths, key, np.int32(1), drawn.seen)
        step = alone.extend.lower(GREEDY, drawn.room, alone.weights, *arguments)
    assert step.compile().memory_analysis().alias_size_in_bytes == own_bytes(drawn.cache)


def test_a_row_ends_where_the_sequence_does(alone):
    tokens = np.stack(list(alone.draw(PROMPTS, GREEDY, seed=0)))
    assert len(tokens) == SEQUENCE - 1
    for prompt, drawn in zip(PROMPTS, tokens.T, strict=True):
        room = SEQUENCE - len(prompt)
        assert (drawn[:room] >= 0).all()
        assert (drawn[room:] == -1).all()


def test_a_prompt_that_fills_the_sequence_has_no_next_token(alone):
    assert list(alone.draw([[1] * SEQUENCE], GREEDY, seed=0)) == []


def test_draws_depend_on_the_seed_the_row_and_the_number_alone(alone):
    """And not on what is in other rows."""
    choice = Choice(temperature=1.0, top_k=0)
    drawn = np.stack(list(alone.draw(PROMPTS, choice, seed=3)))
    again = np.stack(list(alone.draw([PROMPTS[0], [7, 7], [1], PROMPTS[3]], choice, seed=3)))
    other = np.stack(list(alone.draw(PROMPTS, choice, seed=4)))
    same = np.stack(list(alone.draw([PROMPTS[0]] * 4, choice, seed=3)))
    np.testing.assert_array_equal(drawn[:, [0, 3]], again[:, [0, 3]])
    assert (drawn[:, 0] != other[:, 0]).mean() > 0.8
    assert (same[:, 0] != same[:, 1]).mean() > 0.8


@pytest.mark.slow
def test_draws_are_the_same_on_another_mesh(alone):
    choice = Choice(temperature=1.0, top_k=40, top_p=0.9)
    one, two = (np.stack(list(of.draw(PROMPTS, choice, seed=3))) for of in (alone, decoding_of("llama", "2x2x1")))
    np.testing.assert_array_equal(one, two)


@pytest.mark.slow
def test_bfloat16_generates_about_what_float32_does():
    """Its cache has half of the bytes, and the logits of two tokens agree to the rounding of bfloat16."""
    whole, half = decoding_of("llama", "1x2x1"), decoding_of("llama", "1x2x1", precision="bfloat16")
    key = jax.random.key(0)
    one, other = (each.start(PROMPTS, GREEDY, key) for each in (whole, half))
    assert own_bytes(other.cache) == half.cache_bytes(4) == whole.cache_bytes(4) // 2
    for _ in range(2):
        exact, rounded = (np.asarray(each.logits, np.float32)[:, :VOCAB] for each in (one, other))
        np.testing.assert_allclose(rounded, exact, atol=0.1 * np.abs(exact).max())
        other = half.step(other._replace(tokens=one.tokens), GREEDY, key, 1)
        one = whole.step(one, GREEDY, key, 1)


def test_a_cache_that_does_not_fit_is_refused_before_anything_is_compiled(monkeypatch):
    decoding = decoding_of("llama")
    needed = decoding.cache_bytes(2) + own_bytes(decoding.weights)
    monkeypatch.setattr(Run, "capacity", needed)
    check_fits(decoding.run, 2)
    with pytest.raises(RequestError, match=r"cache of 3 rows of 24 tokens takes .* KiB on each device"):
        decoding.start(PROMPTS[:3], GREEDY, jax.random.key(0))
    assert decoding.prefill._cache_size() == 0


def test_generate_refuses_it_before_it_reads_weights(monkeypatch):
    monkeypatch.setattr(Run, "capacity", 1000.0)
    monkeypatch.setattr("jaxdist.weights.pretrained.parameters", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(RequestError, match=r"cache of 3 rows of 32 tokens takes"):
        generate.main([str(GOLDEN / "llama31"), "--samples=3", "--model.sequence=32"])


@pytest.mark.parametrize(
    ("prompts", "why"),
    [
        ([[1], []], "prompt 2 is empty; give at least one token to continue"),
        ([[1] * 25], "prompt 1 has 25 tokens, but model.sequence is 24; shorten the prompt"),
    ],
    ids=["empty", "too long"],
)
def test_a_prompt_that_cannot_be_continued_is_refused(alone, prompts, why):
    with pytest.raises(RequestError, match=f"^{why}$"):
        next(alone.draw(prompts, GREEDY, seed=0))


@pytest.mark.parametrize("mesh", ["1x1x1", "2x2x1"])
def test_a_penalty_counts_the_prompt_and_what_was_drawn(mesh):
    """Greedily, on each mesh: the likeliest token by logits from which a plain form takes the penalty."""
    decoding = decoding_of("llama", mesh)
    choice = Choice(0.0, 0, penalty=3.0)
    key = jax.random.key(0)
    texts = [list(prompt) for prompt in PROMPTS[:3]]
    drawn = decoding.start(texts, choice, key)
    changed = 0
    for number in range(1, 8):
        for row, text in enumerate(texts):
            logits = np.asarray(drawn.logits, np.float32)[row, :VOCAB]
            lowered = logits.copy()
            for token in set(text):
                lowered[token] = logits[token] * 3 if logits[token] < 0 else logits[token] / np.float32(3)
            changed += lowered.argmax() != logits.argmax()
            text.append(int(drawn.tokens[row]))
            assert text[-1] == lowered.argmax(), (number, row)
        drawn = decoding.step(drawn, choice, key, number)
    assert changed
