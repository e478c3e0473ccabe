"""A start reads samples of large files of tokens: what these cannot show is found where it is read, or by --verify."""

import json
import shutil

import numpy as np
import pytest

from jaxdist.config import RequestError
from jaxdist.data import known, sources, tokens
from jaxdist.data import opened as library
from jaxdist.data.__main__ import main
from jaxdist.data.corpus import Corpus
from jaxdist.data.held_out import open_held_out
from jaxdist.data.number_file import IdOutside
from jaxdist.data.readers import raw_tokens
from jaxdist.data.readers.llm_c import FORMS, HEADER
from jaxdist.data.row_use import ABOUT, KEPT, RowUse, cut_of, usual_uses
from jaxdist.data.token_samples import BLOCK, BLOCKS, spread
from tests.data.files import VOCAB, S, ids, open_, save_tokenizer
from tests.data.test_known import LINUX, bytes_read, flip, old

RANDOM = np.random.default_rng(0)

MANY = 2 * BLOCKS * BLOCK
"""Tokens of uint16, of which samples are every fourth block."""

BETWEEN = BLOCK
"""A token between two samples."""


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch):
    monkeypatch.setattr(sources, "WHOLE", 1 << 16)
    monkeypatch.setattr(tokens, "WHOLE", 1 << 16)


@pytest.fixture(scope="module")
def content():
    return RANDOM.integers(0, VOCAB, MANY)


def never(*arguments):
    raise AssertionError("all was read")


def test_samples_are_spread_from_the_beginning_to_the_end():
    assert list(spread(100, 3, 10)) == [(0, 10), (45, 55), (90, 100)]
    assert list(spread(25, 3, 10)) == [(0, 10), (10, 20), (20, 25)]
    assert list(spread(100, 1, 10)) == [(0, 10)]
    assert list(spread(100, 0, 10)) == list(spread(0, 3, 10)) == []


def damaged(content, place, value):
    wrong = content.copy()
    wrong[place] = value
    return wrong


