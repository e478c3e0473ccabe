"""Ids, prompts of conversations and streamed texts equal those of transformers, for three kinds of tokenizers."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from jaxdist.huggingface.chat_template import read_chat_template
from jaxdist.huggingface.given_tokenizer import read_tokenizer
from jaxdist.training.continuation import INCOMPLETE, Continuation, Ending
from jaxdist.training.generation import Prompter
from tests.data.files import lines, open_

GOLDEN = Path(__file__).parent / "golden_tokenizers"
"""Made by `scripts/golden_tokenizers.py`."""

NAMES = ("gpt2", "llama", "qwen")
BOTH = ("bos", "no_bos")
ENDING = Ending(tokens=1000, sequence=1000)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))


def expected(name: str) -> dict:
    return json.loads((GOLDEN / name / "expected.json").read_text())


def with_bos(name: str, which: str, to: Path) -> Path:
    """A copy of a folder whose post-processor puts a BOS before a text, or none."""
    folder = Path(shutil.copytree(GOLDEN / name, to))
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["post_processor"] = expected(name)["post_processors"][which]
    path.write_text(json.dumps(content))
    return folder


def once(entry: dict, which: str) -> list[int]:
    """The ids of transformers without the second BOS of a text that begins with one."""
    return entry["no_bos"] if entry["no_bos"][:1] == entry[which][:1] else entry[which]


def prompter(folder: Path, **more) -> Prompter:
    given = read_tokenizer(folder)
    return Prompter(given.load(), given.special, ENDING, **more)


@pytest.mark.parametrize("which", BOTH)
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_has_the_ids_of_transformers(tmp_path, name, which):
    ours = prompter(with_bos(name, which, tmp_path / "folder"))
    for entry in expected(name)["texts"]:
        assert ours.of_text(entry["text"]) == once(entry, which), entry["text"]


@pytest.mark.parametrize("which", BOTH)
@pytest.mark.parametrize("name", NAMES)
def test_a_document_has_the_ids_of_transformers_before_its_eos(tmp_path, name, which):
    folder = with_bos(name, which, tmp_path / "folder")
    texts = expected(name)["texts"]
    path = tmp_path / "texts.jsonl"
    path.write_text(lines(*(entry["text"] for entry in texts)))
    found = open_(path=path, tokenizer=folder, validation_fraction=0.5, vocab=400, sequence=4)
    eos = read_tokenizer(folder).special.eos
    for tokens, first in ((found.train.tokens, 0), (found.validation.tokens, 1)):
        after = [] if eos is None else [eos]
        assert tokens.ids.tolist() == [token for entry in texts[first::2] for token in [*once(entry, which), *after]]


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_is_the_prompt_of_transformers(name):
    """Rendered alike, and its BOS stands once, though the post-processor of `llama` would write another one."""
    folder = GOLDEN / name
    template = read_chat_template(folder)
    ours = prompter(folder, template=template)
    for chat in expected(name)["chats"]:
        assert template.render(chat["messages"]) == chat["prompt"]
        assert ours.of_messages(chat["messages"]) == chat["ids"]


@pytest.mark.parametrize("name", NAMES)
def test_a_system_message_stands_before_the_text(name):
    with_system = expected(name)["chats"][1]
    system, user = with_system["messages"]
    ours = prompter(GOLDEN / name, template=read_chat_template(GOLDEN / name), system=system["content"])
    assert ours.of_text(user["content"]) == with_system["ids"]


@pytest.mark.parametrize("length", [0, 1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_the_texts_that_are_shown_are_together_the_text_of_all_tokens(name, length):
    """Behind a prompt of some tokens; and none of them ends within a character."""
    tokenizer = Tokenizer.from_file(str(GOLDEN / name / "tokenizer.json"))
    for entry in expected(name)["texts"]:
        ids = entry["no_bos"]
        text = Continuation(tokenizer, ids[:length], ENDING)
        shown = [text.add(token) for token in ids[length:]]
        if tokenizer.decode(ids[:length]).endswith(INCOMPLETE):
            continue
        assert tokenizer.decode(ids[:length]) + "".join(shown) == entry["decoded"]
        assert not any(INCOMPLETE in one for one in shown)
        assert text.text == "".join(shown)


@pytest.mark.parametrize("name", NAMES)
def test_a_text_that_ends_within_a_character_says_so(name):
    """All characters before it are shown, and a replacement character for it."""
    tokenizer = Tokenizer.from_file(str(GOLDEN / name / "tokenizer.json"))
    entry = expected(name)["texts"][4]
    ids = entry["no_bos"]
    for count in range(1, len(ids)):
        text = Continuation(tokenizer, (), Ending(tokens=count, sequence=1000))
        for token in ids[:count]:
            text.add(token)
        assert entry["decoded"].startswith(text.text.rstrip(INCOMPLETE))
        assert text.text.endswith(INCOMPLETE) == tokenizer.decode(ids[:count]).endswith(INCOMPLETE)


@pytest.mark.parametrize("name", NAMES)
def test_texts_come_token_by_token(name):
    """Of a text in ASCII every token that is no special one shows something."""
    tokenizer = Tokenizer.from_file(str(GOLDEN / name / "tokenizer.json"))
    entry = expected(name)["texts"][2]
    text = Continuation(tokenizer, entry["no_bos"][:2], ENDING)
    assert all(text.add(token) for token in entry["no_bos"][2:])


@pytest.mark.parametrize("name", NAMES)
def test_transformers_makes_the_same_ids_today(name):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(GOLDEN / name)
    for entry in expected(name)["texts"]:
        assert theirs(entry["text"], add_special_tokens=False).input_ids == entry["no_bos"]


LEADING_SPACES = {
    " hello": ["\u2581\u2581", "h", "e", "l", "lo"],
    "  hello": ["\u2581\u2581", "\u2581", "h", "e", "l", "lo"],
    "a<s> a": ["\u2581", "a", "<s>", "\u2581\u2581", "a"],
}
"""Tokens of Llama 2's kind, as sentencepiece makes them: a space of its own stands before the first one of the text."""


def test_a_space_at_the_beginning_is_a_token_as_in_sentencepiece():
    tokenizer = read_tokenizer(GOLDEN / "llama").load()
    for text, tokens in LEADING_SPACES.items():
        assert tokenizer.encode(text, add_special_tokens=False).tokens == tokens


def test_the_llama_tokenizer_of_transformers_5_leaves_that_space_out(tmp_path):
    """docs/how-to/hugging-face.md says so; where a later version has it again, the page must be changed."""
    transformers = pytest.importorskip("transformers", minversion="5")
    folder = Path(shutil.copytree(GOLDEN / "llama", tmp_path / "folder"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "LlamaTokenizer"}))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = read_tokenizer(folder).load()
    for text, tokens in LEADING_SPACES.items():
        assert theirs.tokenize(text) != tokens
        assert ours.encode(text, add_special_tokens=False).tokens == tokens
    assert theirs.tokenize("hello a") == ours.encode("hello a", add_special_tokens=False).tokens
