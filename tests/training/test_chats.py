"""Runs on conversations: from a folder of Hugging Face to a chat with adapters, killed, resumed and evaluated."""

import json
import shlex
import shutil

import jax
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from jaxdist import checkpoints, evaluate, generate, train
from jaxdist.config import RequestError
from tests.data.chats.made import json_lines, tokenizer_folder
from tests.huggingface.test_runs import GOLDEN
from tests.training.conftest import over
from tests.training.curves import without_times
from tests.training.test_resume import saved

SUMS = [
    {"messages": [{"role": "user", "content": f"{a}{b}"}, {"role": "assistant", "content": "the loss"}]}
    for a in range(10)
    for b in range(10)
]
"""Conversations with an answer that is soon learned."""


@pytest.fixture
def chats(tmp_path, monkeypatch):
    """Options of a small run on conversations."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))
    (tmp_path / "chats.jsonl").write_text(json_lines(SUMS))
    tokenizer_folder(tmp_path / "tokenizer")
    return [
        "--data.path=chats.jsonl", "--data.tokenizer=tokenizer", "--data.pack=best-fit", "--model.documents=apart",
        "--model.layers=2", "--model.embed=32", "--model.heads=2", "--model.vocab=330", "--model.sequence=64",
        "--train.global-batch-size=8", "--log.every=1",
        "--optimizer.warmup=0", "--log.tensorboard=false", "--precision=float32",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_run_on_conversations_goes_on_to_the_bit(chats, tmp_path, capsys):
    chats += ["--checkpoint.every=2", "--validation.every=2", "--mesh=2x1x1"]
    assert train.main([*chats, "--run-dir=straight", "--train.steps=4"]) == 0
    shutil.copytree("straight", "continued")
    shutil.rmtree("continued/checkpoints/4")
    capsys.readouterr()
    assert train.main([*chats, "--run-dir=continued", "--train.steps=4"]) == 0
    assert "from the checkpoint of step 2" in capsys.readouterr().err
    folders = (tmp_path / "continued", tmp_path / "straight")
    jax.tree.map(np.testing.assert_array_equal, *(saved(folder, 4) for folder in folders))
    assert without_times(folders[0]) == without_times(folders[1])

    # What is learned is part of the data: nothing goes on with other labels.
    with pytest.raises(RequestError, match=r"data.learn \(assistant there, all here\)"):
        train.main([*chats, "--run-dir=continued", "--train.steps=4", "--data.learn=all"])


@pytest.mark.exhaustive
def test_a_run_on_conversations_answers_and_is_exported_with_its_template(chats, tmp_path, capsys):
    options = over(chats, "--data.tokenizer=tokenizer/tokenizer.json", "--optimizer.learning-rate=0.05")
    options += ["--run-dir=run", "--train.steps=80", "--validation.every=0", "--checkpoint.every=0"]
    assert train.main(options) == 0
    speakers = {"user": "human", "assistant": "gpt"}
    turns = [[{"from": speakers[turn["role"]], "value": turn["content"]} for turn in row["messages"]] for row in SUMS]
    (tmp_path / "other.jsonl").write_text(json_lines([{"conversations": row} for row in turns[:60]]))
    assert evaluate.main(["run", "--data.path=other.jsonl"]) == 0
    assert "validation loss 0.0" in capsys.readouterr().out

    # The run has all that it needs, also of a tokenizer that was named by its file.
    shutil.rmtree("tokenizer")
    capsys.readouterr()
    assert generate.main(["run", "--chat", "--prompt=42", "--temperature=0", "--tokens=12"]) == 0
    assert capsys.readouterr().out == "the loss\n"
    assert checkpoints.main(["run", "--export=out/"]) == 0
    tokenizer = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert tokenizer["chat_template"].startswith("{%- for message")
    capsys.readouterr()
    assert generate.main(["out", "--chat", "--prompt=42", "--temperature=0", "--tokens=12"]) == 0
    assert capsys.readouterr().out == "the loss\n"


TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|' + message.role + '|>' + message.content + ('<|end|>' if message.role == 'assistant' else '') }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' }}
{%- endif %}
"""
"""It ends an answer with a token that no file of the folder names as an end."""


