"""Data that cannot be used: each mistake is named with its place, its values and a remedy."""

from pathlib import Path

import pytest

from jaxdist.config import RequestError
from jaxdist.data.readers import python_library
from tests.data.files import POEM, VOCAB, ids, lines, open_, save_tokenizer

GOOD = lines("some text that is long enough for several rows " * 9, "more of it " * 20)

BAD = [
    # files of the request, its knobs, and what the sentence has to say
    ({}, {"path": "a.txt"}, ["data.path", "a.txt' does not exist"]),
    ({}, {"path": "."}, ["data.path '.' is a folder without files"]),
    ({"a.txt": ""}, {"path": "."}, ["data.path '.' names only files that are empty (1 .txt)"]),
    ({"a.txt": POEM}, {"path": "*.md"}, ["data.path '*.md' is a pattern that no file has"]),
    ({"a.txt": POEM}, {"path": "a.txt,no.txt"}, ["data.path 'no.txt' does not exist"]),
    ({"a.txt": POEM}, {"path": "['a.txt', 'b.txt']"}, ["is a list in brackets; write a.txt,b.txt"]),
    (
        {"a.txt": POEM},
        {"path": "a.txt:0.7, b=.3"},
        ["does not exist; to mix sources by weight, write 'a.txt*0.7,b*.3'"],
    ),
    (
        {"a.txt": POEM},
        {"path": "0.7*a.txt,b*30%"},
        ["does not exist; to mix sources by weight, write 'a.txt*0.7,b*30'"],
    ),
    (
        {f"{name}.txt": "FEA1\0\0\0\0 and so on" for name in "abcdefghijklmnopqrstuvwxyz"},
        {"path": "."},
        ["data.path 'a.txt' is a Feather file", "more such files of data.path; correct these first"],
    ),
    ({"a.txt": b"abc\n" * 999 + b"\xff\xfe"}, {"path": "a.txt"}, ["not utf-8 text (byte 3997 is 0xff)", "convert"]),
    ({"a.jsonl": GOOD + "{text: 1}\n"}, {"path": "a.jsonl"}, ["line 3", "is not JSON (", "column 2"]),
    ({"a.jsonl": '\n{"text": ""}\n'}, {"path": "a.jsonl"}, ["training data has 0 tokens", "one row needs 17"]),
    (
        {"a.jsonl": GOOD},
        {"path": "a.jsonl"},
        [
            "validation data has 0 tokens: of documents, or blocks of a text, 5 % are held out",
            "(data.validation_fraction 0.05), and there are 2; set that to 0.5 or more, or give more, or other files",
        ],
    ),
    ({"a.txt": b"\xef\xbb\xbfone block\r\n" * 9}, {"path": "a.txt"}, ["there is one; give more documents, or a"]),
    (
        {"a.jsonl": GOOD, "b.jsonl": lines("x")},
        {"path": "a.jsonl", "validation_path": "b.jsonl"},
        ["validation data has 2 tokens and one row needs 17 (model.sequence 16", "make the validation data longer"],
    ),
    (
        {"a.bin": ids(*range(99)), "b.bin": ids(7, 999)},
        {"path": "a.bin", "validation_path": "b.bin"},
        ["b.bin' holds token id 999", "at least 1000"],
    ),
    ({"a.bin": ids(*range(99))}, {"path": "a.bin"}, ["validation data has 4 tokens", "lower model.sequence"]),
    ({"a.bin": ids(*range(9))}, {"path": "a.bin"}, ["training data has 9 tokens", "validation data has 0 tokens"]),
    ({"a.txt": POEM}, {"path": "a.txt", "vocab": 256}, ["model.vocab 256 is too small", "at least 257"]),
    ({"a.txt": POEM}, {"path": "a.txt", "tokenizer": "t.json"}, ["data.tokenizer", "does not exist"]),
    (
        {"a.txt": POEM, "t.json": "{}"},
        {"path": "a.txt", "tokenizer": "t.json"},
        ["is not a tokenizer (", "leave it out"],
    ),
    ({"a.txt": POEM, "t.json": b"\xff"}, {"path": "a.txt", "tokenizer": "t.json"}, ["is not UTF-8 text (byte 0)"]),
    (
        {"a.txt": POEM, "t.json": None},
        {"path": "a.txt", "tokenizer": "t.json", "vocab": 299},
        ["has ids up to 299", "model.vocab is 299", "at least 300"],
    ),
    ({"a.bin": ids(*range(99)), "t.json": None}, {"path": "a.bin", "tokenizer": "t.json", "vocab": 299}, ["up to 299"]),
    (
        {"a.txt": POEM, "b.bin": ids(*range(99))},
        {"path": "a.txt", "validation_path": "b.bin"},
        ["'a.txt' is plain text but data.validation_path 'b.bin' is tokens (.bin)", "both as text, or both as tokens"],
    ),
    ({"a.bin": ids(*range(99)) * 9}, {"path": "a.bin", "apart": True}, ["no tokenizer says which token", "joined"]),
    (
        {"a.jsonl": GOOD * 20, "t.json": None},
        {"path": "a.jsonl", "tokenizer": "t.json", "apart": True},
        ["no tokenizer says which token ends a document", "<|endoftext|>"],
    ),
    ({"a.txt": POEM}, {"path": "a.txt", "apart": True}, ["is one document", "id 0", "a .jsonl"]),
    ({"b.txt": POEM}, {"validation_path": "b.txt"}, ["data.path is not set"]),
    ({"a.txt": POEM}, {"path": "a.txt", "validation_path": "a.txt"}, ["the same file"]),
    (
        {"a.txt": POEM, "b.txt": POEM},
        {"path": "a.txt", "validation_path": "b.txt,no.txt"},
        ["data.validation_path 'no.txt' does not exist"],
    ),
    (
        {"a.txt": POEM, "b.txt": POEM, "c.bin": ids(*range(99))},
        {"path": "a.txt", "validation_path": "b.txt,c.bin"},
        ["data.validation_path 'b.txt,c.bin' names tokens, 'c.bin', and text, 'b.txt'; give files of one kind"],
    ),
    (
        {"a.txt": POEM, "b.txt": POEM},
        {"path": "a.txt", "validation_path": "b.txt,a.txt"},
        ["data.path and data.validation_path are the same file, 'a.txt'"],
    ),
    ({"a.txt": POEM}, {"path": "a.txt", "dtype": "uint32"}, ["data.dtype is uint32, but 'a.txt' is text", "leave it"]),
    (
        {"d/train.bin": ids(*range(99)), "d/val.bin": ids(*range(99))},
        {"path": "d", "validation_fraction": 0.2},
        ["data.validation_fraction is 0.2, but 'd/val.bin' is the validation data by its name"],
    ),
    (
        {},
        {"path": "a.txt", "validation_path": "b.txt", "tokenizer": "t.json"},
        ["data.path", "data.validation_path", "data.tokenizer"],
    ),
]


