"""Questions with several answers, one of which is right: read from JSON lines, and laid out as rows of tokens.

A choice is scored by the log probabilities of its tokens after those of the context. Context and choice are encoded
together, as lm-evaluation-harness does (Gao et al. 2021): the choice's tokens are those that follow as many tokens as
the context has alone. On request they are encoded apart, so that no token spans their join.
Spaces at the end of the context belong to the choice, because tokens begin with a space.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from tokenizers import Tokenizer

from jaxdist.config import RequestError
from jaxdist.data.readers.json_lines import lines_of, value_of
from jaxdist.data.tokens import IGNORED
from jaxdist.files.json_files import is_unicode
from jaxdist.files.reasons import reading
from jaxdist.huggingface.given_tokenizer import ids_of
from jaxdist.huggingface.special_tokens import SpecialTokens
from jaxdist.output.units import counted, size

EXAMPLE = '{"context": "The sky is", "choices": [" blue", " green"], "label": 0}'
"""A line of such a file."""

SHOWN = 40
"""Characters of a wrong value that a sentence shows."""

LARGEST = 1 << 28
"""Bytes of the largest file of questions that is read. The largest published tasks have some 50 million."""

NAMED = 10
"""Problems of a file that an error names at most."""


class Question(NamedTuple):
    """A context, its possible continuations, and the number of the right one."""

    context: str
    choices: tuple[str, ...]
    label: int
    where: str
    """The line and the file, for messages."""
    line: int = 0
    """The number of the line, from 1."""


@dataclass(frozen=True)
class Rows:
    """The rows of all choices of all questions, in order: each is a context with one of its choices."""

    tokens: Int[np.ndarray, "n S"]
    labels: Int[np.ndarray, "n S"]
    """The token after each that belongs to the choice; -1 elsewhere."""
    longest: int
    """Tokens of a row that the longest one needs."""
    questions: list[Question]
    """The questions that these rows are of."""
    cut: int = 0
    """Questions whose context was cut on the left, so that a row holds it."""
    spanning: int = 0
    """Questions in which a token begins in the context and ends in a choice, which then has the tokens after it."""
    left_out: tuple[tuple[Question, str], ...] = ()
    """Questions that have no rows, each with the reason."""
    note: str | None = None
    """A sentence about how the questions were read, if there is one to tell."""

    @property
    def fingerprint(self) -> str:
        """A hexadecimal hash of all tokens and labels."""
        return hashlib.sha256(self.tokens.tobytes() + self.labels.tobytes()).hexdigest()


class Score(NamedTuple):
    """Shares of questions whose right choice has the highest score, and their standard errors."""

    acc: float
    """The score is the sum of the log probabilities of the choice's tokens."""
    acc_stderr: float | None
    """None for a single question."""
    acc_norm: float
    """The score is that sum over the bytes of the choice in UTF-8."""
    acc_norm_stderr: float | None

    def __str__(self) -> str:
        return (
            f"acc {_with_error(self.acc, self.acc_stderr)}  acc_norm {_with_error(self.acc_norm, self.acc_norm_stderr)}"
        )


def read_questions(path: Path) -> list[Question]:
    """Return the questions of a file with one JSON object on each line, such as `EXAMPLE`; blank lines are skipped.

    Raises `RequestError` with a sentence for each wrong line, of which it names the first `NAMED`.
    """
    if not path.is_file():
        raise RequestError(f"--choices '{path}' is not a file; give the path of a .jsonl file")
    questions = []
    problems: list[str] = []
    # All questions are in memory, as text and as tokens.
    size_of_file = path.stat().st_size
    if size_of_file > LARGEST:
        raise RequestError(
            f"--choices '{path}' has {size(size_of_file)}, and at most {size(LARGEST)} of questions are read at once; "
            f"split it"
        )
    with reading(path), path.open("rb") as file:
        for number, line in lines_of(file):
            try:
                questions.append(_question(line, f"line {number} of --choices '{path}'")._replace(line=number))
            except RequestError as error:
                problems += error.problems
            if len(problems) >= NAMED:
                break
    if problems:
        raise RequestError(*problems[:NAMED])
    if not questions:
        raise RequestError(f"--choices '{path}' holds no question; write a line such as {EXAMPLE}")
    return questions


