"""Tokens that stand beside a tokenizer.json alone are read as tokens, with the ids that transformers gives them."""

import json
import shutil
from pathlib import Path

import pytest

from jaxdist.config import RequestError
from jaxdist.data.sources import Source
from jaxdist.files import digest
from jaxdist.huggingface.given_tokenizer import GivenTokenizer, load_tokenizer, read_tokenizer
from jaxdist.huggingface.small_files import _same
from tests.data.files import lines, open_

GOLDEN = Path(__file__).parent / "golden_tokenizers"
NEXT = {"gpt2": 320, "llama": 340, "qwen": 330}
"""The first id that each of these tokenizers does not have."""

TEXTS = [
    "a <|x|> b<|y|>c tool tools <pad>",
    "<|x|><|y|>",
    " <|x|> ",
    "the tool <s> and </s> he <|endoftext|> <|im_start|>user\n",
    "<unk> the",
    "plain text",
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    """Make a copy of a golden folder, with more keys in its small files."""

    def make(name: str, **files) -> Path:
        copy = Path(shutil.copytree(GOLDEN / name, tmp_path / f"folder{len(list(tmp_path.iterdir()))}"))
        for file, content in files.items():
            path = copy / f"{file}.json"
            there = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps({**there, **content}))
        return copy

    return make


def added(content: str, **attributes) -> dict:
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {"content": content, **plain, **attributes}


def own_tokens(name: str) -> dict:
    """The added tokens of a golden tokenizer, as a tokenizer_config.json has them."""
    tokens = json.loads((GOLDEN / name / "tokenizer.json").read_text())["added_tokens"]
    return {str(token.pop("id")): token for token in tokens}


def folders(name: str) -> dict[str, dict]:
    """What published folders have: the small files of each, by what they show."""
    k = NEXT[name]
    own = own_tokens(name)
    decoder = {**own, str(k): added("<|x|>"), str(k + 1): added("<|y|>", special=False, normalized=True)}
    strips = {str(k): added("<|x|>", lstrip=True, rstrip=True), str(k + 1): added("tool", single_word=True)}
    role = {"__type": "AddedToken", **added("<|y|>", lstrip=True)}
    other = {token: {**entry, "normalized": not entry["normalized"], "lstrip": True} for token, entry in own.items()}
    return {
        "ids": {"tokenizer_config": {"added_tokens_decoder": decoder}},
        "attributes": {"tokenizer_config": {"added_tokens_decoder": strips}},
        "a file of ids": {"added_tokens": {"<|y|>": k + 1, "<pad>": k}, "special_tokens_map": {"pad_token": "<pad>"}},
        "names": {"tokenizer_config": {"pad_token": "<pad>", "additional_special_tokens": ["<|y|>", "<|x|>"]}},
        "roles": {"tokenizer_config": {"extra_special_tokens": {"image_token": "<|x|>"}, "mask_token": role}},
        "a map": {"special_tokens_map": {"sep_token": added("<|x|>", rstrip=True)}},
        "other attributes": {"tokenizer_config": {"added_tokens_decoder": other}},
        "words of the vocabulary": {"tokenizer_config": {"added_tokens_decoder": own, "sep_token": "he"}},
    }


IDS = [
    ("ids", "<|x|><|y|>", (0, 1)),
    ("attributes", "<|x|>tool", (0, 1)),
    ("a file of ids", "<pad><|y|>", (0, 1)),
    ("names", "<pad><|x|><|y|>", (0, 2, 1)),
    ("roles", "<|x|><|y|>", (1, 0)),
    ("a map", "<|x|>", (0,)),
]


@pytest.mark.parametrize("name", NEXT)
def test_tokens_of_other_files_have_the_ids_that_these_give_or_the_next_ones(folder, name):
    for files, text, ids in IDS:
        given = read_tokenizer(folder(name, **folders(name)[files]))
        # Metaspaces may stand beside them.
        found = [token for token in given.load().encode(text, add_special_tokens=False).ids if token >= NEXT[name]]
        assert found == [NEXT[name] + i for i in ids], files
        bare = given.alone().load()
        assert max(bare.encode(text, add_special_tokens=False).ids) < NEXT[name]
        assert given.bare == (GOLDEN / name / "tokenizer.json").read_text()


