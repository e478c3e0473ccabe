"""Pairs of a better and a worse answer: their forms, their rows, what is left out, and what is refused."""

import json

import numpy as np
import pytest

from jaxdist.config import DataConfig, RequestError
from jaxdist.data.chats.forms import FORMS, conversation_of, known_form
from jaxdist.data.corpus import open_corpus
from jaxdist.huggingface.given_tokenizer import read_tokenizer
from tests.data.chats.made import json_lines, tokenizer_folder

ASK = {"role": "user", "content": "2 + 2?"}
GOOD = {"role": "assistant", "content": "4."}
BAD = {"role": "assistant", "content": "the mesh."}
TURNS = "\n\nHuman: 2 + 2?\n\nAssistant:"
S, VOCAB = 64, 400


def read(row: dict):
    form = known_form(row)
    assert form is not None
    assert form.name == "preference"
    found = conversation_of(row, form)
    assert found.rejected
    return found


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": "2 + 2?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD], "score_chosen": 8.0},
        {"prompt": "2 + 2?", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": [ASK], "chosen": "4.", "rejected": "the mesh."},
    ],
)
def test_pairs_of_messages_share_what_they_answer(row):
    found = read(row)
    assert found.messages == (ASK, GOOD)
    assert found.rejected.messages == (ASK, BAD)
    assert found.answered == found.rejected.answered == 1


def test_the_answers_begin_where_the_conversations_part():
    longer = [ASK, GOOD, {"role": "user", "content": "Sure?"}]
    found = read({"chosen": [*longer, GOOD], "rejected": [*longer, BAD, ASK, GOOD]})
    assert found.answered == 3


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": TURNS, "chosen": " 4.", "rejected": " 5 or so."},
        {"chosen": TURNS + " 4.", "rejected": TURNS + " 5 or so."},
        # What the answers share belongs to them.
        {"chosen": TURNS + " It is 4.", "rejected": TURNS + " It is 5."},
    ],
)
def test_pairs_of_texts_continue_a_prompt_or_share_the_turns_up_to_an_answer(row):
    found = read(row)
    assert found.continued[0] == found.rejected.continued[0] == TURNS
    assert found.continued[1] == row["chosen"].removeprefix(TURNS)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"chosen": [ASK, GOOD], "rejected": [{**ASK, "content": "3?"}, BAD]}, "nothing that its"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "nothing that its"),
        ({"chosen": "4.", "rejected": "5."}, 'share no beginning up to an "Assistant:"'),
        ({"chosen": [ASK, GOOD], "rejected": [ASK, GOOD]}, "the same answer"),
        ({"chosen": [ASK, GOOD], "rejected": [ASK]}, "without an answer"),
        ({"chosen": [ASK, GOOD], "rejected": "5."}, 'a text and a list as its "chosen" and "rejected"'),
        ({"prompt": "", "chosen": "4.", "rejected": "5."}, 'an empty "prompt"'),
        ({"prompt": 3, "chosen": "4.", "rejected": "5."}, 'no text as its "prompt"'),
        ({"prompt": "x", "chosen": "4.", "rejected": "\udfff"}, "half of a surrogate pair"),
        ({"prompt": "x", "chosen": "4.", "rejected": None}, 'no "rejected"'),
    ],
)
def test_what_is_wrong_with_a_pair_is_said(row, reason):
    with pytest.raises(ValueError) as raised:
        conversation_of(row, FORMS["preference"])
    assert reason in str(raised.value)


@pytest.fixture
def open_(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))

    def call(rows: list, template: str = "chatml", pairs: bool = True, sequence: int = S, **knobs):
        folder = tmp_path / f"tokenizer-{template}"
        if not folder.exists():
            tokenizer_folder(folder, template)
        (tmp_path / "pairs.jsonl").write_text(json_lines(rows))
        config = DataConfig(path=str(tmp_path / "pairs.jsonl"), tokenizer=folder, **knobs)
        return open_corpus(config, VOCAB, sequence, pairs=pairs)

    return call


def pair(number: int, words: int = 1) -> dict:
    ask = {"role": "user", "content": f"{number}?"}
    return {
        "chosen": [ask, {"role": "assistant", "content": f"{number}."}],
        "rejected": [ask, {"role": "assistant", "content": f"{number + 1}" + " or so" * words}],
    }


