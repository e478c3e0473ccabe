"""Conversations of files of any form as rows: which tokens have labels, what is left out, and what is refused."""

import gzip
import json

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from jaxdist.config import DataConfig, RequestError
from jaxdist.data import corpus
from jaxdist.data.__main__ import main as look
from jaxdist.data.chats.forms import FORMS, conversation_of
from jaxdist.data.chats.learned_tokens import tokens_of
from jaxdist.data.chats.opening import renderer_of
from jaxdist.data.tokenizing import encoder, pieces
from jaxdist.huggingface.chat_template import find_chat_template
from jaxdist.huggingface.given_tokenizer import read_tokenizer
from tests.data.chats.made import conversations, json_lines, tokenizer_folder

S = 64
VOCAB = 400
ROWS = conversations(30)


@pytest.fixture
def open_(tmp_path):
    """Open a file with the tokenizer of one of the golden templates."""

    def call(path, template="chatml", apart=False, sequence=S, **knobs):
        folder = tmp_path / f"tokenizer-{template}"
        if not folder.exists():
            tokenizer_folder(folder, template)
        config = DataConfig(path=str(path), tokenizer=folder, **knobs)
        return corpus.open_corpus(config, VOCAB, sequence, apart)

    return call


def expected(tmp_path, rows, template="chatml", learn="assistant") -> list:
    """The rows to learn from, each as its tokens and which are learned."""
    folder = tmp_path / f"tokenizer-{template}"
    given = read_tokenizer(folder)
    renderer = renderer_of(find_chat_template(folder), given, DataConfig(tokenizer=folder, learn=learn))
    rendered = [one for row in rows for one in renderer.rows(conversation_of(row, FORMS["messages"]))]
    return tokens_of(given.load(), rendered)


def arrays(row, sequence=S):
    """Tokens and labels of a conversation in a row of its own."""
    ids = np.zeros(sequence, np.int32)
    labels = np.full(sequence, -1, np.int32)
    inputs = min(row.ids.size - 1, sequence)
    ids[:inputs] = row.ids[:inputs]
    labels[:inputs] = np.where(row.learned[1:], row.ids[1:], -1)[:inputs]
    return ids, labels


def split(found: corpus.Corpus):
    """All rows of both parts."""
    return [part.read(np.arange(part.count)) for part in (found.train, found.validation)]


def is_held_out(number: int) -> bool:
    return int((number + 1) * 0.05) > int(number * 0.05)


@pytest.mark.parametrize(("template", "learn"), [("chatml", "assistant"), ("qwen3", "assistant"), ("chatml", "all")])
def test_each_conversation_is_a_row_whose_labels_are_what_is_learned(open_, write, tmp_path, template, learn):
    path = write("chats.jsonl", json_lines(ROWS))
    found = open_(path, template, sequence=256, learn=learn)
    for part, held_out in zip(split(found), (False, True), strict=True):
        wanted = [row for number, row in enumerate(ROWS) if is_held_out(number) == held_out]
        rows = [arrays(row, 256) for row in expected(tmp_path, wanted, template, learn)]
        np.testing.assert_array_equal(part["tokens"], [ids for ids, _ in rows])
        np.testing.assert_array_equal(part["labels"], [labels for _, labels in rows])
    assert (template == "qwen3") == ("cut into one row an answer" in found.source)


def test_what_is_longer_than_a_row_is_dropped_or_cut_and_counted(open_, write, tmp_path):
    path = write("chats.jsonl", json_lines(ROWS))
    dropped = open_(path)
    rows = [row for number, row in enumerate(expected(tmp_path, ROWS)) if not is_held_out(number)]
    short = [row for row in rows if row.ids.size <= S + 1]
    assert 0 < len(short) < len(rows)
    np.testing.assert_array_equal(split(dropped)[0]["tokens"], [arrays(row)[0] for row in short])
    assert f"{len(rows) - len(short)} conversations longer than {S} tokens left out" in dropped.source

    cut = open_(path, long="cut")
    kept = [row for row in rows if row.learned[1 : S + 1].any()]
    np.testing.assert_array_equal(split(cut)[0]["labels"], [arrays(row)[1] for row in kept])
    assert f"{len(kept) - len(short)} conversations cut at {S} tokens" in cut.source
    assert cut.fingerprint != dropped.fingerprint


