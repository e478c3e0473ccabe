"""What `generate` asks of the model and what it prints; in most tests a script says which tokens the model draws."""

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxdist import generate
from jaxdist.config import RequestError
from jaxdist.huggingface.chat_template import ChatText
from jaxdist.huggingface.given_tokenizer import read_tokenizer
from jaxdist.request.prompts import given_prompts
from jaxdist.training.decoding import Choice

LLAMA = Path(__file__).parent.parent / "huggingface" / "golden" / "llama31"
"""A tiny model whose tokenizer puts a BOS before a text, and whose template an EOS behind each message."""

BOS, EOS = 0, 1


TOKENIZER = read_tokenizer(LLAMA).load()


class Scripted:
    """Draws what a script says, in place of a `Decoding`: the text of each row, over and over."""

    def __init__(self, texts, screen):
        self.rows = [encoded(text) for text in texts]
        self.screen = screen
        self.asked = []
        """(prompts, choice, seed) of each call."""
        self.seen = []
        """What was on the screen before each token."""

    def draw(self, prompts, choice, seed, moving, most):
        self.asked.append((prompts, choice, seed))
        for number in range(64):
            moving()
            self.seen.append(self.screen())
            rows = [self.rows[place % len(self.rows)] for place in range(len(prompts))]
            yield np.array([row[number % len(row)] for row in rows])


def encoded(text: str) -> list[int]:
    """The tokens of a text, at whose end $ stands for EOS."""
    found = TOKENIZER.encode(text.removesuffix("$"), add_special_tokens=False).ids
    return [*found, EOS] if text.endswith("$") else found


@pytest.fixture
def scripted(monkeypatch, capsys):
    """Let no model run: `scripted(" a script$")(options)` returns (output, errors, calls, the screen meanwhile)."""

    def script(*texts):
        trained = SimpleNamespace(run=None, params=None, step=7)
        decoding = Scripted(texts, lambda: capsys.readouterr().out)
        monkeypatch.setattr("jaxdist.training.decoding.Decoding", lambda *_: decoding)
        monkeypatch.setattr("jaxdist.training.restore.restore", lambda *_, **__: trained)

        def run(*options):
            assert generate.main([str(LLAMA), *options]) == 0
            captured = capsys.readouterr()
            return "".join(decoding.seen) + captured.out, captured.err, decoding.asked, decoding.seen

        return run

    return script


# ---- what is printed


def test_one_text_is_printed_behind_its_prompt_as_it_comes(scripted):
    out, errors, ((prompts, _, _),), seen = scripted(" of one device$")("--prompt=the loss")
    assert (out, errors) == ("the loss of one device\n", "")
    assert prompts == [[BOS, *encoded("the loss")]]
    tokens = encoded(" of one device")
    # Before each token, all of the tokens before it have been printed.
    whole = ["the loss" + TOKENIZER.decode(tokens[:number]) for number in range(len(tokens) + 1)]
    assert ["".join(seen[: number + 1]) for number in range(len(seen))] == whole


def test_several_texts_are_printed_when_they_are_complete(scripted):
    run = scripted(" of one$", " of every mesh$")
    out, _, ((prompts, _, _),), seen = run("--prompt=the loss", "--samples=2")
    assert out == "--- 1\nthe loss of one\n--- 2\nthe loss of every mesh\n"
    assert prompts == [[BOS, *encoded("the loss")]] * 2
    assert not "".join(seen)


def test_prompts_of_a_file_are_continued_in_one_batch(scripted, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "the loss"}\n\n{"prompt": "every\\nmesh of"}\n')
    out, _, ((prompts, _, _),), _ = scripted(" of$", " one$")(f"--prompts={path}", "--samples=2")
    assert prompts == [[BOS, *encoded("the loss")]] * 2 + [[BOS, *encoded("every\nmesh of")]] * 2
    assert out == "--- 1\nthe loss of\n--- 2\nthe loss one\n--- 3\nevery\nmesh of of\n--- 4\nevery\nmesh of one\n"


