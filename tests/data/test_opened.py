"""`jaxdist.data.open`: rows with random access, the same ones in the same order as a training has."""

import pickle
import subprocess
import sys

import numpy as np
import pytest

import jaxdist.data
from jaxdist.config import DataConfig, RequestError
from jaxdist.data.order import global_rows
from jaxdist.data.progress import unseen
from jaxdist.huggingface.given_tokenizer import load_tokenizer
from jaxdist.request import load
from jaxdist.training.task_text import TextTask
from tests.data.files import POEM, VOCAB, S, ids, lines, open_, save_tokenizer

FORMS = {
    "poem.txt": POEM,
    "web.jsonl": lines(*[f"text {i} of many, {'word ' * (i % 11)}" for i in range(300)]),
    "t.bin": ids(*(VOCAB - 1 if i % 37 == 0 else i * i % 290 for i in range(1, 4000))),
}

WAYS = {"cut": {}, "packed": {"pack": "best-fit"}, "apart": {"documents": "apart"}}


def rows(path, **knobs):
    return jaxdist.data.open(path, sequence=S, vocab=VOCAB, **knobs)


@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name in FORMS for way in WAYS if way == "cut" or name != "poem.txt"]
)
def test_rows_are_those_of_a_training(write, tmp_path, name, way):
    path = write(name, FORMS[name])
    knobs = dict(WAYS[way])
    if name == "t.bin":
        knobs["tokenizer"] = save_tokenizer(tmp_path / "tokenizer.json", end="<|endoftext|>", size=VOCAB - 1)
    found = rows(path, **knobs)
    data = {one: value for one, value in knobs.items() if one != "documents"}
    corpus = open_(path=path, apart="documents" in knobs, **data)
    assert (len(found), len(found.validation)) == (corpus.train.count, corpus.validation.count)
    assert (found.fingerprint, found.source, found.sequence) == (corpus.fingerprint, corpus.source, S)
    assert found.tokenizer.get_vocab() == load_tokenizer(corpus.tokenizer).get_vocab()
    for part, expected in ((found, corpus.train), (found.validation, corpus.validation)):
        whole = expected.read(np.arange(expected.count))
        assert set(part[0]) == {"tokens", "labels", *(["starts"] if "documents" in knobs else [])}
        for array in part[0]:
            assert (part[:][array] == whole[array]).all()
            assert (part[-1][array] == whole[array][-1]).all()
            assert (part[[2, 0, -1]][array] == whole[array][[2, 0, -1]]).all()
            assert part[0][array].shape == (S,)
            assert part[0][array].dtype == np.int32


def test_indices(write):
    found = rows(write("web.jsonl", FORMS["web.jsonl"]))
    count = len(found)
    for index in (slice(2, 7), slice(None, None, -3), slice(5, 5), range(3), np.array([1, -1]), [], {4: 0}):
        expected = np.arange(count)[index if isinstance(index, slice) else np.array(list(index), int)]
        assert found[index]["tokens"].tolist() == [found[int(i)]["tokens"].tolist() for i in expected]
    assert found[np.int32(3)]["tokens"].shape == (S,)
    assert found[[]]["tokens"].shape == (0, S)
    for wrong in (count, -count - 1, [0, count]):
        with pytest.raises(IndexError, match=f"of {count}$"):
            found[wrong]
    for wrong in (np.zeros(count, bool), [0.5], np.float64(1)):
        with pytest.raises(TypeError):
            found[wrong]
    assert sum(1 for _ in found) == count
    several = found.__getitems__([3, 1])
    assert [row["labels"].tolist() for row in several] == [found[3]["labels"].tolist(), found[1]["labels"].tolist()]


def test_a_batch_is_that_of_a_step(write):
    found = rows(write("web.jsonl", FORMS["web.jsonl"]))
    for step in (0, 1, 1000):
        expected = found[global_rows(7, step, 12, len(found))]
        assert found.batch(step, 12, seed=7)["tokens"].tolist() == expected["tokens"].tolist()
    epoch = np.concatenate([found.batch(step, 1, seed=1)["tokens"] for step in range(len(found))])
    assert sorted(epoch.tolist()) == sorted(found[:]["tokens"].tolist())


