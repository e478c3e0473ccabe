"""One function makes every tokenizer, from tokenizer.json and what the files beside it say."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxdist.config import RequestError
from jaxdist.huggingface.given_tokenizer import GivenTokenizer, encode, encode_all
from jaxdist.huggingface.special_tokens import SpecialTokens
from jaxdist.training import samples
from jaxdist.training.run_dir import RunFolder
from tests.data.files import save_tokenizer

PACKAGE = Path(samples.__file__).parent.parent
HOME = PACKAGE / "huggingface" / "given_tokenizer.py"
MAKERS = {"from_file", "from_str", "from_buffer", "from_pretrained"}

WORDS = "w0 w1 w2 w3 w4 w5 w6 w7"
"""More tokens than `save_tokenizer` truncates to."""


@pytest.fixture
def cutting(tmp_path):
    """The text of a tokenizer.json that truncates to 5 tokens and pads to 12."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(save_tokenizer(tmp_path / "words.json", 20)))
    tokenizer.enable_padding(length=12, pad_id=19, pad_token="?")
    return tokenizer.to_str()


def test_no_other_place_makes_a_tokenizer():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in MAKERS and "Tokenizer" in ast.unparse(node.value):
                found.append((path, node.attr))
    assert found == [(HOME, "from_str")]


@pytest.fixture
def sampling(monkeypatch, cutting):
    """Make the samples of a run with these prompts."""

    def make(prompts: str, special: SpecialTokens):
        config = SimpleNamespace(sample=SimpleNamespace(every=5, prompts=prompts), model=SimpleNamespace(sequence=100))
        task = SimpleNamespace(tokenizer=cutting, special_tokens=special, asks=None)
        memory = SimpleNamespace(arguments=0)
        return samples.Samples(SimpleNamespace(config=config, task=task, predicted_memory=memory))

    monkeypatch.setattr(samples, "room_for", lambda *arguments: None)
    monkeypatch.setattr(samples, "check_fits", lambda *arguments: None)
    return make


def test_every_reader_switches_truncation_and_padding_off(tmp_path, sampling, cutting):
    """A sample prompt, a run's tokenizer, and one that is given."""
    of_run = sampling(WORDS, SpecialTokens())
    assert of_run.ids == [list(range(8))]

    (tmp_path / "tokenizer.json").write_text(cutting)
    for tokenizer in (of_run.tokenizer, RunFolder(tmp_path).load_tokenizer(), GivenTokenizer(cutting, None).load()):
        assert tokenizer.encode(WORDS).ids == list(range(8))
        assert [encoding.ids for encoding in tokenizer.encode_batch_fast([WORDS, "w1"])] == [list(range(8)), [1]]


def test_a_sample_prompt_has_its_own_bos_once(sampling):
    of_run = sampling("w3 w1\nw2", SpecialTokens(bos=3))
    assert of_run.ids == [[3, 1], [3, 2]]
    assert of_run.note == "1 prompt has its own w3, which is not put there again"
    assert sampling("w1", SpecialTokens(bos=3)).note is None


def test_a_run_knows_the_data_that_it_began_with(tmp_path):
    run = RunFolder(tmp_path)
    assert run.newest_facts() == {}
    for step, facts in ((2, '{"data": "abc"}'), (4, "torn")):
        folder = tmp_path / "checkpoints" / str(step) / "facts"
        folder.mkdir(parents=True)
        (folder / "metadata").write_text(facts)
    assert run.newest_facts()["data"] == "abc"


def test_text_without_a_token_is_refused():
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="?"))
    for call in (lambda: encode(tokenizer, "b"), lambda: encode_all(tokenizer, ["a", "b"])):
        with pytest.raises(RequestError, match=r"has no token for a part of the text \(WordLevel error"):
            call()
    with pytest.raises(TypeError):
        encode(tokenizer, 1)


def test_every_text_is_encoded_where_it_can_be_refused():
    def encodes(node):
        return isinstance(node, ast.Call) and any(keyword.arg == "add_special_tokens" for keyword in node.keywords)

    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    assert {path for path, tree in trees.items() if any(encodes(node) for node in ast.walk(tree))} == {HOME}
