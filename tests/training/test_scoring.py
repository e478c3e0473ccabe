"""Log probabilities of choices on a mesh against a plain scorer: whole logits, one row at a time."""

from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxdist.config import Config
from jaxdist.data.multiple_choice import Rows, read_questions, rows_of, scored
from jaxdist.data.readers.reader import Document
from jaxdist.data.tokenizing.encoder import train_tokenizer
from jaxdist.huggingface.special_tokens import special_tokens_of
from jaxdist.mesh import devices_asked, parse_mesh
from jaxdist.sharding import Layout
from jaxdist.training.run import Run
from jaxdist.training.scoring import SHORTEST, log_probabilities, row_length, rows_per_batch
from tests.tiers import exhaustive

QUESTIONS = Path(__file__).parents[1] / "data" / "questions.jsonl"
SEQUENCE = 64
GPT = dict(layers=2, embed=32, heads=4, vocab=401, sequence=SEQUENCE)
LLAMA = GPT | dict(family="llama", kv_heads=2, window=8)
MODELS = {
    "gpt": GPT,
    "llama": LLAMA,
    "long llama": LLAMA | dict(sequence=2 * SHORTEST),
    "moe": GPT | dict(family="moe", experts=4, experts_per_token=2, expert_mlp=32),
}


@cache
def questions():
    return read_questions(QUESTIONS)


@cache
def rows(sequence: int) -> Rows:
    texts = [question.context + choice for question in questions() for choice in question.choices]
    documents = ((False, Document(text, True)) for text in texts)
    tokenizer = Tokenizer.from_str(train_tokenizer(documents, 1, 400))
    return rows_of(questions(), tokenizer, special_tokens_of(tokenizer), sequence)


def run_on(mesh: str, model: dict, **knobs) -> Run:
    train, pipeline = dict(global_batch_size=32), dict(microbatches=4)
    config = Config(mesh=mesh, precision="float32", model=model, train=train, pipeline=pipeline, **knobs)
    return Run(config, devices=jax.devices()[: devices_asked(parse_mesh(mesh))], batch=False)


def weights_of(run: Run):
    """Far from the start, where all tokens have about the same probability."""
    grown = jax.tree.map(lambda w: 3 * w, run.engine.init().params)
    return jax.jit(run.step.place)(grown)


def on(mesh: str, model: dict, **knobs) -> np.ndarray:
    run = run_on(mesh, model, **knobs)
    with jax.set_mesh(run.mesh):
        return log_probabilities(run, weights_of(run), rows(model["sequence"]))


@cache
def plain(family: str) -> np.ndarray:
    """The sums of the log probabilities of the labels, in float64, from the logits of one row at a time."""
    run = run_on("1x1x1", MODELS[family])
    found = []
    with jax.set_mesh(run.mesh):
        weights = run.forward.weights(weights_of(run))
        logits_of = jax.jit(run.forward.logits)
        of_all = rows(SEQUENCE)
        for tokens, labels in zip(of_all.tokens, of_all.labels, strict=True):
            logits = np.asarray(logits_of(weights, tokens[None])[0], np.float64)
            logits -= logits.max(-1, keepdims=True)
            log = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            found.append(sum(log[place, label] for place, label in enumerate(labels) if label >= 0))
    return np.array(found)


def answers(log_probabilities: np.ndarray) -> tuple[float, float]:
    """(acc, acc_norm) of the committed questions, written out."""
    right = right_norm = place = 0
    for question in questions():
        scores = log_probabilities[place : place + len(question.choices)].tolist()
        place += len(question.choices)
        per_byte = [score / len(c.encode()) for score, c in zip(scores, question.choices, strict=True)]
        right += max(scores) == scores[question.label]
        right_norm += max(per_byte) == per_byte[question.label]
    return right / 50, right_norm / 50


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "family", "knobs"),
    [
        ("1x1x1", "gpt", {}),
        ("2x2x1", "gpt", dict(parallel=dict(zero=3, sequence=True))),
        ("1x1x2", "gpt", {}),
        ("data=2,model=1,pipeline=1,context=2", "gpt", {}),
        *exhaustive(
            [
                ("2x2x2", "llama", dict(parallel=dict(zero=2))),
                ("1x2x1", "llama", dict(parallel=dict(zero=1))),
                ("data=1,model=1,pipeline=2,context=2", "long llama", {}),  # its rows are half as long
                ("data=1,model=1,pipeline=1,context=2", "llama", dict(parallel=dict(context="ulysses"))),
                ("data=1,model=2,pipeline=1,expert=2", "moe", {}),
            ]
        ),
    ],
)
def test_scores_are_those_of_a_plain_scorer(mesh, family, knobs):
    found = on(mesh, MODELS[family], **knobs)
    wanted = plain(family.removeprefix("long "))
    np.testing.assert_allclose(found, wanted, rtol=2e-6)
    score = scored(questions(), found)
    assert (score.acc, score.acc_norm) == pytest.approx(answers(wanted))
    assert score.acc != score.acc_norm


def test_long_rows_are_halved_as_often_as_the_longest_allows():
    assert [row_length(Layout(), 1024, longest) for longest in (3, 128, 129, 600)] == [128, 128, 256, 1024]
    assert row_length(Layout(), 1000, 3) == 250  # which is no more even
    assert row_length(Layout(), 64, 3) == 64


def test_a_batch_is_no_larger_than_needed_and_divides_over_the_ranks():
    run = run_on("4x1x1", GPT)
    assert [rows_per_batch(run, rows) for rows in (1, 5, 32, 1000)] == [4, 8, 32, 32]