def test_the_texts_of_a_tokenizer_that_lacks_nothing_stay_as_they_are(folder):
    for name in NEXT:
        for files in ({}, {"tokenizer_config": {"added_tokens_decoder": own_tokens(name)}}):
            given = read_tokenizer(folder(name, **files))
            assert (given.text, given.bare) == ((GOLDEN / name / "tokenizer.json").read_text(), None)


@pytest.mark.parametrize("files", ["ids", "names"])
def test_a_token_without_a_row_in_the_model_stays_text(folder, files):
    for rows, more in ((320, 0), (321, 1), (400, 2 if files == "ids" else 3)):
        given = read_tokenizer(folder("gpt2", **folders("gpt2")[files], config={"vocab_size": rows}))
        assert len(given.load().get_vocab()) == 320 + more


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"tokenizer_config": {"added_tokens_decoder": {"325": added("<|x|>")}}}, "'<|x|>' the id 325 .* it has 320"),
        ({"tokenizer_config": {"added_tokens_decoder": {"5": added("<|endoftext|>")}}}, "the id 5 .* it has 0"),
        ({"added_tokens": {"<|x|>": 400}}, "the id 400 .* it has 320"),
        ({"added_tokens": {"<|x|>": "400"}}, "'400', which must be a token id"),
        ({"added_tokens": {"": 400}}, "'' has 400"),
        ({"tokenizer_config": {"added_tokens_decoder": {"320": added("<|x|>", lstrip=1)}}}, "lstrip .* is 1, which"),
        ({"tokenizer_config": {"added_tokens_decoder": {"320": added("")}}}, "a token without content"),
        ({"tokenizer_config": {"additional_special_tokens": [1]}}, "must be a list of tokens"),
        ({"special_tokens_map": {"extra_special_tokens": "x"}}, "must be a list of tokens"),
    ],
)
def test_files_that_contradict_each_other_are_refused(folder, files, told):
    with pytest.raises(RequestError, match=told.replace("|", r"\|")) as refused:
        read_tokenizer(folder("gpt2", **files))
    (sentence,) = refused.value.problems
    assert "; " in sentence


def test_a_run_that_began_without_these_tokens_goes_on_without_them(folder, tmp_path):
    source = folder("gpt2", **folders("gpt2")["ids"])
    path = tmp_path / "texts.jsonl"
    path.write_text(lines(*TEXTS * 4))
    knobs = dict(path=path, tokenizer=source, validation_fraction=0.25, vocab=400, sequence=4)
    now = open_(**knobs)
    # As versions before named it.
    bare = (GOLDEN / "gpt2" / "tokenizer.json").read_text()
    special = read_tokenizer(source).special
    begun = digest(digest(Source.of(path).digest(), 0.25), bare, *special[:2])
    if special.bos is None:
        begun = digest(digest(Source.of(path).digest(), 0.25), bare)
    before = open_(**knobs, begun=begun)
    assert (before.fingerprint, before.tokenizer) == (begun, bare)
    assert now.fingerprint != begun
    assert max(before.train.tokens.ids) < 320 <= max(now.train.tokens.ids)
    assert open_(**knobs, begun="other") == now


def test_an_export_knows_the_tokenizer_that_its_run_began_with(folder):
    source = folder("gpt2", **folders("gpt2")["ids"])
    kept = {path.name: path.read_bytes() for path in source.iterdir()}
    given = read_tokenizer(source)
    assert _same(kept, given)
    assert _same(kept, given.alone())
    assert not _same(kept, GivenTokenizer((GOLDEN / "qwen" / "tokenizer.json").read_text(), given.special))


@pytest.mark.parametrize("name", NEXT)
def test_ids_are_those_of_transformers(folder, name):
    transformers = pytest.importorskip("transformers")
    for kind, files in folders(name).items():
        source = folder(name, **files)
        theirs = transformers.AutoTokenizer.from_pretrained(source)
        ours = read_tokenizer(source).load()
        assert ours.get_vocab() == theirs.get_vocab(), kind
        for text in TEXTS:
            ids = theirs(text, add_special_tokens=False).input_ids
            assert ours.encode(text, add_special_tokens=False).ids == ids, (kind, text)


def test_tokens_are_added_alike_by_the_text_and_by_the_library(folder):
    """What is written into the text of a tokenizer.json is what the package reads from it."""
    given = read_tokenizer(folder("llama", **folders("llama")["names"]))
    assert json.loads(load_tokenizer(given.text).to_str())["added_tokens"] == json.loads(given.text)["added_tokens"]
