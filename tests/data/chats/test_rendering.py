"""How conversations are rendered: the ways that are tried, what is learned of them, and what nothing depends on."""

import json

import pytest

from jaxdist.data.chats.forms import Conversation
from jaxdist.data.chats.rendering import Renderer
from tests.data.chats.test_golden_chats import GOLDEN

SPECIAL = ("<|im_start|>", "<|im_end|>", "</s>", "<|eot_id|>")
HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
THOUGHT = [{"role": "user", "content": "Sum?"}, {"role": "assistant", "content": "<think>\nadd\n</think>\n\n4."}]


def rows(template, messages, learn="assistant", tools=None):
    """The text, the texts that are learned, and `enable_thinking`, of each row."""
    text = (GOLDEN / "templates" / f"{template}.jinja").read_text() if "{" not in template else template
    names = (("bos_token", "<s>"), ("eos_token", "</s>"))
    renderer = Renderer(text, "folder", names, SPECIAL, "<s>", "</s>", learn)
    found = renderer.rows(Conversation(tuple(messages), tools))
    return [(row.text, [row.text[start:stop] for start, stop in row.learned], row.thinks) for row in found]


def learned(*arguments, **more):
    return [texts for _, texts, _ in rows(*arguments, **more)]


@pytest.mark.parametrize(
    ("learn", "texts"),
    [
        ("assistant", ["Hello!<|im_end|>", "<think>\nadd\n</think>\n\n4.<|im_end|>"]),
        ("last", ["<think>\nadd\n</think>\n\n4.<|im_end|>"]),
    ],
)
def test_all_answers_are_learned_or_the_last_one(learn, texts):
    assert learned("chatml", [*HELLO, *THOUGHT], learn) == [texts]


def test_every_token_is_learned_where_it_is_asked_for():
    ((text, texts, _),) = rows("qwen3", [*HELLO, *THOUGHT], "all")
    assert texts == [text]
    assert text.count("<|im_start|>") == 4


def test_an_empty_thought_is_in_the_prompt_and_not_learned():
    ((text, texts, thinks),) = rows("qwen3", HELLO)
    assert texts == ["Hello!<|im_end|>"]
    assert thinks is False
    assert "<think>\n\n</think>\n\nHello!" in text


def test_thoughts_are_learned_in_a_row_that_ends_with_them():
    assert learned("qwen3", [*HELLO, *THOUGHT, *HELLO]) == [
        ["<think>\n\n</think>\n\nHello!<|im_end|>"],
        ["<think>\nadd\n</think>\n\n4.<|im_end|>"],
        ["<think>\n\n</think>\n\nHello!<|im_end|>"],
    ]


def test_the_last_answer_ends_a_row():
    assert rows("chatml", [*HELLO, THOUGHT[0]]) == rows("chatml", HELLO)


def test_the_date_is_the_same_on_every_day():
    assert "Today: 26 Jul 2024" in rows("llama", HELLO)[0][0]


ARGUMENTS = {"city": "Rome"}
CALL = "{{ '<|im_start|>' + messages[0].content }}{% for m in messages[1:] %}{{ WANTED }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize("given", [ARGUMENTS, json.dumps(ARGUMENTS)])
@pytest.mark.parametrize(
    "wanted", ["'' + m.tool_calls[0].function.arguments", "m.tool_calls[0].function.arguments.items() | list"]
)
def test_arguments_of_calls_are_written_as_the_template_takes_them(given, wanted):
    """DeepSeek V3 wants JSON in a text, most others an object."""
    call = {"type": "function", "function": {"name": "weather", "arguments": given}}
    messages = [HELLO[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = json.dumps(ARGUMENTS) if wanted.startswith("''") else "[('city', 'Rome')]"
    assert learned(CALL.replace("WANTED", wanted), messages) == [[f"{text}<|im_end|>"]]


def test_a_call_without_arguments_gets_none():
    call = {"type": "function", "function": {"name": "weather"}}
    messages = [HELLO[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(ValueError, match="'dict object' has no attribute 'arguments'"):
        learned(CALL.replace("WANTED", "'' + m.tool_calls[0].function.arguments"), messages)


def test_tools_are_given_to_the_template():
    assert json.dumps({"name": "sum"}) in rows("llama", HELLO, tools=[{"name": "sum"}])[0][0]


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        ("chatml", HELLO[:1], "it has no turn of the assistant"),
        ("deepseek_r1", HELLO, "the template does not continue its prompt, '<think>\\n' becomes 'Hello!</s>'"),
        (
            "mistral_v3",
            [{"role": "system", "content": "Be brief."}, *HELLO],
            "the template does not continue its prompt, 'Be brief.\\n\\nHi[/INST]' becomes 'Hi[/INST]Hello!</s>'",
        ),
        ("glm", HELLO, "the answer ends with 'Hello!', which is no special token, so that no model learns to stop"),
        ("gemma", HELLO[::-1], "Conversation roles must alternate user/assistant"),
    ],
)
def test_what_is_not_learned_has_a_reason(template, messages, reason):
    with pytest.raises(ValueError) as raised:
        rows(template, messages)
    assert str(raised.value) == reason


def test_an_answer_without_an_end_ends_with_the_token_of_the_turn_that_follows_it():
    """A thought is kept in the last turn alone, so that the first answer has a row of its own; a tool follows it."""
    template = (
        "{% for m in messages %}{{ '</s>' if m.role == 'tool' else '<|eot_id|>' }}{{ m.role }}:"
        "{{ m.thinking if loop.last }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|eot_id|>assistant:{% endif %}"
    )
    asked = {"role": "user", "content": "Weather?"}
    called = {"role": "assistant", "content": "call", "thinking": "look, "}
    told = [{"role": "tool", "content": "sunny"}, {"role": "assistant", "content": "Sunny."}]
    assert learned(template, [asked, called, *told]) == [["look, call</s>"], ["Sunny.<|eot_id|>"]]
