"""`python -m jaxdist.data`: what it says of files of each form, and what a training says where it refuses them."""

import gzip
import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxdist.config import DataConfig, RequestError
from jaxdist.data.__main__ import main
from jaxdist.data.naming.paths import open_sources
from jaxdist.data.packed_rows import open_packed
from jaxdist.data.progress import unseen
from jaxdist.data.streams import Request
from jaxdist.data.survey import duplicates
from jaxdist.data.survey.text_documents import SAMPLES, TextDocuments
from jaxdist.data.survey.token_documents import pieces, samples
from jaxdist.data.tokens import Tokens
from jaxdist.huggingface.special_tokens import SpecialTokens
from tests.data.files import POEM, ids, lines, open_, save_tokenizer

TEXTS = [" ".join(f"w{(i * j) % 97}" for j in range(1, 2 + i % 23)) for i in range(120)]


@pytest.fixture
def web(tmp_path, monkeypatch):
    """A folder of three forms; the documents 5 and 6 of b.jsonl.gz are documents 1 and 3 of a.jsonl."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "web").mkdir()
    (tmp_path / "web/a.jsonl").write_text(lines(*TEXTS[:60], ""))
    (tmp_path / "web/b.jsonl.gz").write_bytes(
        gzip.compress(lines(*TEXTS[100:104], TEXTS[0], TEXTS[2], *TEXTS[104:]).encode())
    )
    (tmp_path / "web/poem.txt").write_text(POEM)
    (tmp_path / "web/table.csv").write_text("a,b\n")
    return tmp_path


def told(capsys, *argv: str) -> dict:
    assert main([*argv, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


def test_text_without_a_tokenizer_is_told_in_bytes(web, capsys):
    found = told(capsys, "web")
    (source,) = found["sources"]
    assert source["left_out"] == "1 .csv"
    forms = [(one["form"], one["compression"], one["files"]) for one in source["forms"]]
    assert forms == [("JSON lines", None, 1), ("JSON lines", "gzip", 1), ("plain text", None, 1)]
    assert sum(one["bytes"] for one in source["forms"]) == source["bytes"]
    written = [*TEXTS[:60], *TEXTS[100:104], TEXTS[0], TEXTS[2], *TEXTS[104:], POEM]
    documents = found["documents"]
    assert (documents["count"], documents["empty"], documents["bad"]) == (len(written), 1, 0)
    assert documents["tokens"] is None
    assert documents["bytes"]["total"] == sum(len(text.encode()) for text in written)
    assert documents["bytes"]["longest"] == len(POEM.encode())
    repeated = len(written) - len(set(written))
    assert repeated >= 2
    assert found["duplicates"]["compared"] == len(written)
    assert found["duplicates"]["repeated"] == repeated
    assert (found["tokens"], found["rows"], found["problems"]) == (None, None, [])
    assert "byte-level BPE of 2,048 entries (model.vocab) from" in found["notes"][0]


def test_the_first_pair_is_told_by_file_and_document(web, capsys):
    (web / "a.jsonl").write_text(lines("one", "", "two", "three"))
    (web / "b.jsonl").write_text(lines("four", "two", "four"))
    found = told(capsys, "a.jsonl,b.jsonl")["duplicates"]
    assert (found["compared"], found["repeated"]) == (6, 2)
    assert found["first"] == [{"file": "a.jsonl", "document": 2}, {"file": "b.jsonl", "document": 2}]
    main(["a.jsonl,b.jsonl"])
    said = capsys.readouterr().out
    assert (
        "duplicates  2 of 6 documents (33.3 %) have come before; document 2 of b.jsonl is the same as document 2 of "
        "a.jsonl\n" in said
    )


def test_it_is_said_where_not_all_are_compared(web, capsys, monkeypatch):
    monkeypatch.setattr(duplicates, "LIMIT", 3)
    (web / "a.jsonl").write_text(lines("one", "two", "one", "one"))
    main(["a.jsonl"])
    assert "duplicates  1 of the first 3 documents (33.3 %) have come before; " in capsys.readouterr().out


def test_tokens_are_those_of_a_training(web, capsys):
    found = told(capsys, "web", "--model.vocab=300", "--model.sequence=32")
    corpus = open_(path="web", sequence=32)
    tokens = found["tokens"]
    assert (tokens["training"], tokens["held_out"]) == (corpus.train.tokens.length, corpus.validation.tokens.length)
    (source,) = tokens["sources"]
    about = corpus.source.partition("; rows cut")[0]
    assert (tokens["entries"], source["dtype"], source["about"]) == (300, "uint16", about)
    packed = open_packed(corpus.train.tokens, 32, corpus.special, "name", unseen).packed
    assert found["rows"] == {
        "sequence": 32,
        "documents": packed.documents,
        "cut": packed.cut_in_stream,
        "cut_best_fit": packed.cut,
    }
    lengths = found["documents"]["tokens"]
    assert lengths["total"] == tokens["training"] + tokens["held_out"]
    tokenizer = Tokenizer.from_str(corpus.tokenizer)
    for sample in found["samples"]:
        assert corpus.train.tokens.read(sample["start"], sample["start"] + len(sample["ids"])).tolist() == sample["ids"]
        if not any("[" in piece for piece in sample["pieces"]):
            assert "".join(sample["pieces"]) == tokenizer.decode(sample["ids"], skip_special_tokens=False)


def test_a_given_tokenizer_needs_no_vocab(web, capsys):
    save_tokenizer(web / "tokenizer.json", end="<|endoftext|>")
    (web / "w.jsonl").write_text(lines(*TEXTS))
    found = told(capsys, "w.jsonl", "--data.tokenizer=tokenizer.json", "--model.sequence=16")
    lengths = [len(text.split()) + 1 for text in TEXTS]
    assert found["documents"]["tokens"]["total"] == sum(lengths)
    assert found["documents"]["tokens"]["longest"] == max(lengths)
    assert sum(one["documents"] for one in found["documents"]["tokens"]["bins"]) == 120
    assert found["notes"] == []


def test_tokens_tell_what_vocabulary_they_need(web, capsys):
    (web / "t.bin").write_bytes(ids(*range(0, 60000, 7)))
    found = told(capsys, "t.bin")
    assert found["tokens"]["largest"] == 59997
    assert found["documents"]["count"] is None
    assert found["samples"][0]["ids"] == list(range(0, 48 * 7, 7))
    assert found["samples"][0]["pieces"] is None
    assert "no tokenizer says which token ends a document" in found["notes"][0]
    np.arange(0, 200_000, 7).astype("<u4").tofile("wide.bin")
    assert told(capsys, "wide.bin")["tokens"]["largest"] == 199_997 // 7 * 7


def test_documents_of_tokens_are_told_apart_by_their_tokenizer(web, capsys):
    end = Tokenizer.from_file(str(save_tokenizer(web / "tokenizer.json", end="<|endoftext|>"))).token_to_id(
        "<|endoftext|>"
    )
    (web / "t.bin").write_bytes(ids(*[*[1, 2, end, 3, end] * 20, 4, 5, 6, end, 1, 2, end]))
    found = told(
        capsys, "t.bin", "--data.tokenizer=tokenizer.json", "--data.validation-fraction=0.4", "--model.sequence=8"
    )
    assert found["documents"]["count"] == 42
    of = {"source": "t.bin", "part": "training"}
    assert found["duplicates"]["first"] == [{**of, "document": 1}, {**of, "document": 3}]
    assert found["samples"][0]["pieces"] == ["w1", " w2", " <|endoftext|>"]


def test_all_that_is_refused_is_told_beside_what_is_not(web, capsys):
    (web / "web/c.jsonl").write_text(lines("good") + "no json\n" + lines("read too"))
    (web / "web/d.txt").write_bytes(b"abc\xff\n")
    with pytest.raises(RequestError) as refused:
        main(["web", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert refused.value.problems == found["problems"]
    json_line, utf8 = found["problems"]
    assert json_line.startswith("line 2 of 'web/c.jsonl' is not JSON")
    assert utf8.startswith("'web/d.txt' is not utf-8 text (byte 4 is 0xff)")
    with pytest.raises(RequestError, match=r"line 2 of 'web/c.jsonl' is not JSON") as of_training:
        open_(path="web")
    assert of_training.value.problems == [json_line]
    assert (found["documents"]["count"], found["documents"]["bad"]) == (85, 1)  # and the file is read to its end


def test_rows_that_are_skipped_are_counted(web, capsys):
    rows = lines(*[f"text {i}" for i in range(300)]).splitlines()
    (web / "some.jsonl").write_text("\n".join([*rows, "{", "[]", *rows]))
    found = told(capsys, "some.jsonl", "--data.on-error=skip")["documents"]
    assert (found["count"], found["bad"]) == (600, 2)
    (web / "many").mkdir()
    for name in ("a", "b"):
        (web / f"many/{name}.jsonl").write_text("\n".join([*rows, *["{"] * 60]))
    with pytest.raises(RequestError) as refused:
        main(["many", "--data.on-error=skip"])
    assert "120 rows without a text that can be read" in capsys.readouterr().out
    with pytest.raises(RequestError) as of_training:
        open_(path="many", on_error="skip")
    assert refused.value.problems == of_training.value.problems
    assert refused.value.problems[0].startswith("101 of 701 rows cannot be read")


@pytest.mark.parametrize("path", ["nowhere", "s3://bucket/web", "owner/name"])
def test_what_is_no_file_is_refused_as_by_a_training(web, path):
    with pytest.raises(RequestError) as looked:
        main([path])
    with pytest.raises(RequestError) as trained:
        open_(path=path)
    assert looked.value.problems == trained.value.problems


def test_too_little_data_are_told_and_refused(web, capsys):
    (web / "few.jsonl").write_text(lines("a few words"))
    with pytest.raises(RequestError, match=r"^the training data has \d+ tokens and one row needs 129"):
        main(["few.jsonl", "--model.vocab=300"])
    assert "documents   1\n" in capsys.readouterr().out


def test_a_config_says_what_a_training_reads(web, capsys):
    (web / "mine.toml").write_text('[data]\npath = "web"\n[model]\nvocab = 300\nsequence = 32\n')
    assert told(capsys, "mine.toml") == told(capsys, "web", "--model.vocab=300", "--model.sequence=32")
    (web / "images.toml").write_text('[model]\nfamily = "cnn"\n')
    with pytest.raises(RequestError, match="which trains on images"):
        main(["images.toml"])


def test_all_sources_of_a_mixture_are_looked_at_together(web, capsys):
    (web / "a.jsonl").write_text(lines(*TEXTS[:60]))
    (web / "b.jsonl").write_text(lines(TEXTS[4], *TEXTS[60:]))
    words = ["--model.vocab=300", "--model.sequence=8", "--data.validation-fraction=0.2"]
    found = told(capsys, "a.jsonl*3,b.jsonl*1", *words)
    assert [(one["name"], one["share"]) for one in found["sources"]] == [("a.jsonl", 0.75), ("b.jsonl", 0.25)]
    assert found["duplicates"]["repeated"] == 1
    assert found["duplicates"]["first"] == [{"file": "a.jsonl", "document": 5}, {"file": "b.jsonl", "document": 1}]
    corpus = open_(mixture="a.jsonl*3,b.jsonl*1", sequence=8, validation_fraction=0.2)
    assert [one["about"] for one in found["tokens"]["sources"]] == [
        f"{one.source}, byte-level BPE of 300 entries" for one in corpus.sources.values()
    ]
    assert found["documents"]["tokens"]["documents"] == found["documents"]["count"] == 121
    parts = [
        open_packed(one.train.tokens, 8, corpus.special, name, unseen).packed for name, one in corpus.sources.items()
    ]
    assert found["rows"]["cut"] == sum(part.cut_in_stream for part in parts)
    assert found["rows"]["cut_best_fit"] == sum(part.cut for part in parts)
    assert {sample["source"] for sample in found["samples"]} == {"a.jsonl", "b.jsonl"}
    main(["a.jsonl*3,b.jsonl*1", *words])
    said = capsys.readouterr().out
    assert "data        a.jsonl (75 % of the rows): 1 file, " in said
    assert "\n  b.jsonl: " in said
    with pytest.raises(RequestError, match=r"^--export 'out/' writes the tokens of one source, and data.mixture has 2"):
        main(["a.jsonl*3,b.jsonl*1", *words, "--export=out/"])


def test_a_mixture_without_rows_is_refused_by_source(web, capsys):
    (web / "b.jsonl").write_text(lines("few"))
    with pytest.raises(RequestError, match=r"^the training data of 'b.jsonl' has \d+ tokens and one row needs 9"):
        main(["web/a.jsonl*3,b.jsonl*1", "--model.vocab=300", "--model.sequence=8"])


def test_a_place_may_be_given_once(web):
    with pytest.raises(RequestError, match=r"data.path is given twice"):
        main(["web", "--data.path=web/a.jsonl"])


def test_the_picture_has_a_bar_for_each_length(web, capsys):
    (web / "four.jsonl").write_text(lines("a", "bb", "cc", "dd", "e" * 9))
    main(["four.jsonl"])
    said = capsys.readouterr().out.splitlines()
    start = said.index("bytes of a document  documents")
    assert said[start + 1 : start + 5] == [
        "                  1          1  20.0 %  #############",
        "             2 to 3          3  60.0 %  ########################################",
        "             4 to 7          0   0.0 %",
        "            8 to 15          1  20.0 %  #############",
    ]


def test_samples_are_drawn_from_all_documents_and_are_the_same_ones(write):
    path = write("a.jsonl", lines(*[f"text {i}" for i in range(1000)]))
    sources = open_sources(DataConfig(path=path)).all
    first, again = (TextDocuments.read(sources, unseen).samples for _ in range(2))
    assert first == again
    assert len(first) == SAMPLES
    assert [sample.text for _, sample in first] == [f"text {number}" for number, _ in first]
    assert first[-1][0] > 500


def test_a_sample_of_tokens_is_one_document(write):
    tokens = Tokens.open(write("t.bin", ids(*[5, 6, 0, 7, 8, 9, 0, 1, 2, 3, 4, 5, 0, 6, 7])), "uint16")
    found = [(one.start, one.ids) for one in samples(tokens, SpecialTokens(eos=0), None, 3)]
    assert found == [(0, [5, 6, 0]), (7, [1, 2, 3, 4, 5, 0]), (13, [6, 7])]
    before = [(one.start, one.ids) for one in samples(tokens, SpecialTokens(bos=0), None, 3)]
    assert before == [(0, [5, 6]), (6, [0, 1, 2, 3, 4, 5]), (12, [0, 6, 7])]


def test_borders_of_tokens_within_a_character_are_counted():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert pieces(tokenizer, tokenizer.encode("aé日🙂b").ids) == ["a", "é[2]", "日[3]", "🙂[4]", "b"]
    cut = tokenizer.encode("a日").ids[:3]
    assert pieces(tokenizer, cut) == ["a", "�[2]"]


def test_looking_makes_the_cache_that_training_reads(web, capsys):
    told(capsys, "web", "--model.vocab=300")
    passes = []
    Request.of(DataConfig(path="web"), 300, lambda what, *_: passes.append(what)).open()
    assert "tokenizing" not in passes
