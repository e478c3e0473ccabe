"""Tokens at the borders of what is learned."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from jaxdist.data.chats.learned_tokens import tokens_of
from jaxdist.data.chats.rendering import Rendered

END = "<end>"


def tokenizer(trims: bool) -> Tokenizer:
    """A byte-level BPE with tokens of several line breaks, and of several spaces."""
    merges = [("Ċ", "Ċ"), ("Ġ", "Ġ"), ("c", "d"), ("Ġ", "cd")]
    entries = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    bpe = Tokenizer(models.BPE({entry: number for number, entry in enumerate(entries)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=trims)
    bpe.add_special_tokens([AddedToken(END, special=True)])
    return bpe


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize(
    ("before", "answer"),
    [("a\n", "\nb"), ("a ", "  c"), ("a ", "cd"), ("c", "d"), ("a\n", "b"), ("é", "🙂"), ("", "b")],
)
def test_both_sides_of_a_border_are_encoded_as_when_a_model_answers(before, answer, trims):
    bpe = tokenizer(trims)
    text = f"{before}{answer}{END}"
    (found,) = tokens_of(bpe, [Rendered(f"{text} c", ((len(before), len(text)),))])
    parts = [bpe.encode(part).ids for part in (before, f"{answer}{END}", " c")]
    assert found.ids.tolist() == [number for part in parts for number in part]
    assert found.learned.tolist() == [which == 1 for which, part in enumerate(parts) for _ in part]


def test_the_texts_above_have_tokens_that_lie_across_their_borders():
    bpe = tokenizer(trims=False)
    assert bpe.encode("a\n\nb").ids != bpe.encode("a\n").ids + bpe.encode("\nb").ids
    assert bpe.encode("cd").ids != bpe.encode("c").ids + bpe.encode("d").ids