def test_packed_conversations_are_whole_and_apart(open_, write):
    path = write("chats.jsonl", json_lines(ROWS))
    alone, packed = (open_(path, apart=True, pack=pack) for pack in ("cut", "best-fit"))
    assert packed.train.count < alone.train.count

    def documents(found):
        rows = found.train.read(np.arange(found.train.count))
        labelled = set()
        for ids, labels, starts in zip(*rows.values(), strict=True):
            for start in np.unique(starts):
                inside = starts == start
                # Padding is a document without labels.
                if (labels[inside] >= 0).any():
                    labelled.add((tuple(ids[inside]), tuple(labels[inside])))
        return labelled

    assert documents(packed) == documents(alone)
    assert (split(packed)[0]["labels"] >= 0).sum() == (split(alone)[0]["labels"] >= 0).sum()


def test_packed_conversations_that_would_see_each_other_are_refused(write, tmp_path, monkeypatch):
    """Before anything is tokenized, also in a mixture."""
    monkeypatch.setattr(corpus.Request, "open", lambda request: pytest.fail("it was read"))
    monkeypatch.setattr(corpus, "open_streams", lambda *arguments: pytest.fail("it was read"))
    path = write("chats.jsonl", json_lines(ROWS))
    text = write("text.jsonl", json_lines([{"text": "the loss"}] * 30))
    folder = tokenizer_folder(tmp_path / "tokenizer")
    for asked in ({"path": str(path)}, {"mixture": {str(path): 0.5, str(text): 0.5}}):
        with pytest.raises(RequestError, match=r"is joined, so that conversations in a row would see each other"):
            corpus.open_corpus(DataConfig(**asked, tokenizer=folder, pack="best-fit"), VOCAB, S)