PAIRS = [pair(number) for number in range(40)]


def answers(found, number: int) -> list[str]:
    """What both rows of a pair learn."""
    rows = found.train.read(np.array([2 * number, 2 * number + 1]))
    tokenizer = read_tokenizer(found.train.tokens.path.parent / "tokenizer.json").load()
    return [tokenizer.decode(row[row >= 0].tolist(), skip_special_tokens=False) for row in rows["labels"]]


def test_the_rows_of_a_pair_are_neighbours_and_learn_the_answer_alone(open_):
    found = open_(PAIRS)
    assert found.train.count + found.validation.count == 80
    assert found.train.count % 2 == found.validation.count % 2 == 0
    assert "40 pairs" in found.source
    assert "cut into one row an answer" not in found.source
    for number in range(10):
        assert answers(found, number) == [f"{number}.<|im_end|>", f"{number + 1} or so<|im_end|>"]


def test_answers_in_the_question_are_not_learned(open_):
    before = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1."}]
    found = open_([{key: [*before, *turns] for key, turns in row.items()} for row in PAIRS])
    assert answers(found, 0) == ["0.<|im_end|>", "1 or so<|im_end|>"]


def test_texts_need_no_template(open_):
    found = open_(
        [{"prompt": TURNS, "chosen": " 4.", "rejected": f" {number}, no."} for number in range(40)], template=""
    )
    assert answers(found, 0) == [" 4.<|im_end|>", " 0, no.<|im_end|>"]


def test_a_pair_that_is_too_long_is_left_out_with_both_of_its_rows(open_):
    rows = [pair(number, words=40 if number == 3 else 1) for number in range(40)]
    found = open_(rows)
    assert "1 pair longer than 64 tokens left out" in found.source
    assert [answers(found, number)[0] for number in (2, 3)] == ["2.<|im_end|>", "4.<|im_end|>"]
    cut = open_(rows, long="cut")
    assert "1 pair cut at 64 tokens" in cut.source
    assert answers(cut, 3)[0] == "3.<|im_end|>"
    assert answers(cut, 4)[1] == "5 or so<|im_end|>"


def test_damaged_pairs_stop_the_run_or_are_counted(open_):
    rows = [*PAIRS[:5], {"chosen": [ASK, GOOD], "rejected": [{**ASK, "content": "3?"}, BAD]}, *PAIRS[5:]]
    with pytest.raises(RequestError, match=r"line 6 of .* has nothing that its \"chosen\" and \"rejected\" share"):
        open_(rows)
    found = open_(rows, on_error="skip")
    assert "1 row skipped, the first: line 6" in found.source
    assert answers(found, 5)[0] == "5.<|im_end|>"


def test_pairs_and_objectives_belong_together(open_):
    with pytest.raises(
        RequestError, match=r"holds pairs of a better and a worse answer.* set train.objective to dpo or orpo"
    ):
        open_(PAIRS, pairs=False)
    with pytest.raises(RequestError, match=r"train.objective dpo or orpo learns pairs.* holds conversations"):
        open_([{"messages": [ASK, GOOD]}] * 40)
    with pytest.raises(RequestError, match=r"train.objective dpo or orpo learns pairs.* holds text or tokens"):
        open_([{"text": json.dumps(ASK)}] * 40)


@pytest.mark.parametrize("key", ["chosen", "rejected"])
def test_rows_with_one_answer_alone_are_refused_by_row_or_counted(open_, key):
    """Also where the first row is one, by which the form is known."""
    other = {"chosen": "rejected", "rejected": "chosen"}[key]
    half = {"prompt": "2 + 2?", key: [GOOD]}
    for row in (half, {**half, other: None}):
        with pytest.raises(RequestError, match=rf'line 1 of .* has no "{other}" \(data.form preference\); correct the'):
            open_([row, *PAIRS])
    assert "1 row skipped, the first: line 1" in open_([half, *PAIRS], on_error="skip").source


def test_a_template_that_changes_earlier_turns_cannot_write_an_answer_of_several(open_):
    several = [*pair(1)["rejected"], ASK, GOOD]
    with pytest.raises(RequestError, match="an answer has several turns, of which the template changes the earlier"):
        open_([{"chosen": pair(1)["chosen"], "rejected": several}] * 40, template="phi3")
