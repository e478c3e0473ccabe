"""Several sources as one corpus: each split by itself, one tokenizer for all, and rows that say whose they are."""

import os

import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxdist.config import RequestError
from jaxdist.data import number_file
from jaxdist.data.mixing import shared_tokenizer
from jaxdist.data.mixing.mixed_rows import MixedRows
from jaxdist.data.mixing.mixture import Mixture, Phase
from jaxdist.data.mixing.usage import LISTED, WARNED, Usage, largest, usages_of, warnings_of
from jaxdist.data.rows import CutRows
from tests.data.files import POEM, VOCAB, S, ids, lines, open_, save_tokenizer

CODE = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(300))


@pytest.fixture
def texts(write):
    return {
        "web": write("web.txt", POEM),
        "code": write("code.txt", CODE),
        "days": write("days.jsonl", lines(*"abcdef" * 90)),
    }


def mixed(paths, **knobs):
    table = {name: {"path": str(path), "weight": 1} for name, path in paths.items()}
    return open_(mixture=table, validation_fraction=0.25, **knobs)


def text_of(corpus, rows):
    tokenizer = Tokenizer.from_str(corpus.tokenizer)
    return tokenizer.decode(rows.tokens.ids.tolist(), skip_special_tokens=True)


def test_each_source_is_split_by_itself_and_read_with_one_tokenizer(texts):
    corpus = mixed(texts)
    assert list(corpus.sources) == ["code", "days", "web"]
    for name, path in texts.items():
        of_source = corpus.sources[name]
        whole = text_of(corpus, of_source.train) + text_of(corpus, of_source.validation)
        if name != "days":
            assert sorted(whole.splitlines()) == sorted(path.read_text().splitlines())
        assert 0.15 < of_source.validation.tokens.length / of_source.train.tokens.length < 0.4
        assert of_source.tokenizer == corpus.tokenizer
    entries = Tokenizer.from_str(corpus.tokenizer).get_vocab()
    assert len(entries) == VOCAB
    # Learned from both.
    assert {"ret", "Ġtide"} <= set(entries)


