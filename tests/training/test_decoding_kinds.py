"""Generation where layers are of several kinds: each has a cache of its own, and one with a window holds no more."""

import jax
import pytest

from tests.kinds import llama_of_several_kinds, moe_of_two_forms  # noqa: F401  # used by themselves
from tests.training.decoding import GREEDY, PROMPTS, SEQUENCE, decoding_of
from tests.training.test_decoding import assert_as_whole_passes, own_bytes


@pytest.mark.parametrize(
    ("mesh", "slots"),
    [
        # Five layers of seven have a window of 5 tokens.
        ("1x1x1", 5 * 5 + 2 * SEQUENCE),
        # Two devices cannot share it evenly.
        pytest.param("context=2,model=2", 7 * SEQUENCE / 2, marks=pytest.mark.slow),
        # Each stage has places for four layers, of which the third has no window.
        pytest.param("model=2,pipeline=2", 3 * 5 + SEQUENCE, marks=pytest.mark.slow),
    ],
)
def test_cached_tokens_and_logits_are_those_of_whole_passes(mesh, slots):
    decoding = decoding_of("kinds", mesh)
    assert_as_whole_passes("kinds", decoding, PROMPTS)
    cache = decoding.start(PROMPTS, GREEDY, jax.random.key(0)).cache
    heads = 4 // decoding.run.layout.parts("heads")
    assert own_bytes(cache) == decoding.cache_bytes(len(PROMPTS)) == len(PROMPTS) * slots * 2 * heads * 2 * 4


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ("1x1x1", {}),
        pytest.param("data=2,expert=2,model=2", {"parallel": {"zero": 3}}, marks=pytest.mark.slow),
    ],
)
def test_layers_of_several_forms_have_a_cache_each(mesh, more):
    decoding = decoding_of("forms", mesh, **more)
    assert_as_whole_passes("forms", decoding, PROMPTS)
    cache = decoding.start(PROMPTS, GREEDY, jax.random.key(0)).cache
    assert [len(of_kind.k[0, 0]) for of_kind in cache] == [2, 2]
    assert own_bytes(cache) == decoding.cache_bytes(len(PROMPTS))