def commands_of(said: str) -> list[list[str]]:
    """The commands that the last lines of a run give, as a shell reads them."""
    lines = [line[12:] for line in said.splitlines() if line.startswith(("next  ", "export  ", "judge  "))]
    words = [shlex.split(command) for line in lines for command in line.split("; ")]
    assert all(command[:2] == ["python", "-m"] for command in words)
    return [command[2:] for command in words]


@pytest.mark.slow
def test_from_a_folder_of_hugging_face_to_a_chat_with_adapters_and_out_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))
    shutil.copytree(GOLDEN / "llama31", "model")
    tokenizer = Tokenizer.from_file("model/tokenizer.json")
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in ("user", "assistant", "end")])
    tokenizer.save("model/tokenizer.json")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    answers = {"of the mesh": "every device", "of the device": "one loss"}
    rows = [{"instruction": prompt, "output": answer} for prompt, answer in answers.items()]
    (tmp_path / "chats.jsonl").write_text(json_lines(rows * 20))

    options = ["--train.steps=120", "--train.global-batch-size=8", "--optimizer.learning-rate=0.03"]
    options += ["--optimizer.warmup=0", "--validation.every=0", "--checkpoint.every=0", "--log.tensorboard=false"]
    asked = ["--init-from=model", "--data.path=chats.jsonl", "--model.lora-rank=8", "--mesh=2x2x1"]
    assert train.main([*asked, "--run-dir=a run", *options]) == 0
    commands = commands_of(capsys.readouterr().err)

    def answers_of(folder: str) -> list[str]:
        """What a model says; it stops by itself before 40 tokens, or they would be shown."""
        said = []
        for prompt in answers:
            capsys.readouterr()
            assert generate.main([folder, "--chat", f"--prompt={prompt}", "--temperature=0", "--tokens=40"]) == 0
            said.append(capsys.readouterr().out.rstrip("\n"))
        return said

    assert answers_of("a run") == [*answers.values()]
    # The commands that it gives are run as they stand, but for the texts that a user has to put in.
    assert [command[0] for command in commands] == [
        "jaxdist.generate", "jaxdist.evaluate", "jaxdist.checkpoints", "jaxdist.checkpoints", "jaxdist.evaluate"
    ]  # fmt: skip
    choices = [{"context": prompt, "choices": [*answers.values()], "label": 0} for prompt in answers]
    (tmp_path / "QUESTIONS.jsonl").write_text(json_lines(choices))
    mains = {"jaxdist.checkpoints": checkpoints.main, "jaxdist.evaluate": evaluate.main}
    for name, *arguments in commands:
        if name in mains:
            assert mains[name](arguments) == 0
    assert commands[0][1:] == ["a run", "--chat", "--prompt", "TEXT"]

    shutil.rmtree("a run")
    assert answers_of("a run-merged") == [*answers.values()]
    end = tokenizer.token_to_id("<|end|>")
    for folder in (tmp_path / "a run-merged", tmp_path / "a run-adapters"):
        assert (folder / "chat_template.jinja").read_text() == TEMPLATE
        assert Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<|end|>") == end
        assert json.loads((folder / "tokenizer_config.json").read_text())["bos_token"] == "<|begin_of_text|>"
    named = json.loads((tmp_path / "a run-merged" / "generation_config.json").read_text())["eos_token_id"]
    assert end in named
    assert json.loads((tmp_path / "a run-merged" / "config.json").read_text())["vocab_size"] > end


@pytest.mark.slow
def test_samples_while_a_run_trains_are_asked_as_its_conversations_are(chats, tmp_path, capsys):
    options = ["--train.steps=2", "--sample.every=2", "--sample.prompts=42", "--run-dir=run"]
    assert train.main([*chats, *options, "--validation.every=0", "--checkpoint.every=0"]) == 0
    assert "python -m jaxdist.generate run --chat --prompt TEXT" in capsys.readouterr().err
    (sample,) = [line for line in (tmp_path / "run" / "log.txt").read_text().splitlines() if "sample  " in line]
    assert r"user\n42\nassistant\n" in sample