def test_rows_are_those_of_the_sources_one_after_another(texts):
    corpus = mixed(texts)
    parts = [source.train for source in corpus.sources.values()]
    assert corpus.train.count == sum(part.count for part in parts)
    for first, part in zip(corpus.train.firsts, parts, strict=False):
        rows = np.array([0, part.count - 1, part.count // 2])
        found = corpus.train.read(first + rows)
        assert all(np.array_equal(found[name], array) for name, array in part.read(rows).items())
    rng = np.random.default_rng(0)
    numbers = rng.permutation(np.r_[np.arange(corpus.train.count), -1, -1])
    found = corpus.train.read(numbers)
    alone = [corpus.train.read(numbers[i : i + 1]) for i in range(numbers.size)]
    for name, array in found.items():
        assert np.array_equal(array, np.concatenate([one[name] for one in alone]))
    assert (found["labels"][numbers < 0] == -1).all()


def test_neither_names_nor_places_nor_their_order_change_a_token(texts, tmp_path):
    """The tokenizer is that of the texts, and is made once."""
    first = mixed(texts)
    moved = {f"new {name}": path.rename(tmp_path / f"moved-{path.name}") for name, path in reversed(texts.items())}
    again = mixed(moved)
    assert again.tokenizer == first.tokenizer
    for name, corpus in first.sources.items():
        assert again.sources[f"new {name}"].fingerprint == corpus.fingerprint
    assert again.fingerprint != first.fingerprint  # the order of rows goes by names


def test_the_shared_tokenizer_is_trained_once(texts, monkeypatch):
    mixed(texts)
    monkeypatch.setattr(shared_tokenizer, "train_tokenizer", None)
    assert mixed(texts).tokenizer


def test_a_run_can_go_on_with_the_tokenizer_given(texts, write):
    """What was trained here and is given later makes the same tokens, with the same fingerprints."""
    trained = mixed(texts)
    given = mixed(texts, tokenizer=write("kept.json", trained.tokenizer))
    assert given.fingerprint == trained.fingerprint


def test_weights_do_not_change_the_data(texts):
    table = {name: {"path": str(path), "weight": 1 + len(name)} for name, path in texts.items()}
    assert open_(mixture=table, validation_fraction=0.25).fingerprint == mixed(texts).fingerprint


def test_tokens_and_their_val_bin(write, tmp_path):
    (tmp_path / "tokens").mkdir()
    write("tokens/train.bin", ids(*np.arange(500) % 97))
    write("tokens/val.bin", ids(*np.arange(90) % 97))
    other = write("other.bin", ids(*np.arange(400) % 53))
    corpus = open_(
        mixture={str(tmp_path / "tokens"): 1, "other": {"path": str(other), "weight": 2}}, validation_fraction=0.25
    )
    lengths = {name: (one.train.tokens.length, one.validation.tokens.length) for name, one in corpus.sources.items()}
    assert lengths == {str(tmp_path / "tokens"): (500, 90), "other": (300, 100)}
    assert corpus.tokenizer is None


@pytest.mark.parametrize("knobs", [{"pack": "best-fit"}, {"apart": True}, {"pack": "best-fit", "apart": True}])
def test_packing_and_documents_apart_work_within_each_source(texts, knobs):
    corpus = mixed(texts, **knobs)
    apart = knobs.get("apart", False)
    assert corpus.train.apart == apart
    found = corpus.train.read(np.arange(corpus.train.count))
    assert ("starts" in found) == apart
    for place, source in enumerate(corpus.sources.values()):
        first = corpus.train.firsts[place]
        assert np.array_equal(found["labels"][first], source.train.read(np.array([0]))["labels"][0])
    alone = open_(path=texts["days"], validation_fraction=0.25, **knobs)
    assert type(corpus.sources["days"].train) is type(alone.train)


def test_a_source_without_a_row_is_named(texts, write):
    with pytest.raises(RequestError) as error:
        mixed({**texts, "tiny": write("tiny.jsonl", lines("a", "b", "c", "d"))})
    training, validation = error.value.problems
    assert training.startswith("the training data of 'tiny' has ")
    assert f"one row needs {S + 1}" in training
    assert validation.startswith("the validation data of 'tiny' has ")
    # One of its four documents is held out.
    assert "raise data.validation_fraction" in validation
    with pytest.raises(RequestError) as error:
        mixed({**texts, "tiny": write("tiny.jsonl", lines("a", "b", "c"))})
    assert error.value.problems[1].endswith("and there are 3; set that to 0.334 or more, or give more")


def test_tokens_beside_text_need_a_tokenizer(texts, write):
    paths = {**texts, "tokens": write("tokens.bin", ids(*np.arange(900) % 97))}
    with pytest.raises(RequestError, match="has tokens, 'tokens', and text, 'code', and nothing says which tokenizer"):
        mixed(paths)
    tokenizer = save_tokenizer(write("t.json", ""), VOCAB - 1, end="</s>")
    assert mixed(paths, tokenizer=tokenizer).train.count


def test_a_key_of_json_lines_is_for_these_alone(texts, write):
    rows = write("rows.jsonl", lines(*"abcdef" * 90).replace("text", "content"))
    with_key = mixed({"web": texts["web"], "rows": rows}, text="content")
    alone = mixed({"web": texts["web"], "days": texts["days"]})
    assert with_key.sources["web"].fingerprint == alone.sources["web"].fingerprint


def test_sources_may_have_keys_of_their_own(texts, write):
    rows = write("rows.jsonl", lines(*"abcdef" * 90).replace("text", "content"))
    table = {
        "days": {"path": str(texts["days"]), "weight": 1},
        "rows": {"path": str(rows), "weight": 1, "text": "content"},
    }
    found = open_(mixture=table, validation_fraction=0.25)
    ids_of = {name: corpus.train.tokens.ids.tolist() for name, corpus in found.sources.items()}
    assert ids_of["rows"] == ids_of["days"]
    assert found.sources["rows"].fingerprint == mixed({"rows": rows}, text="content").sources["rows"].fingerprint
    table["web"] = {"path": str(texts["web"]), "weight": 1, "text": "content"}
    with pytest.raises(RequestError, match="says a text of 'web', none of whose files have keys; leave it out"):
        open_(mixture=table, validation_fraction=0.25)


def test_the_entropy_is_the_mean_over_the_sources(write):
    one, two = (write(f"{n}.bin", ids(*np.arange(400 * n) % n)) for n in (2, 4))
    rows = MixedRows(tuple(open_(path=path).train for path in (one, two)), S)
    sizes = [part.count for part in rows.parts]
    wanted = sum(size * part.unigram_entropy() for size, part in zip(sizes, rows.parts, strict=True)) / sum(sizes)
    assert rows.unigram_entropy() == pytest.approx(wanted)
    assert isinstance(rows.parts[0], CutRows)


def test_what_a_run_reads_of_each_source_is_told():
    mixture = Mixture(0, {"a": 100, "b": 50}, [Phase(0, {"a": 3, "b": 1}), Phase(1000, {"b": 1})])
    a, b = usages_of(mixture, 2000)
    assert (a.share, a.epochs) == (0.375, 7.5)
    assert (b.share, b.epochs) == (0.625, 25)
    worst, other = warnings_of([a, b])
    assert "'b' is read 25.0 times" in worst
    assert "'a' is read 7.5 times" in other
    assert list(warnings_of(usages_of(mixture, 200))) == []


def test_many_sources_keep_few_files_open(write, monkeypatch):
    monkeypatch.setattr(number_file, "MOST_OPEN", 4)
    corpus = mixed({f"s{i}": write(f"{i}.bin", ids(*np.arange(100 * i, 100 * i + 99))) for i in range(9)}, vocab=999)
    before = len(os.listdir("/proc/self/fd"))
    for rows in (corpus.train, corpus.validation, corpus.train):
        tokens = rows.read(np.arange(rows.count))["tokens"]
        whose = np.searchsorted(rows.firsts, np.arange(rows.count), "right") - 1
        assert (tokens // 100 == whose[:, None]).all()
        assert len(os.listdir("/proc/self/fd")) <= before + 4


def test_of_many_sources_the_largest_are_told():
    usages = [Usage(f"s{i}", share=(i * 7 % 30) / 435, epochs=i) for i in range(30)]
    named = largest(usages)
    assert [usage.name for usage in named] == [f"s{i}" for i in range(30) if i * 7 % 30 >= 30 - LISTED]
    warnings = list(warnings_of(usages))
    assert len(warnings) == WARNED + 1
    assert warnings[0].startswith("'s29' is read 29.0 times")
    assert warnings[-1] == "22 more sources are read more than 4 times"