def parquet(rows, path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def arrow(rows, path):
    table = pyarrow.Table.from_pylist(rows)
    with path.open("wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def data_set(rows, path):
    """A folder as `datasets` saves it."""
    path.mkdir()
    arrow(rows, path / "data-00000-of-00001.arrow")
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (path / "dataset_info.json").write_text("{}")


def compressed(rows, path):
    path.write_bytes(gzip.compress(json_lines(rows).encode()))


FILES = {"c.parquet": parquet, "c.arrow": arrow, "c": data_set, "c.jsonl.gz": compressed}


@pytest.mark.parametrize("name", FILES)
def test_files_of_all_forms_with_rows_have_conversations(open_, write, tmp_path, name):
    rows = [*ROWS, {"messages": [{"role": "user", "content": "2", "name": "me"}, *ROWS[0]["messages"][1:]]}]
    FILES[name](rows, tmp_path / name)
    found, plain = (open_(path) for path in (tmp_path / name, write("c.jsonl", json_lines(rows))))
    for one, other in zip(split(found), split(plain), strict=True):
        np.testing.assert_array_equal(one["tokens"], other["tokens"])
        np.testing.assert_array_equal(one["labels"], other["labels"])


@pytest.mark.parametrize("form", ["lines", "list"])
def test_a_json_file_of_lines_or_one_list_has_conversations(open_, write, form):
    """As Alpaca is published."""
    rows = [{"instruction": "Add 2.", "input": str(i), "output": str(i + 2)} for i in range(40)]
    found = open_(write("c.json", json_lines(rows) if form == "lines" else json.dumps(rows, indent=2)))
    wanted = open_(write("c.jsonl", json_lines(rows)))
    np.testing.assert_array_equal(found.train.tokens.ids, wanted.train.tokens.ids)
    assert "40 conversations" in found.source


def test_any_number_of_pieces_and_workers_gives_the_same_tokens(open_, write, monkeypatch):
    path = write("chats.jsonl", json_lines(ROWS))
    whole = open_(path, template="qwen3")
    monkeypatch.setenv("JAXDIST_CACHE", str(path.parent / "other"))
    monkeypatch.setattr(pieces, "PIECE", 1000)
    monkeypatch.setattr(encoder, "ENCODE_CHARACTERS", 100)
    divided = open_(path, template="qwen3")
    assert len(divided.train.tokens.shards) > 2
    for one, other in zip(split(whole), split(divided), strict=True):
        np.testing.assert_array_equal(one["tokens"], other["tokens"])
        np.testing.assert_array_equal(one["labels"], other["labels"])
    assert whole.fingerprint == divided.fingerprint
    assert whole.source == divided.source
    assert whole.validation.unigram_entropy() == divided.validation.unigram_entropy()


@pytest.mark.parametrize(
    "change", [dict(learn="last"), dict(learn="all"), dict(template="qwen3"), dict(form="messages", learn="last")]
)
def test_what_decides_what_is_learned_is_in_the_fingerprint(open_, write, change):
    path = write("chats.jsonl", json_lines(ROWS))
    assert open_(path, sequence=256).fingerprint != open_(path, sequence=256, **change).fingerprint


def test_a_form_that_is_said_is_the_form_that_is_known(open_, write):
    path = write("chats.jsonl", json_lines(ROWS))
    assert open_(path).fingerprint == open_(path, form="messages").fingerprint


def test_rows_with_a_text_are_text_unless_it_is_said(open_, write):
    path = write("chats.jsonl", json_lines([{**row, "text": "the loss " * 40} for row in ROWS]))
    assert "learned" not in open_(path).source
    assert "learned" in open_(path, form="messages").source


def test_the_unigram_entropy_is_of_what_is_learned(open_, write):
    rows = [{"messages": [*row["messages"][:1], {"role": "assistant", "content": ""}]} for row in ROWS]
    assert open_(write("chats.jsonl", json_lines(rows))).validation.unigram_entropy() == 0


BAD = {"messages": [{"role": "user", "content": "no answer"}]}


@pytest.mark.parametrize(("template", "says"), [("chatml", False), ("alpaca", True)])
def test_calls_of_tools_that_a_template_leaves_out_are_told(open_, write, template, says):
    call = {"type": "function", "function": {"name": "weather", "arguments": {}}}
    asked = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    found = open_(write("chats.jsonl", json_lines([*ROWS, {"messages": asked}])), template, sequence=256)
    assert ("1 whose calls of tools the template leaves out" in found.source) == says


def test_rows_that_cannot_be_learned_are_refused_or_skipped_and_counted(open_, write):
    path = write("chats.jsonl", json_lines([*ROWS, BAD]))
    with pytest.raises(RequestError, match=r"line 31 of .* has a conversation .*: it has no turn of the assistant; "):
        open_(path)
    found = open_(path, on_error="skip")
    assert found.train.count == open_(write("other.jsonl", json_lines(ROWS))).train.count
    assert "1 row skipped, the first: line 31 of" in found.source
    several = open_(write("several.jsonl", json_lines([BAD, *ROWS, BAD, BAD, BAD])), on_error="skip").source
    assert "4 rows skipped, the first: line 1 of" in several
    assert several.count("it has no turn of the assistant") == 3


@pytest.mark.parametrize(
    ("template", "rows", "sentence"),
    [
        ("deepseek_r1", ROWS, "the template does not continue its prompt, '<think>"),
        ("glm", ROWS, "which is no special token, so that no model learns to stop"),
        ("gemma", [{"messages": [{"role": "system", "content": "x"}, *ROWS[0]["messages"]]}], "roles must alternate"),
        ("", ROWS, "has no chat template to write them with"),
        ("chatml", [{"messages": ROWS[0]["messages"], "x": 1}, {"text": "x"}], 'line 2 of .* has no "messages"'),
    ],
)
def test_what_cannot_be_learned_is_one_sentence(open_, write, template, rows, sentence):
    with pytest.raises(RequestError, match=sentence) as raised:
        open_(write("chats.jsonl", json_lines(rows)), template)
    assert len(raised.value.problems) == 1


def test_conversations_without_a_tokenizer_are_refused(write):
    path = write("chats.jsonl", json_lines(ROWS))
    with pytest.raises(RequestError, match="which are learned as a chat template writes them; give the folder of a"):
        corpus.open_corpus(DataConfig(path=str(path)), VOCAB, S)


def test_data_of_which_nothing_is_learned_are_refused(open_, write):
    with pytest.raises(RequestError, match=r"no answer to learn in rows of 4 tokens: 29 are longer; raise model.seq"):
        open_(write("chats.jsonl", json_lines(ROWS)), sequence=4)


def test_conversations_and_texts_do_not_validate_each_other(open_, write):
    paths = [write("chats.jsonl", json_lines(ROWS)), write("texts.jsonl", json_lines([{"text": "x"}] * 99))]
    for path, other in (paths, paths[::-1]):
        with pytest.raises(RequestError, match=r"holds conversations and '.*texts.jsonl' text, and one is to validate"):
            open_(path, validation_path=str(other))


@pytest.mark.parametrize("knob", [dict(learn="all"), dict(long="cut")])
def test_knobs_of_conversations_are_refused_without_any(open_, write, knob):
    with pytest.raises(RequestError, match="but the rows of none of the data are conversations; leave it out"):
        open_(write("text.jsonl", json_lines([{"text": "x"}])), **knob)


def test_a_file_without_a_row_is_refused(open_, tmp_path):
    path = tmp_path / "none.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS).slice(0, 0), path)
    with pytest.raises(RequestError, match="no conversation of which a token is learned"):
        open_(path)
    with pytest.raises(RequestError, match="no conversation of which a token is learned"):
        look([str(path), "--data.tokenizer", str(tmp_path / "tokenizer-chatml"), "--model.sequence", str(S)])


def test_values_that_python_cannot_hold_are_refused(open_, tmp_path):
    times = pyarrow.array([[2**60]], pyarrow.list_(pyarrow.timestamp("ns")))
    path = tmp_path / "times.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"messages": [ROWS[0]["messages"]], "tools": times}), path)
    with pytest.raises(RequestError, match=r"times.parquet' has a value that no row of Python can hold"):
        open_(path)


def test_a_text_beside_conversations_is_refused(open_, write, tmp_path):
    (tmp_path / "mixed").mkdir()
    write("mixed/chats.jsonl", json_lines(ROWS))
    write("mixed/notes.txt", "x" * 100)
    with pytest.raises(RequestError, match=r"conversations \(messages\), but '.*notes.txt' is plain text, whose rows"):
        open_(tmp_path / "mixed")


def test_the_first_file_with_rows_says_what_all_hold(open_, write, tmp_path):
    (tmp_path / "mixed").mkdir()
    write("mixed/a.jsonl", '{"text": "x"}\n' * 9)
    write("mixed/b.jsonl", json_lines(ROWS))
    with pytest.raises(RequestError, match=r"b.jsonl' has the keys \['messages'\], as data.form messages has, but is"):
        open_(tmp_path / "mixed")


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"prompt": "x", "completion": "y"}, "prompt"),
        ({"instruction": "x", "output": "y", "messages": None}, "alpaca"),
        ({"prompt": "x", "chosen": "y"}, "preference"),
        ({"text": "x"}, "text"),
    ],
)
def test_the_form_of_a_row_that_is_of_another_one_is_named(open_, write, row, form):
    words = rf'line 31 of .* has no "messages" \(data.form messages\), but the keys of data.form {form}; write all rows'
    with pytest.raises(RequestError, match=words):
        open_(write("chats.jsonl", json_lines([*ROWS, row])))


