import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxdist.config import DataConfig, RequestError
from jaxdist.data import sources, streams
from jaxdist.data.corpus import ENDS, open_corpus
from jaxdist.data.readers import python_library
from jaxdist.data.readers.reader import Document
from jaxdist.data.tokenizing import encoder, token_store
from jaxdist.files import caches
from tests.data.files import POEM, VOCAB, S, ids, lines, open_, save_tokenizer


def decode(corpus, rows):
    return Tokenizer.from_str(corpus.tokenizer).decode(rows.tokens.ids.tolist(), skip_special_tokens=False)


# ---- what comes out


def test_plain_text_round_trips_losslessly(write):
    corpus = open_(path=write("poem.txt", POEM.replace("line 7:", "line 7:\r\n\r")), validation_fraction=0.1)
    train, held_out = decode(corpus, corpus.train), decode(corpus, corpus.validation)
    assert sorted((train + held_out).replace(ENDS[0], "").splitlines()) == sorted(
        POEM.replace("line 7:", "line 7:\r\n\r").splitlines()
    )
    assert (train + held_out).count(ENDS[0]) == 1  # blocks of one text are not documents
    assert 0.05 < corpus.validation.tokens.length / corpus.train.tokens.length < 0.2
    assert Tokenizer.from_str(corpus.tokenizer).get_vocab_size() == VOCAB
    assert corpus.train.tokens.largest() < VOCAB
    assert "poem.txt" in corpus.source
    assert "BPE of 300 entries" in corpus.source
    assert "\n" not in corpus.source


def test_every_nth_json_line_is_held_out_and_each_text_ends(write):
    texts = [f"text {i} of " + "abc " * i for i in range(20)]
    jsonl = lines(*texts).replace("\n", "\n\n", 3)  # blank lines are nothing
    corpus = open_(path=write("a.jsonl", b"\xef\xbb\xbf" + jsonl.encode()), validation_fraction=0.25)
    assert decode(corpus, corpus.validation).split(ENDS[0]) == [*texts[3::4], ""]
    assert decode(corpus, corpus.train).split(ENDS[0]) == [*(t for i, t in enumerate(texts) if i % 4 != 3), ""]
    assert "20 documents" in corpus.source


@pytest.mark.parametrize("ends", [None, "</s>"])
def test_apart_the_tokens_tell_where_documents_end(write, tmp_path, ends):
    """By the tokenizer's end-of-text token; all else is as it is."""
    path = write("a.jsonl", lines(*(f"text {i} of " + "abc " * i for i in range(20))))
    knobs = dict(path=path, validation_fraction=0.25)
    if ends:
        knobs |= dict(tokenizer=save_tokenizer(tmp_path / "t.json", end=ends), vocab=VOCAB + 1)
    joined, apart = (open_(apart=apart, **knobs) for apart in (False, True))
    assert joined.train.tokens.end is joined.validation.tokens.end is None
    assert apart.train.tokens.end == apart.validation.tokens.end == (VOCAB if ends else 0)
    assert np.array_equal(apart.train.tokens.ids, joined.train.tokens.ids)
    assert apart.fingerprint == joined.fingerprint
    assert apart.source == f"{joined.source}; documents apart"


