"""Generation where layers are of several kinds: the cache of each is read through its own window."""

import pytest

from tests.kinds import llama_of_several_kinds  # noqa: F401  # used by itself
from tests.training.decoding import PROMPTS, decoding_of
from tests.training.test_decoding import assert_as_whole_passes


@pytest.mark.parametrize("mesh", ["1x1x1", pytest.param("context=2,model=2", marks=pytest.mark.slow)])
def test_cached_tokens_and_logits_are_those_of_whole_passes(mesh):
    assert_as_whole_passes("kinds", decoding_of("kinds", mesh), PROMPTS)