def test_a_row_of_no_form_is_to_be_corrected(open_, write):
    with pytest.raises(RequestError, match=r"data.form messages\); correct the row"):
        open_(write("chats.jsonl", json_lines([*ROWS, {"turns": []}])))


LONG = {"messages": [{"role": "user", "content": "x" * (2 << 20)}, ROWS[0]["messages"][1]]}


@pytest.mark.parametrize("before", ["\n\n", json_lines([LONG])], ids=["blank", "long"])
def test_the_first_row_says_the_form_behind_blank_lines_and_if_it_is_long(open_, write, before):
    assert " conversations (" in open_(write("c.jsonl", before + json_lines(ROWS)), sequence=256).source


def test_a_form_of_rows_is_refused_for_a_text(open_, write):
    with pytest.raises(RequestError, match=r"data.form is alpaca, but '.*' is plain text, whose rows have no keys"):
        open_(write("text.txt", "x" * 100), form="alpaca")


def test_pairs_of_answers_are_refused_by_name(open_, write):
    path = write("pairs.jsonl", json_lines([{"prompt": "x", "chosen": "a", "rejected": "b"}] * 3))
    with pytest.raises(RequestError, match=r"holds pairs of a better and a worse answer \(chosen, rejected\)"):
        open_(path)


def test_prompts_and_completions_need_no_template(open_, write):
    rows = [{"prompt": f"{number} ", "completion": "the loss"} for number in range(40)]
    found = open_(write("chats.jsonl", json_lines(rows)), template="")
    row = found.train.read(np.array([0]))
    tokenizer = read_tokenizer(found.train.tokens.path.parent / "tokenizer.json").load()
    learned = row["labels"][row["labels"] >= 0]
    assert tokenizer.decode(learned.tolist(), skip_special_tokens=False) == "the loss<|im_end|>"