def rows_of(
    questions: list[Question],
    tokenizer: Tokenizer,
    special: SpecialTokens,
    sequence: int,
    apart: bool = False,
    skip: bool = False,
) -> Rows:
    """Return a row of `sequence` tokens for each choice, filled up on the right.

    A BOS token, if the tokenizer has one, comes before the context. A context that is empty is replaced by BOS, or
    else by the end-of-text token, so that the first token of the choice has something to follow. Of a row that is too
    long the first tokens are left out. With `apart`, context and choice are encoded each by itself. Raises
    `RequestError` with a sentence for each choice that cannot be scored; with `skip`, such questions have no rows.
    """
    pairs: list[Encoded] = []
    answered: list[Question] = []
    left_out: list[tuple[Question, str]] = []
    cut = 0
    own = 0
    spanning = 0
    problems: list[str] = []
    for question in questions:
        own += special.has_own(ids_of(tokenizer, question.context))
        found = [encode(tokenizer, special, question.context, choice, apart) for choice in question.choices]
        wrong = [
            f"choice {number} of {question.where} {problem}"
            for number, problem in enumerate(_problem(one, sequence) for one in found)
            if problem
        ]
        if wrong:
            problems += wrong
            left_out.append((question, wrong[0]))
            continue
        answered.append(question)
        pairs += found
        cut += max(len(one.before) + len(one.after) - 1 for one in found) > sequence
        spanning += any(one.spans for one in found)
    if problems and not (skip and answered):
        raise RequestError(*problems[:NAMED], _remedy(len(left_out), len(questions), answered, apart))
    note = special.own_note(tokenizer, own, "context") if own else None
    rows = _laid_out(pairs, sequence, answered)
    return replace(rows, cut=cut, spanning=spanning, left_out=tuple(left_out), note=note)


def _remedy(wrong: int, whole: int, answered: list[Question], apart: bool) -> str:
    """Return the sentence that says how to go on where a number of the `whole` questions cannot be scored."""
    ways = []
    if answered:
        ways.append("--choices-skip leaves them out")
    if not apart:
        ways.append("--choices-apart encodes context and choice apart, so that no token spans their join")
    ways.append("or correct them")
    return f"{wrong} of {counted(whole, 'question')} cannot be scored; {'; '.join(ways)}"


class Encoded(NamedTuple):
    """A context and a choice as tokens."""

    before: list[int]
    """The tokens of the context."""
    after: list[int]
    """The tokens of the choice after it."""
    spans: bool
    """Whether a token begins in the context and ends in the choice, so that the context has other tokens beside it."""


def encode(tokenizer: Tokenizer, special: SpecialTokens, context: str, choice: str, apart: bool = False) -> Encoded:
    """Return the tokens of a context, and of a choice after it; with `apart`, each encoded by itself.

    Where a token spans the join, the context keeps the tokens that it has alone, and the choice has those after as
    many: so does lm-evaluation-harness 0.4.
    """
    ending = context[len(context.rstrip()) :]
    context = context.rstrip()
    choice = ending + choice
    if not context:
        start = special.around([]) or ([] if special.eos is None else [special.eos])
        return Encoded(start, ids_of(tokenizer, choice), spans=False)
    before = ids_of(tokenizer, context)
    if apart:
        return Encoded(special.around(before), ids_of(tokenizer, choice), spans=False)
    whole = ids_of(tokenizer, context + choice)
    return Encoded(special.around(before), whole[len(before) :], whole[: len(before)] != before)


def scored(questions: list[Question], log_probabilities: Float[np.ndarray, " n"]) -> Score:
    """Return the accuracies, given the log probability of each row's choice. Of equal scores the first counts."""
    sizes = np.array([len(choice.encode()) for question in questions for choice in question.choices])
    right = _right(questions, log_probabilities)
    right_norm = _right(questions, log_probabilities / sizes)
    return Score(
        float(right.mean()),
        _standard_error(right),
        float(right_norm.mean()),
        _standard_error(right_norm),
    )