def row_of(corpus: Corpus, place: int) -> np.ndarray:
    return np.array([place // corpus.train.sequence])


def header(magic: int, count: int) -> bytes:
    start = np.zeros(HEADER // 4, "<i4")
    start[:3] = magic, FORMS[magic].version, count
    return start.tobytes()


@pytest.mark.parametrize("form", ["uint16", "uint32", "llm.c", "second of two", "Megatron"])
def test_an_id_that_the_model_lacks_ends_the_run_where_it_is_read(write, tmp_path, content, form):
    """With the file, the place, the value, and what to change; rows without it are read as ever."""
    place, bad = BETWEEN, VOCAB
    wrong = damaged(content, place, bad)
    path = tmp_path / "a.bin"
    offset, width, before = 0, 2, 0
    if form == "llm.c":
        offset = HEADER
        path.write_bytes(header(20240520, MANY) + wrong.astype("<u2").tobytes())
    elif form == "second of two":
        write("0.bin", content.astype("<u2").tobytes())
        before = MANY
        path.write_bytes(wrong.astype("<u2").tobytes())
    elif form == "Megatron":
        width = 4
        wrong[place] = -1
        path.write_bytes(wrong.astype("<i4").tobytes())
        lengths = np.full(MANY // 64, 64)
        start = b"MMIDIDX\0\0" + np.array([1], "<u8").tobytes() + bytes([4])
        start += np.array([lengths.size, lengths.size + 1], "<u8").tobytes()
        places = np.arange(lengths.size) * 64 * 4
        borders = np.arange(lengths.size + 1)
        parts = lengths.astype("<i4"), places.astype("<i8"), borders.astype("<i8")
        path.with_suffix(".idx").write_bytes(start + b"".join(part.tobytes() for part in parts))
    else:
        width = np.dtype(form).itemsize
        path.write_bytes(wrong.astype(form).tobytes())
    corpus = open_(path=path if not before else tmp_path)
    with pytest.raises(IdOutside) as error:
        corpus.train.read(row_of(corpus, before + place))
    told = str(error.value)
    assert f"'{path}' holds " in told
    assert f" at token {place:,} (byte {offset + place * width:,})" in told
    if form == "Megatron":
        assert "holds the negative id -1 " in told
    else:
        assert f"holds token id {bad} " in told
        assert f"model.vocab is {VOCAB}; set model.vocab to at least {bad + 1}" in told
    rows = np.array([0, (before + place) // S + 1])
    assert corpus.train.read(rows)["tokens"].tolist() == [
        (np.concatenate([content, wrong]) if before else wrong)[start : start + S].tolist() for start in rows * S
    ]


@pytest.mark.parametrize("place", [0, MANY // 2 - 1, MANY - 1])
def test_an_id_in_a_sample_is_refused_at_the_start(write, content, place):
    place = list(spread(MANY, BLOCKS, BLOCK // 2))[BLOCKS // 2][0] if place == MANY // 2 - 1 else place
    path = write("a.bin", damaged(content, place, 999).astype("<u2").tobytes())
    for opening in (lambda: open_(path=path), lambda: open_held_out(path, None, VOCAB)):
        with pytest.raises(RequestError, match=r"a.bin' holds token id 999 but model.vocab is 300; set model.vocab to"):
            opening()


def test_each_of_many_files_is_looked_at(write, tmp_path):
    """The type of each, and its first ids, however many there are."""
    count = 2 * BLOCKS
    for i in range(count):
        write(f"{i:04}.bin", RANDOM.integers(1, VOCAB, 200).astype("<u4" if i == 501 else "<u2").tobytes())
    corpus = open_(path=tmp_path)
    assert [shard.dtype for shard in corpus.train.tokens.shards].index("uint32") == 501
    assert int(corpus.train.tokens.ids.max()) < VOCAB
    write("0700.bin", ids(5, 999, *range(100)))
    with pytest.raises(RequestError, match=r"0700.bin' holds token id 999"):
        open_(path=tmp_path)
    write("0700.bin", b"no tokens at all, " * 20)
    with pytest.raises(RequestError, match=r"0700.bin' holds text and no tokens"):
        open_(path=tmp_path)


def test_a_file_that_begins_with_zeros_shows_its_type_at_its_end(write, monkeypatch):
    monkeypatch.setattr(raw_tokens, "LOOKED_AT", 1000)
    zeros = np.zeros(MANY, "<u4")
    zeros[-300:] = RANDOM.integers(1, VOCAB, 300)
    assert open_(path=write("a.bin", zeros.tobytes())).train.tokens.dtype == "uint32"


def test_the_fingerprint_is_of_samples_and_old_runs_are_known_by_their_own(write, content, monkeypatch, tmp_path):
    path = old(write("a.bin", content.astype("<u2").tobytes()))
    for knobs in ({}, {"pack": "best-fit", "tokenizer": save_tokenizer(tmp_path / "t.json", end="<|endoftext|>")}):
        with monkeypatch.context() as patch:
            patch.setattr(sources, "WHOLE", 1 << 40)
            begun = open_(vocab=VOCAB + 1, path=path, **knobs).fingerprint
        with monkeypatch.context() as patch:
            patch.setattr(sources, "_sha256", never)
            here = open_(vocab=VOCAB + 1, path=path, **knobs)
            assert here.fingerprint.startswith("samples-")
            assert here.is_of(here.fingerprint)
            assert not here.is_of("samples-0")
        assert here.is_of(begun)
        assert not here.is_of("0" * 64)
        copy = shutil.copy(path, tmp_path / "copy.bin")
        assert open_(vocab=VOCAB + 1, path=copy, **knobs).fingerprint == here.fingerprint
        assert open_(vocab=VOCAB + 1, path=path, validation_fraction=0.1, **knobs).fingerprint != here.fingerprint
    flip(path, 2 * MANY - 1)
    known._identities.clear()
    assert open_(vocab=VOCAB + 1, path=path, **knobs).fingerprint != here.fingerprint


def test_the_sources_of_a_mixture_are_known_by_their_own_too(write, content, monkeypatch):
    a, b = (old(write(f"{name}.bin", content[::step].astype("<u2").tobytes())) for name, step in (("a", 1), ("b", -1)))
    knobs = {"mixture": {"a": {"path": str(a), "weight": 1}, "b": {"path": str(b), "weight": 2}}}
    with monkeypatch.context() as patch:
        patch.setattr(sources, "WHOLE", 1 << 40)
        begun = open_(**knobs)
    here = open_(**knobs)
    assert here.fingerprint != begun.fingerprint
    assert here.is_of(begun.fingerprint)
    assert all(here.sources[name].is_of(begun.sources[name].fingerprint) for name in "ab")
    assert not here.sources["a"].is_of(begun.sources["b"].fingerprint)


def test_the_entropy_of_samples_is_near_that_of_all(tmp_path):
    """Of 20,000 kinds with the frequencies of words; without its correction it would be 0.01 nats too small."""
    weights = 1 / np.arange(1, 20_001)
    found = RANDOM.choice(20_000, MANY, p=weights / weights.sum()).astype("<u2")
    (tmp_path / "a.bin").write_bytes(found.tobytes())
    stream = tokens.Tokens.open(tmp_path / "a.bin", "uint16")
    assert stream.unigram_entropy() == pytest.approx(stream.count_entropy(), abs=0.005)
    assert stream.unigram_entropy() != stream.count_entropy()


def test_how_many_documents_are_cut_is_reckoned_from_samples(write, tmp_path, monkeypatch):
    tokenizer = save_tokenizer(tmp_path / "t.json", end="<|endoftext|>")
    lengths = RANDOM.geometric(1 / 300, MANY // 300)
    stream = np.ones(int(lengths.sum()), "<u2")
    stream[np.cumsum(lengths) - 1] = VOCAB
    path = write("a.bin", stream.tobytes())
    here = open_(vocab=VOCAB + 1, path=path, tokenizer=tokenizer, sequence=512)
    use = RowUse(512)
    use.add(lengths)
    assert here.cut.about
    assert here.cut.documents == pytest.approx(use.documents * 0.95, rel=0.1)
    assert here.cut.cut / here.cut.documents == pytest.approx(use.cut / use.documents, rel=0.1)
    assert f"rows cut about {100 * here.cut.cut / here.cut.documents:.0f} % of the documents" in here.source
    kept = usual_uses([np.array([40, 30])], of=700)[KEPT]
    assert (kept["documents"], kept["32"], kept[ABOUT]) == (20, [20, 10], True)
    assert cut_of({KEPT: kept}, 32).about


def test_a_library_user_waits_for_no_reading(write, content, monkeypatch):
    path = write("a.bin", content.astype("<u2").tobytes())
    monkeypatch.setattr(tokens.Tokens, "_chunks", never)
    monkeypatch.setattr(sources, "_sha256", never)
    rows = library.open(path, sequence=S)
    assert rows[7]["tokens"].tolist() == content[7 * S : 8 * S].tolist()


def test_verifying_reads_all(write, content, capsys, monkeypatch):
    monkeypatch.setattr(known, "SETTLED", 0.0)
    path = old(write("a.bin", damaged(content, BETWEEN, 999).astype("<u2").tobytes()))
    open_(path=path)
    assert main([str(path), "--verify", "--model.vocab", str(VOCAB), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["problems"] == [
        f"'{path}' holds token id 999 but model.vocab is 300; set model.vocab to at least 1000, or check that the file "
        "is uint16 without a header"
    ]
    assert "was read whole for the first time" in told["notes"][0]
    assert main([str(path), "--verify"]) == 0
    assert f"the token ids of '{path}' need a model.vocab of at least 1000" in capsys.readouterr().out
    # What a look says of the data is said of all of them, too.
    with pytest.raises(RequestError, match="holds token id 999"):
        main([str(path), "--model.vocab", str(VOCAB)])
    flip(path, 4 * BETWEEN)
    known._identities.clear()
    known._answers.clear()
    assert main([str(path), "--verify", "--model.vocab", "1000"]) == 1
    assert f"'{path}' is not what it was when it was first read" in capsys.readouterr().out


# ---- many sources


MIB = 1 << 20


def many_sources(folder, count):
    """Files of 5 MiB that differ in their first ids, and are zeros behind them, which take no room on the disk."""
    table = {}
    for number in range(count):
        path = folder / f"{number:02}.bin"
        with path.open("wb") as file:
            file.write(RANDOM.integers(1, VOCAB, 4096).astype("<u2").tobytes())
            file.truncate(5 * MIB)
        table[path.stem] = {"path": str(old(path)), "weight": 1}
    return table


@LINUX
def test_of_each_of_many_sources_a_start_reads_a_quarter_of_a_mebibyte(tmp_path, monkeypatch):
    """The first start too. Of 1,500 sources of 5 MiB it read 7 GB."""
    monkeypatch.setattr(known, "SETTLED", 0.0)
    monkeypatch.setattr(sources, "WHOLE", 4 * MIB)
    monkeypatch.setattr(tokens, "WHOLE", 4 * MIB)
    tokenizer = save_tokenizer(tmp_path / "t.json", end="<|endoftext|>")
    table = many_sources(tmp_path, 40)

    def start():
        known._identities.clear()
        known._answers.clear()
        before = bytes_read()
        corpus = open_(vocab=VOCAB + 1, mixture=table, tokenizer=tokenizer)
        assert corpus.fingerprint.startswith("samples-")
        opened = bytes_read() - before
        corpus.validation.unigram_entropy()
        return opened / len(table), (bytes_read() - before) / len(table)

    opened, counted = start()
    assert MIB / 8 < opened < MIB / 4
    # The entropy of a few sources is counted as that of one: of the 5 % that are held out.
    assert counted < opened + MIB / 4 + 4096
    assert start()[1] < MIB / 8


def test_old_runs_know_the_sources_of_their_mixture_and_others_do_not_matter(write, content, monkeypatch):
    """Of which a start read as much as of single ones."""
    paths = {
        name: old(write(f"{name}.bin", content[skip:].astype("<u2").tobytes()))
        for name, skip in {"a": 0, "b": 9, "small": MANY - 20_000}.items()
    }
    table = {name: {"path": str(path), "weight": 1} for name, path in paths.items()}
    with monkeypatch.context() as patch:
        patch.setattr("jaxdist.data.naming.paths.OF_MIXTURE", 1)
        begun = open_(mixture=table)
    here = open_(mixture=table)
    assert all(corpus.fingerprint.startswith("samples-") for corpus in (begun, here, *here.sources.values()))
    # It is read whole no more.
    assert not begun.sources["small"].fingerprint.startswith("samples-")
    assert here.fingerprint != begun.fingerprint
    assert here.is_of(begun.fingerprint)
    for name, corpus in here.sources.items():
        assert corpus.fingerprint != begun.sources[name].fingerprint
        assert corpus.is_of(begun.sources[name].fingerprint)
        assert not corpus.is_of(begun.sources["a" if name == "b" else "b"].fingerprint)
    fewer = open_(mixture={name: table[name] for name in ("a", "small")})
    assert {name: fewer.sources[name].fingerprint for name in fewer.sources} == {
        name: here.sources[name].fingerprint for name in fewer.sources
    }
    flip(paths["b"], paths["b"].stat().st_size - 2)
    known._identities.clear()
    changed = open_(mixture=table)
    assert not changed.is_of(begun.fingerprint)
    assert changed.sources["a"].is_of(begun.sources["a"].fingerprint)
    assert not changed.sources["b"].is_of(begun.sources["b"].fingerprint)


@LINUX
def test_documents_are_looked_for_once(write, content, tmp_path, monkeypatch):
    """For the rows of one length: they are planned by a pass over all tokens, and later starts read the plan."""
    monkeypatch.setattr(known, "SETTLED", 0.0)
    path = old(write("a.bin", np.where(content % 50 == 0, VOCAB, content).astype("<u2").tobytes()))
    tokenizer = save_tokenizer(tmp_path / "t.json", end="<|endoftext|>")
    read, found = [], []
    for sequence in (1024, 1024, 512):
        known._identities.clear()
        known._answers.clear()
        before = bytes_read()
        corpus = open_(vocab=VOCAB + 1, path=path, tokenizer=tokenizer, pack="best-fit", sequence=sequence)
        read.append(bytes_read() - before)
        found.append(corpus.train.read(np.arange(9))["tokens"])
    size = path.stat().st_size
    assert read[0] > size
    assert read[1] < size / 2
    assert read[2] > size
    assert np.array_equal(found[0], found[1])