def test_json_is_one_object_that_says_why_each_text_ended(scripted, tmp_path):
    path = tmp_path / "prompts"
    path.write_text("the loss\r\nthe mesh\n")
    out, _, _, _ = scripted(" of one$", " of every mesh")(f"--prompts={path}", "--json", "--tokens=3")
    every = encoded(" of every mesh")
    assert json.loads(out) == {
        "step": 7,
        "sampling": {"temperature": 0.8, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0},
        "texts": [
            {"prompt": "the loss", "text": " of one", "tokens": encoded(" of one"), "ended": "stop token"},
            {"prompt": "the mesh", "text": " of every mesh", "tokens": every, "ended": "tokens"},
        ],
    }


@pytest.mark.parametrize("stop", [" every", '[" one", " every"]'])
def test_a_text_ends_before_a_stop_text(scripted, stop):
    out, _, _, _ = scripted(" of every mesh$")("--prompt=the loss", f"--stop={stop}")
    assert out == "the loss of\n"


def test_a_text_ends_where_the_model_sees_no_more_and_says_so(scripted):
    options = ["--prompt=the loss", "--model.sequence=9", "--tokens=100"]
    out, errors, _, _ = scripted("e")(*options)
    assert out == "the loss" + "e" * (9 - len([BOS, *encoded("the loss")])) + "\n"
    assert errors == "note: the text ended at model.sequence 9: the model sees no more tokens\n"
    _, errors, _, _ = scripted("e", "$")(*options, "--samples=3")
    assert errors == "note: 2 of 3 texts ended at model.sequence 9: the model sees no more tokens\n"


def test_tokens_are_drawn_as_asked(scripted):
    _, _, ((_, choice, seed),), _ = scripted("$")("--temperature=0.5", "--top-k=3", "--top-p=0.9", "--seed=4")
    assert choice == Choice(0.5, 3, 0.9, entries=46)
    assert seed == 4


# ---- chat


def test_an_answer_is_printed_alone(scripted):
    out, _, ((prompts, _, _),), _ = scripted("of one$")("--prompt=the loss", "--chat", "--system=the mesh")
    assert out == "of one\n"
    assert prompts == [encoded("the mesh$") + encoded("the loss$")]


@pytest.mark.parametrize(("thinking", "said"), [("template", "one"), ("on", "the loss"), ("off", "of")])
def test_a_template_is_told_whether_to_think_first(scripted, monkeypatch, thinking, said):
    text = "{{ 'one' if enable_thinking is undefined else 'the loss' if enable_thinking else 'of' }}"
    found = ChatText(text, LLAMA, {}).compiled()
    monkeypatch.setattr("jaxdist.huggingface.chat_template.read_chat_template", lambda folder: found)
    _, _, ((prompts, _, _),), _ = scripted("of one$")("--prompt=the loss", "--chat", f"--thinking={thinking}")
    assert prompts == [encoded(said)]


def test_a_template_that_is_not_asked_to_think_is_not_told(scripted):
    with pytest.raises(RequestError, match=r"--thinking is off, but the chat template of '.*' has no enable_thinking"):
        scripted("of one$")("--prompt=the loss", "--chat", "--thinking=off")


def test_a_conversation_answers_each_line_in_the_light_of_all_before_it(scripted, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("the loss\n\n  the mesh \n"))
    out, _, asked, _ = scripted("of one$")("--chat", "--seed=5")
    assert out == "of one\nof one\n"
    said = [encoded(text) for text in ("the loss$", "of one$", "the mesh$")]
    assert [prompts for prompts, _, _ in asked] == [[said[0]], [said[0] + said[1] + said[2]]]
    assert [seed for _, _, seed in asked] == [5, 6]


