"""`python -m jaxdist.data --export`: tokens in files that others read, and that are read back as the same tokens."""

import json

import numpy as np
import pytest

from jaxdist.config import Failed, RequestError
from jaxdist.data import token_export
from jaxdist.data.__main__ import main
from jaxdist.huggingface.given_tokenizer import read_tokenizer
from tests.data.files import POEM, ids, lines, open_, save_tokenizer

TEXTS = [f"text {i} of many, {'word ' * (i % 11)}" for i in range(300)]


@pytest.fixture
def web(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "web.jsonl").write_text(lines(*TEXTS))
    return tmp_path


def exported(capsys, *argv: str) -> dict:
    assert main([*argv, "--model.sequence=16", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["export"]


def test_a_folder_is_read_back_as_the_same_data(web, capsys, monkeypatch):
    monkeypatch.setattr(token_export, "CHUNK", 100)
    told = exported(capsys, "web.jsonl", "--model.vocab=300", "--export=out/")
    assert told["files"] == ["special_tokens.json", "tokenizer.json", "train.bin", "val.bin"]
    first = open_(path="web.jsonl")
    again = open_(path="out", tokenizer="out")
    assert (told["training"], told["held_out"]) == (first.train.tokens.length, first.validation.tokens.length)
    assert again.train.tokens.ids.tolist() == first.train.tokens.ids.tolist()
    assert again.validation.tokens.ids.tolist() == first.validation.tokens.ids.tolist()
    assert again.special == first.special
    assert read_tokenizer(web / "out").text == first.tokenizer
    # As nanoGPT reads them.
    assert np.memmap("out/train.bin", np.uint16, "r").tolist() == first.train.tokens.ids.tolist()


def test_a_file_has_those_to_train_on_first(web, capsys):
    told = exported(capsys, "web.jsonl", "--model.vocab=300", "--export=out.bin")
    first = open_(path="web.jsonl")
    both = [*first.train.tokens.ids.tolist(), *first.validation.tokens.ids.tolist()]
    assert np.fromfile("out.bin", "<u2").tolist() == both
    assert (told["path"], told["files"], told["dtype"]) == ("out.bin", ["out.bin"], "uint16")
    fraction = told["held_out"] / (told["training"] + told["held_out"])
    again = open_(path="out.bin", validation_fraction=fraction + 1e-9)
    assert again.validation.tokens.ids.tolist() == first.validation.tokens.ids.tolist()
    assert {path.name for path in web.iterdir()} == {"web.jsonl", "out.bin", "cache"}


def test_what_was_written_is_said_and_how_to_train_on_it(web, capsys):
    words = ["web.jsonl", "--model.vocab=300", "--model.sequence=16"]
    assert main([*words, "--export=out/"]) == main([*words, "--export=out.bin"]) == 0
    folder, file = [line for line in capsys.readouterr().out.splitlines() if line.startswith("wrote ")]
    assert folder.startswith("wrote out/ (special_tokens.json, tokenizer.json, train.bin, val.bin), ")
    assert folder.endswith("python -m jaxdist.train --data.path out/ --data.tokenizer out/ --model.vocab 300")
    assert file.startswith("wrote out.bin, 3.7 k tokens and 194 held out as uint16; train on it: ")
    assert file.endswith("python -m jaxdist.train --data.path out.bin --model.vocab 300")


def test_wide_ids_are_uint32_and_other_forms_lose_their_headers(web, capsys):
    wide = np.random.default_rng(0).integers(0, 100_000, 5000).astype("<u4")
    header = np.zeros(256, "<i4")
    header[:3] = 20240801, 7, wide.size
    (web / "llm.bin").write_bytes(header.tobytes() + wide.tobytes())
    assert exported(capsys, "llm.bin", "--export=out.bin")["dtype"] == "uint32"
    assert np.fromfile("out.bin", "<u4").tolist() == wide.tolist()
    assert open_(path="out.bin", vocab=100_000).train.tokens.dtype == "uint32"


def test_one_wide_part_makes_both_wide(web, capsys):
    np.arange(0, 100_000, 7).astype("<u4").tofile("train.bin")
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 500
    (web / "narrow.bin").write_bytes(header.tobytes() + ids(*range(500)))
    exported(capsys, "train.bin", "--data.validation-path=narrow.bin", "--export=out/")
    assert np.fromfile("out/val.bin", "<u4").tolist() == list(range(500))
    assert np.fromfile("out/train.bin", "<u4").tolist() == list(range(0, 100_000, 7))


def test_tokens_of_a_given_tokenizer_keep_its_delimiters(web, capsys):
    (web / "folder").mkdir()
    save_tokenizer(web / "folder/tokenizer.json", end="<s>")
    (web / "folder/tokenizer_config.json").write_text('{"add_bos_token": true, "bos_token": "<s>"}')
    (web / "words.jsonl").write_text(lines(*[" ".join(f"w{i % 7 + j}" for j in range(9)) for i in range(80)]))
    exported(capsys, "words.jsonl", "--data.tokenizer=folder", "--export=out/")
    first = open_(path="words.jsonl", tokenizer="folder", vocab=301, apart=True)
    again = open_(path="out", tokenizer="out", vocab=301, apart=True)
    assert first.special.bos == again.special.bos == 300
    assert again.train.read(np.arange(5))["starts"].tolist() == first.train.read(np.arange(5))["starts"].tolist()


def test_nothing_is_replaced_unless_it_is_asked_for(web, capsys):
    words = ["web.jsonl", "--model.vocab=300", "--model.sequence=16"]
    (web / "out.bin").write_text("mine")
    with pytest.raises(RequestError, match=r"out.bin' is there already; name another, or add --force to replace it"):
        main([*words, "--export=out.bin"])
    assert (web / "out.bin").read_text() == "mine"
    main([*words, "--export=out.bin", "--force"])
    assert (web / "out.bin").stat().st_size > 1000
    main([*words, "--export=out/"])
    with pytest.raises(RequestError, match=r"is an earlier export; name another, or add --force to replace it"):
        main([*words, "--export=out/"])
    main([*words, "--export=out", "--force"])
    (web / "out/val.bin").write_text("changed")
    with pytest.raises(RequestError, match=r"holds a val.bin that has changed since its export, and is not replaced"):
        main([*words, "--export=out", "--force"])
    (web / "other").mkdir()
    (web / "other/notes.txt").write_text("mine")
    with pytest.raises(RequestError, match="and is not replaced; name another"):
        main([*words, "--export=other", "--force"])


def test_no_source_is_replaced(web):
    (web / "t.bin").write_bytes(ids(*range(300)) * 4)
    (web / "link.bin").hardlink_to(web / "t.bin")
    for name in ("t.bin", "link.bin"):
        with pytest.raises(RequestError, match="is one of the files that are read; name another"):
            main(["t.bin", f"--export={name}", "--force"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--export=out.bin", "--export 'out.bin' writes tokens, and 'web.jsonl' is text without a tokenizer; give a"),
        ("--model.vocab=300 --export=out.npy", "--export 'out.npy' would be a file of tokens; name it out.bin, or a"),
        ("--model.vocab=300 --export=no/out.bin", "--export 'no/out.bin' cannot be written: its folder does not exist"),
        ("--force", "--force has no effect without --export"),
    ],
)
def test_what_cannot_be_exported_is_refused_before_it_is_read(web, words, said, monkeypatch):
    monkeypatch.setattr("jaxdist.data.survey.look.look", None)
    with pytest.raises(RequestError) as refused:
        main(["web.jsonl", *words.split()])
    assert str(refused.value).startswith(said)


def test_refused_data_are_not_exported(web):
    (web / "bad.txt").write_bytes(POEM.encode() + b"\xff")
    with pytest.raises(RequestError, match="is not utf-8 text"):
        main(["bad.txt", "--model.vocab=300", "--export=out/"])
    with pytest.raises(RequestError, match="is not utf-8 text"):
        main(["bad.txt", "--model.vocab=300", "--export=out.bin"])
    assert {path.name for path in web.iterdir()} == {"web.jsonl", "bad.txt"}


@pytest.mark.parametrize("target", ["out.bin", "out/"])
def test_a_full_disk_leaves_nothing(web, target, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    main(["web.jsonl", "--model.vocab=300", "--model.sequence=16"])
    monkeypatch.setattr(token_export, "_write", full)
    with pytest.raises(Failed, match=r"the export to '.*' failed: no space left on device"):
        main(["web.jsonl", "--model.vocab=300", "--model.sequence=16", f"--export={target}"])
    assert {path.name for path in web.iterdir()} == {"web.jsonl", "cache"}