def test_several_validation_files_are_held_out_together_in_order(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b, c = (
        write(name, lines(*[f"{name} says {i}" for i in range(9)])) for name in ("a.jsonl", "b.jsonl", "c.jsonl")
    )
    corpus = open_(path=a, validation_path=Path("c.jsonl, b.jsonl"))
    told = decode(corpus, corpus.validation).split(ENDS[0])
    assert told[:-1] == [f"{name} says {i}" for name in ("c.jsonl", "b.jsonl") for i in range(9)]
    assert corpus.fingerprint != open_(path=a, validation_path=Path(f"{b},{c}")).fingerprint


def test_a_file_with_a_comma_in_its_name_is_one_file(write):
    path, held_out = write("a.jsonl", lines(*["one text"] * 9)), write("b,c.jsonl", lines(*["another text"] * 9))
    corpus = open_(path=path, validation_path=held_out)
    assert "another" in decode(corpus, corpus.validation)


def test_a_validation_path_is_held_out_whole(write):
    a, b = write("a.jsonl", lines("one " * 30, "two " * 30)), write("b.jsonl", lines("three " * 20))
    corpus = open_(path=a, validation_path=b)
    assert decode(corpus, corpus.validation) == "three " * 20 + ENDS[0]
    assert decode(corpus, corpus.train).count(ENDS[0]) == 2


def test_token_files_are_used_in_place(write, cache):
    path = write("a.bin", ids(*range(100)))
    corpus = open_(path=path, validation_fraction=0.2)
    assert (corpus.train.tokens.ids.tolist(), corpus.validation.tokens.ids.tolist()) == (
        list(range(80)),
        list(range(80, 100)),
    )
    assert corpus.train.tokens.path == corpus.validation.tokens.path == path
    assert corpus.tokenizer is None
    assert not cache.exists()
    other = open_(path=path, validation_path=write("b.bin", ids(*range(50))))
    assert (other.train.tokens.length, other.validation.tokens.length) == (100, 50)


def test_the_library_is_its_source_files_without_tests(tmp_path, monkeypatch):
    files = {"os.py": "import abc\n", "b/x.py": "xx = 1\n", "b.py": "b = 2\n", "a/data.txt": "no", "a/__init__.py": ""}
    not_ours = {"test/t.py", "b/tests/t.py", "site-packages/p/q.py", "idlelib/idle_test/i.py", "config-3/c.py"}
    for name, text in {**files, **dict.fromkeys(not_ours, "no"), "_sysconfigdata_x.py": "no"}.items():
        (tmp_path / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / name).write_bytes(text.encode() * 30 + b"\xff" * (name == "b.py"))
    monkeypatch.setattr(python_library.os, "__file__", str(tmp_path / "lib" / "os.py"))
    corpus = open_(validation_fraction=0.5)
    assert decode(corpus, corpus.train) == "b = 2\n" * 30 + "\ufffd" + ENDS[0] + "import abc\n" * 30 + ENDS[0]
    assert decode(corpus, corpus.validation) == "xx = 1\n" * 30 + ENDS[0]
    assert "standard library, 3 files" in corpus.source


@pytest.mark.exhaustive
def test_the_default_corpus_is_large_enough_for_the_quickstart():
    corpus = open_corpus(DataConfig(), 2048, 256)
    assert corpus.train.count > 160 * 16  # no row is seen twice
    assert corpus.validation.count > 8 * 16
    assert 4 < corpus.validation.unigram_entropy() < 7
    assert open_corpus(DataConfig(), 2048, 256) == corpus


def test_large_vocabularies_are_uint32_and_a_short_text_says_so(write):
    corpus = open_(vocab=70_000, path=write("a.txt", POEM))
    assert (corpus.train.tokens.dtype, corpus.validation.tokens.dtype) == ("uint32", "uint32")
    assert "too little text for 70000" in corpus.source
    assert open_(vocab=1 << 16, path=write("a.txt", POEM)).train.tokens.dtype == "uint16"


def test_blocks_are_cut_at_line_ends_or_between_characters(write):
    path = write("a.txt", "日本語" * 400 + "\n" + POEM)
    blocks = list(sources.Source.of(path).documents(fraction=0.01))
    assert "".join(block.text for block in blocks) == path.read_text()
    assert max(len(block.text.encode()) for block in blocks) <= 2 * sources.SMALLEST_BLOCK_BYTES + 4
    assert all(block.text.endswith("\n") for block in blocks if "日本語日" not in block.text)
    assert [block.ends for block in blocks] == [False] * (len(blocks) - 1) + [True]


def test_the_sample_is_bounded_and_evenly_spread():
    stream = [(i % 10 == 9, Document(f"{i:05}", True)) for i in range(1000)]
    sample = list(encoder._sample(iter(stream), 500, 5000))
    assert sum(map(len, sample)) <= 500
    numbers = [int(text) for text in sample]
    assert set(np.diff(numbers)) <= {10, 11, 12}
    assert all(number % 10 != 9 for number in numbers)
    assert numbers[-1] > 950
    assert list(encoder._sample(iter(stream[:3]), 7, 14)) == ["00000", "00"]  # every second, and never too much


# ---- a tokenizer of one's own


def test_a_given_tokenizer_is_used_untruncated_and_kept_as_it_is(write, tmp_path):
    path = save_tokenizer(tmp_path / "t.json")
    text = write("a.jsonl", lines(*[" ".join(f"w{i}" for i in range(20))] * 4))
    corpus = open_(path=text, tokenizer=path, validation_fraction=0.5)
    assert corpus.train.tokens.ids.tolist() == [*range(20)] * 2
    assert corpus.tokenizer == path.read_text()
    assert "without an end-of-text token" in corpus.source
    save_tokenizer(path, VOCAB - 1, end="</s>")
    other = open_(path=text, tokenizer=path, validation_fraction=0.5)
    assert other.train.tokens.ids.tolist() == [*range(20), VOCAB - 1] * 2
    assert other.fingerprint != corpus.fingerprint


def test_tokens_keep_the_tokenizer_for_later(write, tmp_path):
    path = save_tokenizer(tmp_path / "t.json")
    corpus = open_(path=write("a.bin", ids(*range(400))), vocab=400, tokenizer=path)
    assert corpus.tokenizer == path.read_text()


# ---- cache and fingerprint


def test_a_second_opening_reads_the_cache(write, monkeypatch):
    path = write("a.txt", POEM)
    first = open_(path=path)
    monkeypatch.setattr(streams, "train_tokenizer", None)
    monkeypatch.setattr(token_store, "write_pieces", None)
    assert open_(path=path) == first
    moved = path.rename(path.with_name("b.txt"))
    assert open_(path=moved).fingerprint == first.fingerprint
    assert open_(path=moved).train == first.train


def test_the_fingerprint_changes_with_content_split_and_tokenizer_only(write):
    a, b = write("a.txt", POEM), write("b.txt", POEM + "!")
    bins = write("a.bin", ids(*range(200))), write("b.bin", ids(*range(1, 201)))
    found = [
        open_(path=a),
        open_(path=b),
        open_(path=a, validation_fraction=0.2),
        open_(path=a, validation_path=b),
        open_(path=a, vocab=VOCAB + 1),
        open_(path=bins[0], validation_fraction=0.2),
        open_(path=bins[1], validation_fraction=0.2),
        open_(path=bins[0], validation_fraction=0.3),
    ]
    assert len({corpus.fingerprint for corpus in found}) == len(found)
    assert open_(path=a, sequence=S // 2).fingerprint == found[0].fingerprint


def test_training_a_tokenizer_is_deterministic(write, tmp_path, monkeypatch):
    path = write("a.txt", POEM)
    first = open_(path=path)
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "other"))
    second = open_(path=path)
    assert (second.tokenizer, second.fingerprint) == (first.tokenizer, first.fingerprint)
    assert second.train.tokens.path != first.train.tokens.path
    assert np.array_equal(second.train.tokens.ids, first.train.tokens.ids)