def test_a_conversation_that_leaves_no_room_ends_with_a_sentence(scripted, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("the loss\n" * 9))
    words = r"^the conversation has \d+ tokens, and model.sequence 16 leaves no room to continue it; shorten it$"
    with pytest.raises(RequestError, match=words):
        scripted("of$")("--chat", "--model.sequence=16")


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "sentences"),
    [
        (["--prompt=a", "--prompts=b"], ["--prompt and --prompts both give texts to continue"]),
        (["--system=a"], ["--system is 'a', which has an effect with --chat only; add --chat"]),
        (["--thinking=off"], ["--thinking is off, which has an effect with --chat only; add --chat"]),
        (
            ["--chat", "--samples=2", "--json"],
            ["a conversation goes on from one answer, and --samples is 2", "--json prints one object at the end"],
        ),
        (["--prompt=", "--stop=", "--top-p=0"], ["--prompt is empty", "--stop is empty", "--top-p is 0"]),
        (["--stop=[", "--top-p=1.5"], ["--stop is '[': what begins with [ must be a JSON list", "--top-p is 1.5"]),
        (['--stop=["a", ""]'], ["each text must have at least 1 character"]),
        (["--stop=[]"], ["each text must have at least 1 character"]),
        (["--prompts=missing"], ["--prompts 'missing' cannot be read: no such file"]),
        (["--prompts=/dev/null"], ["not a regular file"]),
        (
            ["--prompt=the loss of one device is", "--model.sequence=7"],
            ["the prompt 'the loss of one device is' has 7 tokens, and model.sequence 7 leaves no room"],
        ),
    ],
)
def test_wrong_requests_are_refused(options, sentences):
    with pytest.raises(RequestError) as error:
        generate.main([str(LLAMA), *options])
    assert len(error.value.problems) == len(sentences)
    for sentence in sentences:
        assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("prompts", b"\n \n", "holds no prompt; write one a line"),
        ("prompts", b"\xff", "is not UTF-8 text; convert it"),
        ("prompts.jsonl", b'{"prompt": "a"}\n{"text": "a"}\n', "line 2 is not a JSON object with the text of a prompt"),
        ("prompts.jsonl", b'{"prompt": ""}\n', "line 1 is not a JSON object with the text of a prompt"),
        ("prompts.jsonl", b"the loss\n", r"line 1 is not JSON \(expecting value"),
    ],
)
def test_a_file_that_holds_no_prompts_is_refused(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RequestError, match=sentence):
        generate.main([str(LLAMA), f"--prompts={tmp_path / name}"])


def test_a_folder_without_a_chat_template_is_refused(tmp_path):
    folder = Path(shutil.copytree(LLAMA, tmp_path / "folder"))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(RequestError, match="has no chat template"):
        generate.main([str(folder), "--chat", "--prompt=a"])


def test_a_conversation_needs_one_process():
    extras = {"prompt": None, "prompts": None, "chat": True, "system": None, "samples": 1, "json": False}
    extras["thinking"] = "template"
    assert given_prompts(extras, alone=True) is None
    with pytest.raises(RequestError, match="a conversation needs one process, and this is one of several"):
        given_prompts(extras, alone=False)


# ---- with the model


@pytest.mark.slow
def test_prompts_of_unequal_length_are_continued_together_as_each_alone(tmp_path, capsys):
    """On a mesh of four devices and on one."""
    prompts = ["the loss of one device is", "mesh", "every mesh is one"]
    path = tmp_path / "prompts"
    path.write_text("\n".join(prompts))
    options = ["--temperature=0", "--tokens=8", "--json", "--model.sequence=32"]
    together = texts([str(LLAMA), f"--prompts={path}", "--mesh=2x2x1", *options], capsys)
    alone = [texts([str(LLAMA), f"--prompt={prompt}", "--mesh=1x1x1", *options], capsys)[0] for prompt in prompts]
    assert together == alone
    assert len({tuple(text["tokens"]) for text in together}) == 3


def texts(argv, capsys) -> list[dict]:
    assert generate.main(argv) == 0
    return json.loads(capsys.readouterr().out)["texts"]
