"""Where a chat template is read from, what it may call, and what is refused."""

import builtins
import json
import os
from datetime import datetime

import pytest

from jaxdist.config import RequestError
from jaxdist.huggingface.chat_template import read_chat_template

HELLO = [{"role": "user", "content": "<hello> & ü"}]


@pytest.fixture
def folder(tmp_path):
    """Make a folder of Hugging Face with these files: a text, or anything else as JSON."""

    def make(**files):
        path = tmp_path / "folder"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text("{}")
        for name, content in files.items():
            if isinstance(content, str):
                (path / f"{name}.jinja").write_text(content)
            else:
                (path / f"{name}.json").write_text(json.dumps(content))
        return path

    return make


def rendered(folder, template, **names):
    return read_chat_template(folder(tokenizer_config={"chat_template": template, **names})).render(HELLO)


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (dict(tokenizer_config={"chat_template": "config"}), "config"),
        (dict(tokenizer_config={"chat_template": "config"}, chat_template="jinja"), "jinja"),
        (dict(tokenizer_config={}, chat_template={"chat_template": "json"}), "json"),
        (
            dict(
                tokenizer_config={
                    "chat_template": [
                        {"name": "tool_use", "template": "tools"},
                        {"name": "default", "template": "default"},
                    ]
                }
            ),
            "default",
        ),
    ],
)
def test_the_template_is_in_one_of_three_files(folder, files, text):
    assert read_chat_template(folder(**files)).render(HELLO) == text


def test_a_run_has_the_template_of_the_folder_that_it_began_with(folder, tmp_path):
    source = folder(chat_template="{{ messages[0].content }}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    source.rename(tmp_path / "run" / "huggingface")
    assert read_chat_template(tmp_path / "run").render(HELLO) == HELLO[0]["content"]


def test_special_tokens_have_their_names(folder):
    names = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, "add_bos_token": True}
    assert rendered(folder, "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}", **names) == "<s></s>False"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[0].content | tojson }}", '"<hello> & ü"'),
        ("{{ {'b': [1], 'a': none} | tojson(indent=1) }}", '{\n "b": [\n  1\n ],\n "a": null\n}'),
        ("{% for one in [1, 2, 3] %}{% if one == 2 %}{% break %}{% endif %}{{ one }}{% endfor %}", "1"),
        ("  {% if true %}\nyes\n  {% endif %}\n", "yes\n"),
        ("{% generation %}{% set x = 1 %}said{% endgeneration %}{{ x is defined }}", "saidFalse"),
        ("{{ tools is none and documents is none and add_generation_prompt }}", "True"),
    ],
)
def test_templates_mean_what_they_mean_to_transformers(folder, template, text):
    assert rendered(folder, template) == text


def test_a_template_knows_the_date(folder):
    before = datetime.now()
    found = datetime.fromisoformat(rendered(folder, "{{ strftime_now('%Y-%m-%dT%H:%M:%S') }}"))
    assert before.replace(microsecond=0) <= found <= datetime.now()


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate; write it another way"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe; write"),
        ("{{ ''.__class__.__mro__ }}", "is unsafe"),
        ("{{ messages[0].content }}{{ '\\ud800' }}", "it writes half a character"),
    ],
)
def test_what_a_template_refuses_or_must_not_do_is_one_sentence(folder, template, words):
    with pytest.raises(RequestError, match=r"^the chat template of '.*' does not take this conversation: ") as raised:
        rendered(folder, template)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_is_no_template_is_refused_when_it_is_read(folder):
    path = folder(chat_template="{% if %}")
    with pytest.raises(RequestError, match=r"is not a Jinja template \(.*\); copy it again"):
        read_chat_template(path)


@pytest.mark.parametrize(
    "files", [{}, {"tokenizer_config": {"chat_template": None}}, {"tokenizer_config": {"chat_template": []}}]
)
def test_a_folder_without_a_template_is_refused(folder, files):
    path = folder(**files)
    with pytest.raises(RequestError, match=r"has no chat template: .*leave --chat out, or copy the template there"):
        read_chat_template(path)


def test_a_template_that_is_no_file_is_refused_at_once(folder):
    path = folder()
    os.mkfifo(path / "chat_template.jinja")
    with pytest.raises(RequestError, match=r"cannot be read: not a regular file; put the right file there"):
        read_chat_template(path)


def test_without_jinja_the_package_is_named(folder, monkeypatch):
    importing = builtins.__import__

    def without(name, *more):
        if name.partition(".")[0] == "jinja2":
            raise ImportError(name)
        return importing(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    path = folder(chat_template="x")
    with pytest.raises(RequestError, match=r"chat templates need jinja2, .* pip install 'jaxdist\[chat\]'"):
        read_chat_template(path)