def test_files_of_the_cache_that_were_cut_are_made_again(write, cache):
    path = write("a.txt", POEM)
    first = open_(path=path)
    whole = first.train.tokens.path.read_bytes()
    for name in ("train.bin", "about.json"):
        (first.train.tokens.path.parent / name).write_bytes(b"{}")
        assert open_(path=path).train.tokens.path.read_bytes() == whole
    assert [folder.name for folder in cache.iterdir()] == [first.train.tokens.path.parent.name]


def test_whoever_comes_second_uses_what_is_there(write, cache, monkeypatch):
    path = write("a.txt", POEM)
    write_pieces, first = token_store.write_pieces, []

    def overtaken(*arguments, **named):
        monkeypatch.setattr(token_store, "write_pieces", write_pieces)
        first.append(open_(path=path))
        return write_pieces(*arguments, **named)

    monkeypatch.setattr(token_store, "write_pieces", overtaken)
    assert open_(path=path) == first[0]
    assert len(list(cache.iterdir())) == 1


PROCESS = """
import json, os, sys
from pathlib import Path
from jaxdist.config import DataConfig
from jaxdist.data import corpus, known
known.SETTLED = float("inf")
if sys.argv[2] == "dies":
    json.dumps, dumps = (lambda x: os._exit(9) if type(x) is dict else dumps(x)), json.dumps
print(corpus.open_corpus(DataConfig(path=Path(sys.argv[1])), 300, 16).fingerprint)
"""


@pytest.mark.slow
def test_processes_that_race_or_die_leave_a_whole_cache(write, cache):
    path = write("a.txt", POEM * 20)
    start = lambda how: subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(path), how],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    dead = start("dies")
    assert (dead.communicate(timeout=60)[0], dead.returncode) == ("", 9)
    left = list(cache.iterdir())
    assert len(left) == 1  # a folder that nobody takes for good
    racing = [start("lives") for _ in range(3)]
    found = {process.communicate(timeout=60)[0].strip() for process in racing}
    assert found == {open_(path=path).fingerprint}
    assert not left[0].exists()
    assert len(list(cache.iterdir())) == 1


