"""The rows of conversations and which of their tokens are learned equal those made with transformers, by template."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, processors

from jaxdist.data.chats.forms import FORMS, conversation_of
from jaxdist.data.chats.learned_tokens import tokens_of
from jaxdist.data.chats.rendering import Renderer
from jaxdist.huggingface.given_tokenizer import load_tokenizer

GOLDEN = Path(__file__).parent / "golden"
"""Made by `scripts/golden_chats.py`."""

TOKENIZERS = Path(__file__).parents[2] / "huggingface" / "golden_tokenizers"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.json"))
CONVERSATIONS = [json.loads(line) for line in (GOLDEN / "conversations.jsonl").read_text().splitlines()]


def expected(name: str) -> dict:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def tokenizer_of(name: str) -> Tokenizer:
    tokenizer = load_tokenizer((TOKENIZERS / expected(name)["tokenizer"] / "tokenizer.json").read_text())
    special = ["<s>", "</s>", *expected(name)["special"]]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def renderer_of(name: str, tokenizer: Tokenizer) -> Renderer:
    special = tuple(token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special)
    template = (GOLDEN / "templates" / f"{name}.jinja").read_text()
    return Renderer(template, name, (("bos_token", "<s>"), ("eos_token", "</s>")), special, "<s>", "</s>", "assistant")


def rows_of(name: str, row: dict, tokenizer: Tokenizer) -> list[tuple[list[int], list[bool]]]:
    """The rows of a conversation, each as its ids and which are learned; none where it is refused."""
    try:
        rendered = renderer_of(name, tokenizer).rows(conversation_of(row, FORMS["messages"]))
    except ValueError:
        return []
    return [(tokens.ids.tolist(), tokens.learned.tolist()) for tokens in tokens_of(tokenizer, rendered)]


def golden(rows: list[dict] | str) -> list[tuple[list[int], list[bool]]]:
    """The same of a golden file."""
    found = []
    for row in rows:
        ids = list(map(int, row["ids"].split()))
        learned = [any(start <= at < stop for start, stop in row["learned"]) for at in range(len(ids))]
        found.append((ids, learned))
    return found


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_learned_tokens_are_those_of_transformers(name, trims):
    tokenizer = tokenizer_of(name)
    if trims and expected(name)["tokenizer"] != "llama":
        # Some tokenizers leave spaces out of the places of tokens; that changes no token.
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    for number, (row, rows) in enumerate(zip(CONVERSATIONS, expected(name)["rows"], strict=True)):
        assert rows_of(name, row, tokenizer) == golden(rows), (name, number)


@pytest.mark.parametrize("name", NAMES)
def test_every_answer_that_is_learned_ends_with_a_special_token(name):
    tokenizer = tokenizer_of(name)
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    for rows in expected(name)["rows"]:
        for row in rows:
            ids = list(map(int, row["ids"].split()))
            assert row["learned"]
            assert all(ids[stop - 1] in special for _, stop in row["learned"])


ENDS = dict.fromkeys(("chatml", "nemotron", "phi4", "qwen3"), "<|im_end|>")
ENDS |= dict.fromkeys(("alpaca", "deepseek_v3", "mistral_v1", "mistral_v3", "mistral_v7", "phi3", "zephyr"), "</s>")
ENDS |= {"cohere": "<|end_of_turn|>", "deepseek_r1": "", "gemma": "<end_of_turn>", "gemma4": "<turn|>"}
ENDS |= {"glm": "<|user|>", "glm_thinking": "<|user|>", "gpt_oss": "<|return|>", "llama": "<|eot_id|>"}


@pytest.mark.parametrize("name", NAMES)
def test_a_model_stops_where_its_answers_end(name):
    assert renderer_of(name, tokenizer_of(name)).end_of_answers() == ENDS[name]