ELSEWHERE = {
    "s3://bucket/web/a.jsonl": "is an address, and only files on disk are read; copy it to disk: "
    "aws s3 cp s3://bucket/web/a.jsonl .",
    "s3://bucket/web/*.jsonl": "copy it to disk: aws s3 cp --recursive s3://bucket/web web",
    "gs://bucket/web/": "copy it to disk: gcloud storage cp --recursive gs://bucket/web .",
    "https://example.org/a.txt": "copy it to disk: curl -L -O https://example.org/a.txt",
    "hf://datasets/roneneldan/TinyStories/data": "hf download --repo-type dataset roneneldan/TinyStories --local-dir",
    "az://container/a.txt": "only files on disk are read; copy it to disk",
    "roneneldan/TinyStories": "load_dataset('roneneldan/TinyStories').save_to_disk('TinyStories')\", and give",
    "Qwen/Some.5": "if it names a data set of the hub",
    "texts/a.txt": "does not exist; give the path of a file",
}


@pytest.mark.parametrize("knob", ["path", "validation_path"])
@pytest.mark.parametrize(("text", "sentence"), ELSEWHERE.items(), ids=list(ELSEWHERE))
def test_data_that_are_elsewhere_are_named_as_they_were_written(write, tmp_path, monkeypatch, text, sentence, knob):
    monkeypatch.chdir(tmp_path)
    write("a.txt", POEM)
    with pytest.raises(RequestError) as raised:
        open_(**{"path": "a.txt", knob: text})
    assert len(raised.value.problems) == 1
    assert f"data.{knob} '{text}' " in str(raised.value)
    assert sentence in str(raised.value)


@pytest.mark.parametrize(("files", "knobs", "sentences"), BAD, ids=[" ".join(case[2])[:50] for case in BAD])
def test_mistakes_are_named_with_values_and_remedy(write, tmp_path, monkeypatch, files, knobs, sentences):
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        save_tokenizer(tmp_path / name) if content is None else write(name, content)
    paths = {name: Path(value) for name, value in knobs.items() if name in ("path", "validation_path", "tokenizer")}
    others = {name: value for name, value in knobs.items() if name in ("dtype", "validation_fraction")}
    with pytest.raises(RequestError) as raised:
        open_(vocab=knobs.get("vocab", VOCAB), apart=knobs.get("apart", False), **paths, **others)
    for sentence in sentences:
        assert sentence in str(raised.value)
    assert not list((tmp_path / "cache").glob("*.*")), "a half-made folder is left"


def test_a_python_without_source_files_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setattr(python_library.os, "__file__", str(tmp_path / "os.py"))
    with pytest.raises(RequestError, match=r"holds no source files.*set data.path"):
        open_()