def test_who_has_learned_texts_is_not_asked_by_a_template_that_lies_beside_them(open_, write):
    texts = [{"prompt": f"{number} ", "completion": "the loss"} for number in range(40)]
    found = open_(write("texts.jsonl", json_lines(texts)))
    assert found.asks is None
    assert "40 as texts, without a chat template" in found.source
    as_messages = [
        {"prompt": [{"role": "user", "content": row["prompt"]}], "completion": [{"role": "assistant", "content": "so"}]}
        for row in texts
    ]
    found = open_(write("chats.jsonl", json_lines(as_messages)))
    assert found.asks
    assert "without a chat template" not in found.source


def test_a_mixture_has_conversations_beside_text(write, tmp_path):
    folder = tokenizer_folder(tmp_path / "tokenizer")
    chats = write("chats.jsonl", json_lines(ROWS))
    text = write("text.jsonl", json_lines([{"text": "the loss " * 40}] * 30))
    mixture = {str(chats): 0.5, str(text): 0.5}
    found = corpus.open_corpus(DataConfig(mixture=mixture, tokenizer=folder), VOCAB, S)
    alone = corpus.open_corpus(DataConfig(path=str(chats), tokenizer=folder), VOCAB, S)
    names = list(found.sources)
    part = found.train.parts[names.index(str(chats))]
    np.testing.assert_array_equal(part.read(np.arange(part.count))["labels"], split(alone)[0]["labels"])
    short = corpus.open_corpus(DataConfig(mixture=mixture, tokenizer=folder), VOCAB, S // 2)
    assert f"conversations longer than {S // 2} tokens left out" in short.source


def test_a_single_conversation_is_data_too(open_, write):
    held_out = write("held.jsonl", json_lines(ROWS[:1]))
    found = open_(write("chats.jsonl", json_lines(ROWS[:2])), validation_path=str(held_out), sequence=256)
    assert (found.train.count, found.validation.count) == (2, 1)
