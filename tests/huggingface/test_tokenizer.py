"""Folders of tokenizers: which tokens stand before and after documents and prompts, and what ends generation."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from jaxdist import evaluate, generate, train
from jaxdist.config import RequestError
from jaxdist.data.held_out import open_held_out
from jaxdist.data.multiple_choice import Question, rows_of
from jaxdist.data.sources import Source
from jaxdist.files import digest
from jaxdist.huggingface.given_tokenizer import read_tokenizer
from jaxdist.huggingface.special_tokens import SpecialTokens, to_json
from jaxdist.training.continuation import Ending
from jaxdist.training.generation import Prompter
from jaxdist.training.run_dir import RunFolder
from tests.data.files import lines, open_
from tests.training.conftest import SMALL, over

WORDS = [f"w{i}" for i in range(20)]
BOS, EOS, PAD, TURN = 20, 21, 22, 23
SPECIAL = {BOS: "<s>", EOS: "</s>", PAD: "<pad>", TURN: "<|turn|>"}
TEXTS = [" ".join(WORDS[i : i + 4]) for i in range(12)]
GOLDEN = Path(__file__).parent / "golden" / "llama31"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    """Make a folder of a tokenizer of words: `template` is its post-processor, the others are files of the folder."""

    def make(template=None, **files):
        path = tmp_path / f"folder{len(list(tmp_path.glob('folder*')))}"
        path.mkdir()
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.add_special_tokens(list(SPECIAL.values()))
        if template:
            ids = [(name, token) for token, name in SPECIAL.items()]
            tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
        tokenizer.save(str(path / "tokenizer.json"))
        for name, content in files.items():
            (path / f"{name}.json").write_text(json.dumps(content))
        return path

    return make


def write_texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text(lines(*TEXTS))
    return path


def documents(tmp_path, tokenizer, **more):
    return open_(path=write_texts(tmp_path), tokenizer=tokenizer, validation_fraction=0.5, vocab=32, sequence=4, **more)


def expected(first, bos, eos):
    """Every second text from `first` on, between these tokens."""
    return [token for i in range(first, 12, 2) for token in [*bos, *range(i, i + 4), *eos]]


# ---- which tokens


@pytest.mark.parametrize(
    ("template", "config", "bos"),
    [
        (None, {}, None),
        (None, {"bos_token": "<s>"}, None),
        ("<s> $A", {}, BOS),
        ("<s> $A </s>", {}, BOS),
        ("$A </s>", {"bos_token": "<s>"}, None),
        (None, {"bos_token": "<s>", "add_bos_token": True}, BOS),
        (None, {"bos_token": {"content": "<s>", "special": True}, "add_bos_token": True}, BOS),
        ("<s> $A", {"bos_token": "<|turn|>", "add_bos_token": True}, TURN),
        ("<s> $A", {"bos_token": "<s>", "add_bos_token": False}, None),
        (None, {"bos_token": None, "add_bos_token": True}, None),
    ],
)
def test_bos_is_what_the_config_adds_or_else_the_post_processor(folder, template, config, bos):
    assert read_tokenizer(folder(template, tokenizer_config=config)).special.bos == bos


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({}, EOS),
        ({"tokenizer_config": {"eos_token": "<|turn|>"}}, TURN),
        ({"tokenizer_config": {"eos_token": {"content": "<pad>"}}}, PAD),
        ({"tokenizer_config": {"eos_token": None}, "special_tokens_map": {"eos_token": "<|turn|>"}}, TURN),
        ({"tokenizer_config": {"eos_token": "<pad>"}, "special_tokens_map": {"eos_token": "<|turn|>"}}, PAD),
        ({"config": {"eos_token_id": PAD}}, PAD),
        ({"config": {"eos_token_id": [TURN, PAD]}}, TURN),
        ({"config": {"eos_token_id": 50_256}}, EOS),
        ({"tokenizer_config": {"eos_token": "<pad>"}, "config": {"eos_token_id": TURN}}, PAD),
    ],
)
def test_eos_is_the_tokenizers_or_else_the_models_or_else_a_usual_one(folder, files, eos):
    assert read_tokenizer(folder(**files)).special.eos == eos


@pytest.mark.parametrize(
    ("files", "stops"),
    [
        ({}, (EOS,)),
        ({"config": {"eos_token_id": PAD}}, (PAD,)),
        ({"config": {"eos_token_id": PAD}, "generation_config": {"eos_token_id": [TURN, EOS]}}, (TURN, EOS, PAD)),
        ({"generation_config": {"eos_token_id": TURN}}, (TURN, EOS)),
        ({"generation_config": {"eos_token_id": EOS}, "tokenizer_config": {"eos_token": "<|turn|>"}}, (EOS, TURN)),
        ({"tokenizer_config": {"eos_token": "<pad>"}}, (PAD,)),
    ],
)
def test_generation_stops_at_what_its_config_lists_and_at_the_eos_of_the_tokenizer(folder, files, stops):
    assert read_tokenizer(folder(**files)).special.stops == stops


def test_a_token_that_both_begins_and_ends_documents_stands_once(folder, tmp_path):
    config = {"bos_token": "</s>", "eos_token": "</s>", "add_bos_token": True}
    path = folder(tokenizer_config=config)
    assert read_tokenizer(path).special == SpecialTokens(EOS, None, (EOS,))
    assert documents(tmp_path, path).train.tokens.ids.tolist() == expected(0, [EOS], [])


def test_the_file_alone_gives_no_bos(folder):
    path = folder("<s> $A", tokenizer_config={"eos_token": "<|turn|>"}, generation_config={"eos_token_id": PAD})
    assert read_tokenizer(path / "tokenizer.json").special == SpecialTokens(None, EOS, ())


# ---- what is refused


@pytest.mark.parametrize(
    ("template", "files", "words"),
    [
        (None, {"tokenizer_config": {"eos_token": "<end>"}}, ["eos_token '<end>'", "tokenizer.json lacks"]),
        (None, {"tokenizer_config": {"bos_token": "<b>", "add_bos_token": True}}, ["bos_token '<b>'", "lacks"]),
        (
            None,
            {"generation_config": {"eos_token_id": "</s>"}},
            ["generation_config.json': eos_token_id is '</s>'", "must be a token id"],
        ),
        (None, {"config": [1]}, ["config.json' is JSON, but not an object"]),
        ("<s> <|turn|> $A", {}, ["puts 2 tokens before each text", "[20, 23]"]),
    ],
)
def test_a_folder_that_contradicts_itself_is_refused(folder, template, files, words):
    with pytest.raises(RequestError) as raised:
        read_tokenizer(folder(template, **files))
    assert all(word in str(raised.value) for word in words)


def test_a_config_that_is_no_json_is_named(folder):
    path = folder(tokenizer_config={})
    (path / "tokenizer_config.json").write_text("{")
    with pytest.raises(RequestError, match=r"tokenizer_config.json' is not valid JSON .*put the right file there"):
        read_tokenizer(path)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["tokenizer.model"], "only tokenizer.model (sentencepiece); convert it"),
        (["vocab.json", "merges.txt"], "only vocab.json"),
        ([], "is a folder without a tokenizer.json"),
    ],
)
def test_a_folder_without_a_tokenizer_json_is_refused(tmp_path, capsys, files, words):
    (tmp_path / "empty").mkdir()
    for name in files:
        (tmp_path / "empty" / name).write_text("x")
    with pytest.raises(RequestError) as raised:
        documents(tmp_path, tmp_path / "empty")
    assert words in str(raised.value)
    if files:
        assert "AutoTokenizer.from_pretrained" in str(raised.value)


def test_more_entries_than_the_model_has_are_refused(folder, tmp_path):
    path = folder()
    with pytest.raises(RequestError, match=rf"data.tokenizer '{path}' has ids up to 23 but model.vocab is 23; .* 24$"):
        open_(path=write_texts(tmp_path), tokenizer=path, vocab=23)


# ---- tokens of documents


@pytest.mark.parametrize("add_bos", [True, False])
def test_documents_stand_between_bos_and_eos(folder, tmp_path, add_bos):
    config = {"bos_token": "<s>", "eos_token": "<|turn|>", "add_bos_token": add_bos}
    corpus = documents(tmp_path, folder(tokenizer_config=config))
    bos = [BOS] if add_bos else []
    assert corpus.train.tokens.ids.tolist() == expected(0, bos, [TURN])
    assert corpus.validation.tokens.ids.tolist() == expected(1, bos, [TURN])
    assert ("(<s> before each document)" in corpus.source) == add_bos


def test_bos_stands_once_before_a_text_in_blocks(folder, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(TEXTS * 40))
    corpus = open_(path=path, tokenizer=folder("<s> $A"), vocab=32)
    ids = np.concatenate([corpus.train.tokens.ids, corpus.validation.tokens.ids])
    assert (ids == BOS).sum() == (ids == EOS).sum() == 1
    assert corpus.train.tokens.ids[0] == BOS


def test_other_special_tokens_are_other_data(folder, tmp_path):
    with_bos, without, later = (
        documents(tmp_path, folder("<s> $A", tokenizer_config={"add_bos_token": add, "bos_token": name}))
        for add, name in ((True, "<s>"), (False, "<s>"), (True, "<|turn|>"))
    )
    assert len({with_bos.fingerprint, without.fingerprint, later.fingerprint}) == 3
    assert len({with_bos.train.tokens.path, without.train.tokens.path, later.train.tokens.path}) == 3


def test_a_folder_that_adds_nothing_is_the_data_of_its_file(folder, tmp_path):
    path = folder(generation_config={"eos_token_id": [EOS, TURN]})
    of_folder, of_file = documents(tmp_path, path), documents(tmp_path, path / "tokenizer.json")
    assert of_folder.fingerprint == of_file.fingerprint
    assert of_folder.train == of_file.train


@pytest.mark.parametrize(
    ("template", "config"), [("<s> $A", {"eos_token": "<|turn|>"}), ("</s> $A", {"eos_token": "</s>"})]
)
def test_documents_apart_are_told_by_either_token(folder, tmp_path, template, config):
    path = folder(template, tokenizer_config=config)
    special = read_tokenizer(path).special
    tokens = documents(tmp_path, path, apart=True).train.tokens
    assert (tokens.begin, tokens.end) == (special.bos, special.eos)
    assert tokens.apart


def test_one_document_after_a_bos_is_not_several(folder, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(TEXTS * 40))
    tokenizer = folder("</s> $A", tokenizer_config={"eos_token": "</s>"})
    with pytest.raises(RequestError, match=r"one document: no BOS token \(id 21\) stands between"):
        open_(path=path, tokenizer=tokenizer, vocab=32, apart=True)


WRITTEN = [f"<s> {TEXTS[0]}", f"{TEXTS[1]} </s>", f"<s> {TEXTS[2]} </s>", "<s>", "</s>", *TEXTS[3:10]]
"""Documents of which five have a delimiter as text, which the tokenizer reads as the token."""


def test_a_delimiter_that_a_text_has_itself_stands_once(folder, tmp_path):
    """In data, in files to evaluate, in prompts and in contexts of questions; and each says so."""
    source = folder("<s> $A", tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"})
    given = read_tokenizer(source)
    path = tmp_path / "written.jsonl"
    path.write_text(lines(*WRITTEN))
    own = [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [], [], *([i, i + 1, i + 2, i + 3] for i in range(3, 10))]
    expected = [token for ids in own for token in (BOS, *ids, EOS)]

    data = open_(path=path, validation_path=write_texts(tmp_path), tokenizer=source, vocab=32, sequence=4)
    assert data.train.tokens.ids.tolist() == expected
    assert data.source.endswith("; 5 documents have their own <s> or </s>, which is not put there again")

    file = open_held_out(path, given, 32)
    assert file.tokens.ids.tolist() == expected
    assert file.note == f"'{path}': 5 documents have their own <s> or </s>, which is not put there again"
    plain = tmp_path / "plain.jsonl"
    plain.write_text(lines(*(" ".join(f"w{i}" for i in ids) for ids in own if ids)))
    # Two documents have no text but a delimiter, and a space stands beside the others.
    assert file.bytes == open_held_out(plain, given, 32).bytes + 4

    prompter = Prompter(given.load(), given.special, Ending(10, 100))
    assert [prompter.of_text(text) for text in ("<s> w1", "w1", "w1 </s>")] == [[BOS, 1], [BOS, 1], [BOS, 1, EOS]]
    assert prompter.note() == "1 prompt has its own <s>, which is not put there again"

    questions = [Question(context, (" w2", " w3"), 0, "here") for context in ("<s> w1", "w1", "<s>", "")]
    rows = rows_of(questions, given.load(), given.special, 4)
    assert rows.tokens[::2, :3].tolist() == [[BOS, 1, 0], [BOS, 1, 0], [BOS, 0, 0], [BOS, 0, 0]]
    assert rows.note == "2 contexts have their own <s>, which is not put there again"


@pytest.mark.parametrize("ends", [EOS, None])
def test_a_delimiter_in_the_last_block_of_a_text_stands_once(folder, tmp_path, ends):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(TEXTS * 40) + (" </s>" if ends else ""))
    found = open_(path=path, tokenizer=folder("<s> $A"), vocab=32)
    ids = np.concatenate([found.train.tokens.ids, found.validation.tokens.ids])
    assert (ids == BOS).sum() == (ids == EOS).sum() == 1
    assert found.changed == (ends is not None)


def test_a_run_that_began_with_two_delimiters_goes_on_with_two(folder, tmp_path):
    source = folder("<s> $A")
    path = tmp_path / "written.jsonl"
    path.write_text(lines(*WRITTEN))
    knobs = dict(path=path, tokenizer=source, validation_fraction=0.25, vocab=32, sequence=4)
    once = open_(**knobs)
    # As versions before named it.
    content = digest(Source.of(path).digest(), 0.25)
    begun = digest(content, (source / "tokenizer.json").read_text(), BOS, EOS)
    twice = open_(**knobs, begun=begun)
    assert twice.fingerprint == begun != once.fingerprint
    assert twice.train.tokens.ids[:6].tolist() == [BOS, *once.train.tokens.ids[:5]]
    assert twice.source.endswith("(as an earlier jaxdist read it, with which the run began)")
    assert open_(**knobs, begun=once.fingerprint) == open_(**knobs, begun="other") == once


def test_ids_equal_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(GOLDEN)
    given = read_tokenizer(GOLDEN)
    text = "the cat sat"
    ids = given.load().encode(text, add_special_tokens=False).ids
    assert [given.special.bos, *ids] == theirs(text).input_ids
    assert given.special.eos == theirs.eos_token_id


# ---- runs


@pytest.mark.parametrize("tokens", [SpecialTokens(), SpecialTokens(1, 2, (2, 3))])
def test_what_a_run_keeps_is_read_back(folder, tokens):
    path = folder() / "special_tokens.json"
    path.write_text(to_json(tokens))
    assert read_tokenizer(path.parent).special == tokens


@pytest.mark.parametrize(
    "content", ["", "[]", '{"bos": 1}', '{"bos": true, "eos": 1, "stops": []}', '{"bos": 24, "eos": 1, "stops": []}']
)
def test_what_a_run_does_not_keep_is_refused(folder, content):
    path = folder() / "special_tokens.json"
    path.write_text(content)
    with pytest.raises(RequestError, match=r"special_tokens.json'.* the right (file|one) there"):
        read_tokenizer(path.parent)


@pytest.fixture
def finished(folder, tmp_path):
    """A run of two steps with the tokenizer of a folder, and the folder."""
    source = folder(
        "<s> $A",
        tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"},
        generation_config={"eos_token_id": [EOS, TURN]},
    )
    text = tmp_path / "texts.jsonl"
    text.write_text(lines(*TEXTS * 8))
    argv = over(
        [*SMALL, "--train.steps=2", "--checkpoint.every=2", "--validation.every=2"],
        f"--data.path={text}",
        f"--data.tokenizer={source}",
        f"--run-dir={tmp_path / 'run'}",
        "--mesh=1x1x1",
    )
    assert train.main(argv) == 0
    return tmp_path / "run", source, argv


@pytest.mark.slow
def test_a_run_keeps_its_special_tokens_and_generates_without_the_folder(finished, capsys):
    run, source, _ = finished
    special = SpecialTokens(BOS, EOS, (EOS, TURN))
    shutil.rmtree(source)
    assert read_tokenizer(RunFolder(run).tokenizer_source).special == special
    assert generate.main([str(run), "--mesh=1x1x1", "--prompt=w1 w2", "--tokens=8"]) == 0
    assert capsys.readouterr().out.startswith("w1 w2")


@pytest.mark.slow
def test_other_data_are_evaluated_with_the_special_tokens_of_the_run(finished, tmp_path, capsys):
    run, source, _ = finished
    other = tmp_path / "other.jsonl"
    other.write_text(lines(*TEXTS[::-1] * 8))
    file = f"--data.tokenizer={source / 'tokenizer.json'}"
    assert (
        evaluate.main([str(run), "--mesh=1x1x1", f"--data.path={other}", "--data.validation-fraction=0.5", file]) == 0
    )
    # 48 documents of BOS, four words and EOS; the file alone would give 240 tokens, in 14 rows.
    assert "over 272 tokens" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_begins_with_its_weights_encodes_as_it_did(finished, tmp_path):
    run, _, argv = finished
    later = tmp_path / "later"
    options = [option for option in argv if not option.startswith(("--data.tokenizer", "--run-dir"))]
    assert train.main([*options, f"--run-dir={later}", f"--init-from={run}"]) == 0
    assert (later / "special_tokens.json").read_text() == (run / "special_tokens.json").read_text()


@pytest.mark.slow
def test_a_run_is_not_resumed_with_other_special_tokens(finished):
    _, source, argv = finished
    (source / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, "eos_token": "</s>"}))
    with pytest.raises(RequestError, match="the training data is not what the run in"):
        train.main([*over(argv, "--train.steps=2"), "--resume=2"])
