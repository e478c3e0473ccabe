"""Questions as rows of tokens, and what their scores are worth."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxdist.config import RequestError
from jaxdist.data.multiple_choice import Question, encode, read_questions, results, rows_of, scored
from jaxdist.data.tokenizing.encoder import train_tokenizer
from jaxdist.huggingface.special_tokens import SpecialTokens
from tests.data.files import save_tokenizer

ROW = {"context": "The sky is", "choices": [" blue", " green"], "label": 0}
NOTHING, END, BEGIN = SpecialTokens(), SpecialTokens(eos=7), SpecialTokens(bos=8, eos=7)


@pytest.fixture(scope="module")
def bytewise() -> Tokenizer:
    """A tokenizer of single bytes, in which a token begins wherever a text is cut."""
    return Tokenizer.from_str(train_tokenizer(iter([]), 1, 257))


@pytest.fixture
def words(tmp_path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(save_tokenizer(tmp_path / "words.json", 100)))
    tokenizer.no_truncation()
    return tokenizer


def question(context: str, *choices: str, label: int = 0) -> Question:
    return Question(context, choices, label, "line 1 of 'q.jsonl'")


def test_questions_are_read_in_order(write):
    other = json.dumps(ROW | {"label": 1})[:-1] + ', "id": ' + "9" * 5000 + "}"
    path = write("q.jsonl", "\ufeff" + json.dumps(ROW) + "\n\n\ufeff" + other + "\n")
    first, second = read_questions(path)
    assert first == ("The sky is", (" blue", " green"), 0, f"line 1 of --choices '{path}'", 1)
    assert (second.label, second.where) == (1, f"line 3 of --choices '{path}'")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is not JSON (Expecting property name enclosed in double quotes, column 2); write a line such as"),
        ("[" * 99_999, "is not JSON (its values are nested too deeply); write a line such as"),
        ('{"context": "a", "choices": ["a", "b"], "label": ' + "1" * 5000 + "}", "has the label Infinity; give the"),
        (ROW | {"label": list(range(99))}, "has the label [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 1; give the number"),
        (b"\xff", "is not utf-8 text (byte 1 of it); convert the file"),
        ("[]", "is no object; write a line such as"),
        ('{"choices": ["a", "b"]}', "has no context and no label; write a line such as"),
        (ROW | {"context": 3}, 'has a "context" that is not text; put it in quotes'),
        (ROW | {"context": "\ud800"}, 'has a "context" that is not text; put it in quotes'),
        (ROW | {"choices": "ab"}, 'has "choices" that are not a list of texts'),
        (ROW | {"choices": ["a", 1]}, 'has "choices" that are not a list of texts'),
        (ROW | {"choices": ["a"]}, "has 1 choice; give at least 2"),
        (ROW | {"choices": ["a", ""]}, "has an empty text as choice 1; give each choice at least one character"),
        (ROW | {"label": 2}, "has the label 2; give the number of the right choice, 0 to 1"),
        (ROW | {"label": True}, "has the label true; give the number of the right choice, 0 to 1"),
        (ROW | {"label": "0"}, 'has the label "0"; give the number of the right choice, 0 to 1'),
    ],
)
def test_a_wrong_line_is_named(write, line, said):
    text = json.dumps(line) if isinstance(line, dict) else line
    path = write("q.jsonl", json.dumps(ROW).encode() + b"\n" + (text if isinstance(text, bytes) else text.encode()))
    with pytest.raises(RequestError) as error:
        read_questions(path)
    (problem,) = error.value.problems
    assert problem.startswith(f"line 2 of --choices '{path}' {said}")


def test_all_wrong_lines_are_told_at_once(write):
    with pytest.raises(RequestError) as error:
        read_questions(write("q.jsonl", "1\n2\n"))
    assert [problem.partition(" of ")[0] for problem in error.value.problems] == ["line 1", "line 2"]


def test_a_file_that_is_not_there_or_empty_is_refused(write, tmp_path):
    with pytest.raises(RequestError, match=r"nowhere' is not a file; give the path of a .jsonl file"):
        read_questions(tmp_path / "nowhere")
    with pytest.raises(RequestError, match=r"holds no question; write a line such as"):
        read_questions(write("q.jsonl", "\n"))


def test_a_choice_is_what_follows_the_tokens_of_its_context(words):
    assert encode(words, BEGIN, "w1 w2", " w3 w4") == ([8, 1, 2], [3, 4], False)
    assert encode(words, END, "w1 w2", " w3 w4") == ([1, 2], [3, 4], False)


def test_spaces_at_the_end_of_a_context_belong_to_the_choice(bytewise):
    before, after, _ = encode(bytewise, NOTHING, "ab \n", "c")
    assert (bytewise.decode(before), bytewise.decode(after)) == ("ab", " \nc")


def test_an_empty_context_is_bos_or_else_the_end_of_a_text(words):
    assert encode(words, BEGIN, " ", "w3") == ([8], [3], False)
    assert encode(words, END, "", "w3") == ([7], [3], False)
    with pytest.raises(RequestError, match=r"choice 0 of line 1 of 'q.jsonl' follows an empty context"):
        rows_of([question("", "w3", "w4 w5")], words, NOTHING, 4)


def test_only_the_tokens_of_the_choice_are_labels(words):
    rows = rows_of([question("w1 w2", " w3 w4", " w5")], words, BEGIN, 6)
    assert rows.tokens.tolist() == [[8, 1, 2, 3, 0, 0], [8, 1, 2, 0, 0, 0]]
    assert rows.labels.tolist() == [[-1, -1, 3, 4, -1, -1], [-1, -1, 5, -1, -1, -1]]
    assert (rows.longest, rows.cut) == (4, 0)


def test_a_context_that_is_too_long_is_cut_on_the_left(words):
    """A row of 3 tokens predicts the one after its last, so it holds 4 of them."""
    rows = rows_of([question("w1 w2 w3", " w4 w5", " w6"), question("w1", " w2", " w3")], words, BEGIN, 3)
    assert rows.tokens[:2].tolist() == [[2, 3, 4], [1, 2, 3]]
    assert rows.labels[:2].tolist() == [[-1, 4, 5], [-1, -1, 6]]
    assert (rows.longest, rows.cut) == (3, 1)


def test_a_choice_that_no_row_holds_is_refused(words):
    with pytest.raises(RequestError, match=r"choice 1 of line 1 of 'q.jsonl' has 4 tokens, but model.sequence is 3"):
        rows_of([question("w1", " w2 w3 w4", " w2 w3 w4 w5")], words, BEGIN, 3)


def test_a_choice_that_grows_into_the_last_word_of_its_context_is_refused(words):
    with pytest.raises(RequestError, match=r"choice 0 of line 1 of 'q.jsonl' has no token of its own after its"):
        rows_of([question("w1", "0", " w2")], words, BEGIN, 3)


def test_a_score_by_bytes_counts_utf8():
    """Both choices have three characters; nine bytes pay for a log probability three times as low."""
    score = scored([question("", "日本語", "abc", label=0)], np.array([-8.9, -3.0]))
    assert (score.acc, score.acc_norm) == (0, 1)
    assert (score.acc_stderr, score.acc_norm_stderr) == (None, None)


def test_of_equal_scores_the_first_counts():
    right, wrong = question("", "a", "b", label=0), question("", "a", "b", label=1)
    score = scored([right, wrong, right, wrong], np.full(8, -1.0))
    assert score.acc == score.acc_norm == 0.5
    assert score.acc_stderr == pytest.approx(np.sqrt(0.25 * 4 / 3 / 4))
    assert str(score) == "acc 50.0% ± 28.9%  acc_norm 50.0% ± 28.9%"


def test_a_file_that_is_too_large_is_refused_before_it_is_read(write):
    path = write("q.jsonl", "")
    with path.open("wb") as file:
        file.truncate(3 << 30)  # with a hole for its content
    with pytest.raises(RequestError, match=r"q.jsonl' has 3.0 GiB, and at most 256 MiB of questions are read"):
        read_questions(path)


def spanned() -> list[Question]:
    """Of the first, "w1" and "0" are one word together; of the second, "w1" and the first of "0 w5"."""
    first = question("w1", "0", " w2")._replace(line=1)
    return [first, question("w1", "0 w5", " w2")._replace(line=2), question("w1", " w3", " w4")._replace(line=3)]


def test_the_sentence_counts_the_questions_and_names_the_ways_out(words):
    with pytest.raises(RequestError) as error:
        rows_of(spanned(), words, BEGIN, 6)
    named, last = error.value.problems
    assert named.startswith("choice 0 of line 1 of 'q.jsonl' has no token of its own after its context")
    assert last.startswith("1 of 3 questions cannot be scored; --choices-skip leaves them out; --choices-apart ")


def test_questions_that_cannot_be_scored_are_left_out_on_request(words):
    rows = rows_of(spanned(), words, BEGIN, 6, skip=True)
    assert [one.line for one in rows.questions] == [2, 3]
    ((left, why),) = rows.left_out
    assert (left.line, rows.spanning) == (1, 1)
    assert why.startswith("choice 0 of line 1 of 'q.jsonl' has no token of its own")
    # As lm-evaluation-harness has it: the context's own tokens, then those of both after as many.
    assert rows.tokens[0].tolist() == [8, 1, 0, 0, 0, 0]
    assert rows.labels[0].tolist() == [-1, 5, -1, -1, -1, -1]
    with pytest.raises(RequestError, match="cannot be scored; --choices-apart"):
        rows_of(spanned()[:1], words, BEGIN, 6, skip=True)  # there is no other question


def test_apart_no_token_spans_the_join(words):
    rows = rows_of(spanned(), words, BEGIN, 6, apart=True)
    assert (len(rows.questions), rows.spanning, rows.left_out) == (3, 0, ())
    assert rows.tokens[0].tolist() == [8, 1, 0, 0, 0, 0]
    assert rows.labels[0].tolist() == [-1, words.token_to_id("?"), -1, -1, -1, -1]  # "0" alone is no word


def test_each_question_has_its_scores_and_both_answers():
    questions = [question("", "a", "bcd", label=1)._replace(line=4), question("", "a", "b")._replace(line=9)]
    first, second = results(questions, np.array([-2.0, -3.0, -1.5, -1.0]))
    assert first == {
        "line": 4, "label": 1, "answer": 0, "answer_norm": 1, "log_probabilities": [-2.0, -3.0], "bytes": [1, 3],
    }  # fmt: skip
    assert (second["line"], second["answer"], second["answer_norm"]) == (9, 1, 1)
