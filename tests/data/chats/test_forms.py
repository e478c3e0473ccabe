"""The forms of rows that hold conversations: how they are known, what they become, and what is wrong with a row."""

import pytest

from jaxdist.data.chats.forms import FORMS, conversation_of, known_form

HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "function": {"name": "sum", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "sum"}}]


def read(row: dict):
    form = known_form(row)
    assert form is not None
    found = conversation_of(row, form)
    return form.name, list(found.messages), found.tools, found.continued


@pytest.mark.parametrize(
    ("row", "form", "messages"),
    [
        ({"messages": HELLO}, "messages", HELLO),
        ({"messages": [SYSTEM, *HELLO], "id": 3}, "messages", [SYSTEM, *HELLO]),
        ({"messages": [{**HELLO[0], "name": None}, HELLO[1]]}, "messages", HELLO),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]},
            "messages",
            HELLO[:1],
        ),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]},
            "messages",
            [{"role": "assistant", "content": "", "tool_calls": [CALL]}],
        ),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]},
            "sharegpt",
            HELLO,
        ),
        (
            {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "user", "value": "Hi"}]},
            "sharegpt",
            [SYSTEM, HELLO[0]],
        ),
        ({"conversations": [{"from": "human", "value": "Hi"}], "system": "Be brief."}, "sharegpt", [SYSTEM, HELLO[0]]),
        (
            {
                "conversations": [
                    {"from": "function_call", "value": '{"name": "sum", "arguments": {"a": 1}}'},
                    {"from": "observation", "value": "1"},
                ]
            },
            "sharegpt",
            [{"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "1"}],
        ),
        ({"prompt": HELLO[:1], "completion": HELLO[1:]}, "prompt", HELLO),
        ({"instruction": "Hi", "output": "Hello!"}, "alpaca", HELLO),
        ({"instruction": "Hi", "input": "", "output": "Hello!", "system": "Be brief."}, "alpaca", [SYSTEM, *HELLO]),
        (
            {"instruction": "Sum.", "input": "1 2", "output": "3"},
            "alpaca",
            [{"role": "user", "content": "Sum.\n\n1 2"}, {"role": "assistant", "content": "3"}],
        ),
    ],
)
def test_rows_of_each_form_become_messages(row, form, messages):
    assert read(row) == (form, messages, None, None)


def test_a_prompt_of_texts_is_continued_without_turns():
    assert read({"prompt": "1 2 ", "completion": "3"}) == ("prompt", [], None, ("1 2 ", "3"))


@pytest.mark.parametrize("tools", [TOOLS, '[{"type": "function", "function": {"name": "sum"}}]'])
def test_tools_come_as_a_list_or_as_json_in_a_text(tools):
    assert read({"messages": HELLO, "tools": tools}) == ("messages", HELLO, TOOLS, None)
    assert read({"messages": HELLO, "tools": None}) == ("messages", HELLO, None, None)


@pytest.mark.parametrize("keys", [["text"], ["chosen"], ["prompt"], ["instruction"], []])
def test_other_rows_are_of_no_form(keys):
    assert known_form(keys) is None


@pytest.mark.parametrize(
    ("form", "row", "reason"),
    [
        ("messages", {"text": "x"}, 'no "messages"'),
        ("messages", {"messages": []}, 'no list of turns as its "messages"'),
        ("messages", {"messages": "Hi"}, 'no list of turns as its "messages"'),
        (
            "messages",
            {"messages": [{"role": "bot", "content": "x"}]},
            "a turn in its \"messages\" whose role is 'bot', none of",
        ),
        ("messages", {"messages": [{"role": "user", "content": "\ud800"}]}, "half of a surrogate pair"),
        ("messages", {"messages": [{"role": "assistant", "tool_calls": [3]}]}, "whose tool_calls are no list"),
        ("messages", {"messages": [{"content": "x"}]}, 'a turn in its "messages" whose role is None'),
        ("messages", {"messages": [{"role": "user"}]}, "whose content is no text"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "with a part 'image'"),
        ("messages", {"messages": HELLO, "tools": "{"}, 'a text as its "tools" that is not JSON'),
        ("sharegpt", {"conversations": [{"from": "human"}]}, "whose content is no text"),
        ("sharegpt", {"conversations": [{"from": "function_call", "value": "x"}]}, "that is not JSON"),
        ("prompt", {"prompt": "x", "completion": HELLO}, 'a text and a list as its "prompt" and "completion"'),
        ("prompt", {"prompt": "x", "completion": "\udfff"}, "half of a surrogate pair"),
        ("alpaca", {"instruction": 1, "output": "x"}, 'no text as its "instruction"'),
        ("alpaca", {"instruction": "x", "output": None}, 'no "output"'),
    ],
)
def test_what_is_wrong_with_a_row_is_said(form, row, reason):
    with pytest.raises(ValueError) as raised:
        conversation_of(row, FORMS[form])
    assert reason in str(raised.value)