def results(questions: list[Question], log_probabilities: Float[np.ndarray, " n"]) -> list[dict[str, Any]]:
    """Return what was found of each question, for JSON: the sums of the log probabilities, and both answers."""
    found = []
    for question, scores in zip(questions, _of_questions(questions, log_probabilities), strict=True):
        sizes = np.array([len(choice.encode()) for choice in question.choices])
        found.append(
            {
                "line": question.line,
                "label": question.label,
                "answer": int(np.argmax(scores)),
                "answer_norm": int(np.argmax(scores / sizes)),
                "log_probabilities": scores.tolist(),
                "bytes": sizes.tolist(),
            }
        )
    return found


def _right(questions: list[Question], scores: Float[np.ndarray, " n"]) -> Float[np.ndarray, " questions"]:
    """Return 1 for each question whose right choice has the highest score, else 0."""
    of_each = zip(questions, _of_questions(questions, scores), strict=True)
    return np.array([float(np.argmax(own) == question.label) for question, own in of_each])


def _of_questions(questions: list[Question], scores: Float[np.ndarray, " n"]) -> list[Float[np.ndarray, " choices"]]:
    """Return the scores of the choices of each question."""
    ends = np.cumsum([len(question.choices) for question in questions])
    return np.split(scores, ends[:-1])


def _standard_error(values: Float[np.ndarray, " n"]) -> float | None:
    """Return the standard error of the mean, from the sample's standard deviation; None for a single value."""
    if values.size < 2:
        return None
    return float(values.std(ddof=1) / np.sqrt(values.size))


def _with_error(share: float, error: float | None) -> str:
    """Return a share and its standard error in percent."""
    return f"{share:.1%}" if error is None else f"{share:.1%} ± {error:.1%}"


def _problem(encoded: Encoded, sequence: int) -> str | None:
    """Return why a choice cannot be scored, as the end of a sentence."""
    before, after, _ = encoded
    if not after:
        return "has no token of its own after its context; begin the choice with a space, or end the context with one"
    if not before:
        return (
            "follows an empty context, and the tokenizer has neither a BOS nor an end-of-text token to put there; "
            "write a context"
        )
    if len(after) > sequence:
        return f"has {len(after)} tokens, but model.sequence is {sequence}; shorten the choice"
    return None


def _laid_out(pairs: list[Encoded], sequence: int, questions: list[Question]) -> Rows:
    """Return the rows of the contexts and choices of `questions`."""
    longest = 0
    tokens = np.zeros((len(pairs), sequence), np.int32)
    labels = np.full((len(pairs), sequence), IGNORED, np.int32)
    for row, (before, after, _) in enumerate(pairs):
        # A row predicts the token after each of its own, so it needs one token fewer than there are.
        ids = np.array([*before, *after][-(sequence + 1) :], np.int32)
        end = ids.size - 1
        longest = max(longest, end)
        tokens[row, :end] = ids[:-1]
        labels[row, end - len(after) : end] = ids[ids.size - len(after) :]
    return Rows(tokens, labels, longest, questions)


def _question(line: bytes, where: str) -> Question:
    """Return the question of a line. Raises `RequestError`."""
    row = value_of(line, where, f"write a line such as {EXAMPLE}")
    wrong = next(_wrong(row), None)
    if wrong:
        raise RequestError(f"{where} {wrong}")
    return Question(row["context"], tuple(row["choices"]), row["label"], where)


def _wrong(row: Any) -> Iterator[str]:
    """Yield what is wrong with a line's value, as the end of a sentence; later ones may rest on earlier ones."""
    if not isinstance(row, dict):
        yield f"is no object; write a line such as {EXAMPLE}"
    missing = [name for name in ("context", "choices", "label") if name not in row]
    if missing:
        yield f"has no {' and no '.join(missing)}; write a line such as {EXAMPLE}"
    if not isinstance(row["context"], str) or not is_unicode(row["context"]):
        yield 'has a "context" that is not text; put it in quotes'
    choices = row["choices"]
    if not isinstance(choices, list) or not all(isinstance(one, str) and is_unicode(one) for one in choices):
        yield 'has "choices" that are not a list of texts; write ["one", "other"]'
    if len(choices) < 2:
        yield f"has {counted(len(choices), 'choice')}; give at least 2"
    if "" in choices:
        yield f"has an empty text as choice {choices.index('')}; give each choice at least one character"
    label = row["label"]
    if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < len(choices):
        yield f"has the label {json.dumps(label)[:SHOWN]}; give the number of the right choice, 0 to {len(choices) - 1}"