def test_a_file_that_changes_while_it_is_read_is_not_cached(write, cache, monkeypatch):
    path = write("a.txt", POEM)
    write_pieces = token_store.write_pieces

    def growing(*arguments, **named):
        path.write_text(POEM + "more")
        return write_pieces(*arguments, **named)

    monkeypatch.setattr(token_store, "write_pieces", growing)
    with pytest.raises(RequestError, match="changed while it was read"):
        open_(path=path)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/jaxdist"])
def test_a_cache_that_cannot_be_written_is_named(write, tmp_path, monkeypatch, folder):
    write("file", "x")
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / folder))
    with pytest.raises(RequestError, match=r"cannot be written .*set JAXDIST_CACHE to a folder"):
        open_(path=write("a.txt", POEM))


def test_where_the_cache_is(monkeypatch):
    assert caches.cache_folder().name == "cache"
    monkeypatch.delenv("JAXDIST_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert caches.cache_folder() == Path("/x/jaxdist")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert caches.cache_folder() == Path("/home/me/.cache/jaxdist")


JSON_LINES = [f"text {i} of " + "abc " * i for i in range(20)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.ndjson", "a.json"])
def test_json_lines_are_recognised_by_these_names(write, name):
    """Also where files with a byte-order mark were joined, and where a line has a number that Python refuses."""
    text = lines(*JSON_LINES[:10]) + "\ufeff" + lines(*JSON_LINES[10:]).replace("}", ', "id": ' + "9" * 5000 + "}", 1)
    found = open_(path=write(name, text))
    assert found.train.tokens.ids.tolist() == open_(path=write("b.jsonl", lines(*JSON_LINES))).train.tokens.ids.tolist()
    assert "20 documents" in found.source
    assert found.changed == (name not in ("a.jsonl", "a.JSONL"))


@pytest.mark.parametrize("name", ["rows", "rows.txt", "rows.txt.gz"])
def test_a_text_that_looks_like_json_lines_is_called_so(write, name):
    """It is read as it was by earlier versions."""
    text = lines(*JSON_LINES * 9)
    path = write("rows.txt", text) if name.endswith(".gz") else write(name, text)
    if name.endswith(".gz"):
        (path.parent / name).write_bytes(gzip.compress(path.read_bytes()))
        path = path.parent / name
    assert "is read as plain text, but begins with a JSON object; name it .jsonl" in open_(path=path).source
    path = write("words.txt", "Words.\n" + text)
    assert "JSON" not in open_(path=path).source


@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_of_rows_has_the_tokens_of_the_same_lines(write, indent):
    """Read in blocks that cut items, and characters."""
    rows = [{"text": f"Step {i}: the loss of 日本 fell. " * (i % 9)} for i in range(9999)]
    found = open_(path=write("rows.json", json.dumps(rows, indent=indent, ensure_ascii=False)))
    wanted = open_(path=write("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows)))
    np.testing.assert_array_equal(found.train.tokens.ids, wanted.train.tokens.ids)
    assert found.source == wanted.source.replace("rows.jsonl", "rows.json")


@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_of_rows_that_is_not_called_json_is_told(write, indent):
    rows = [{"instruction": "Say it.", "output": "The loss fell."}] * 9999
    path = write("rows.txt", json.dumps(rows, indent=indent))
    assert "rows.txt' is read as plain text, but begins as a JSON list; name it .json" in open_(path=path).source
    path = write("other.json", json.dumps([{"id": 1}] * 19999, indent=indent))
    assert "JSON list" not in open_(path=path).source


@pytest.mark.parametrize("start", ["[\n", '{"id": 1}\n', "{\n", ""])
def test_other_json_is_plain_text_and_the_run_says_so(write, start):
    found = open_(path=write("a.json", start + lines(*JSON_LINES * 9)[1:]))
    assert ' (as plain text: its first line is no JSON object with a string "text")' in found.source
    assert not found.changed


def test_a_run_that_read_json_lines_as_text_goes_on_so(write):
    path = write("a.ndjson", lines(*JSON_LINES * 9))
    as_text = write("a.txt", lines(*JSON_LINES * 9))
    before = open_(path=as_text)
    found = open_(path=path, begun=before.fingerprint)
    assert (found.fingerprint, found.train.tokens.ids.tolist()) == (
        before.fingerprint,
        before.train.tokens.ids.tolist(),
    )
    assert open_(path=path).fingerprint != before.fingerprint