MIXTURE = {"a": {"path": "a.jsonl", "weight": 3}, "b.jsonl": 1, "phase": [{"from": 20, "a": 1, "b.jsonl": 9}]}


def test_a_mixture_is_read_as_in_a_training(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write(f"{name}.jsonl", lines(*[f"{name} {i} of many" for i in range(200)]))
    found = jaxdist.data.open(mixture=MIXTURE, sequence=S, vocab=VOCAB)
    config = load(None, {"model.sequence": str(S), "model.vocab": str(VOCAB), "train.global_batch_size": "8"})
    config = config.model_copy(update={"data": DataConfig(mixture=MIXTURE)})
    task = TextTask.__new__(TextTask)
    task.config, task.progress, task.begun = config, unseen, None
    assert len(found) == task.data.train.count
    for step in (0, 19, 20, 777):
        expected = task.data.train.read(task.rows_after(step))
        assert found.batch(step, 8)["tokens"].tolist() == expected["tokens"].tolist()
    short = jaxdist.data.open("a.jsonl*3,b.jsonl*1", sequence=S, vocab=VOCAB)
    assert short[:]["tokens"].tolist() == found[:]["tokens"].tolist()
    with pytest.raises(RequestError, match=r"^data.path is 'a.jsonl\*3,b.jsonl': 'b.jsonl' has no weight"):
        rows("a.jsonl*3,b.jsonl")
    late = {**MIXTURE, "phase": [{"from": 0.5, "b.jsonl": 1}]}
    with pytest.raises(RequestError, match=r"begins from 0.5 of a run on"):
        rows(None, mixture=late).batch(0, 8)


@pytest.mark.parametrize("pack", ["cut", "best-fit"])
def test_another_process_gets_them_after_they_were_read(write, pack):
    found = rows(write("web.jsonl", FORMS["web.jsonl"]), pack=pack)
    found[0], found.validation[0]
    again = pickle.loads(pickle.dumps(found))
    assert again[:]["labels"].tolist() == found[:]["labels"].tolist()
    assert again.validation[0]["tokens"].tolist() == found.validation[0]["tokens"].tolist()


def test_tokens_need_no_vocab_and_text_needs_one(write):
    tokens = jaxdist.data.open(write("t.bin", FORMS["t.bin"]), sequence=S)
    assert tokens.tokenizer is None
    assert tokens[0]["tokens"].tolist() == [i * i % 290 for i in range(1, S + 1)]
    with pytest.raises(RequestError, match="text without a tokenizer; give one as tokenizer, or the size"):
        jaxdist.data.open(write("web.jsonl", FORMS["web.jsonl"]), sequence=S)


def test_columns_of_ids_are_said_to_be_that(tmp_path):
    """With a vocab or without one: the data are no text that lacks a tokenizer."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"input_ids": [[1, 2, 3]]}), tmp_path / "ids.parquet")
    for vocab in (None, 300):
        with pytest.raises(RequestError, match='"input_ids" holds token ids; only texts are read from columns'):
            jaxdist.data.open(tmp_path / "ids.parquet", sequence=S, vocab=vocab)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"tokeniser": "x"}, "'tokeniser' is no knob of data; did you mean 'tokenizer'?"),
        ({"validation_fraction": 2}, "data.validation_fraction is 2: Input should be less than 1"),
        ({"documents": "alone"}, "documents is 'alone': valid are joined, apart"),
        ({"text": "content"}, "data.text is 'content', but none of the data are JSON lines"),
    ],
)
def test_what_is_wrong_is_said(write, knobs, said):
    with pytest.raises(RequestError) as refused:
        rows(write("poem.txt", POEM), **knobs)
    assert str(refused.value).startswith(said)


def test_a_row_has_a_token():
    with pytest.raises(RequestError, match="sequence is 0: must be at least 1"):
        jaxdist.data.open("x.txt", sequence=0)


def test_importing_data_imports_nothing_else():
    program = "import sys, jaxdist.data; sys.exit({'numpy', 'jax', 'pydantic'} & sys.modules.keys() != set())"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_reading_rows_needs_no_jax(write):
    program = "import sys, jaxdist.data; jaxdist.data.open(sys.argv[1], sequence=8)[0]; sys.exit('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, write("t.bin", FORMS["t.bin"])], check=False)
    assert done.returncode == 0
