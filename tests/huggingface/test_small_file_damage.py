"""Small files x kinds of damage x what reads them: each is refused by a sentence that names the file, or not read.

A file, a key or a kind without a row fails: the rows come from the table of small files itself.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxdist import explain, train
from jaxdist.config import ModelConfig, RequestError
from jaxdist.huggingface.chat_template import read_chat_template
from jaxdist.huggingface.folder import KEPT, open_config, open_folder
from jaxdist.huggingface.given_tokenizer import GivenTokenizer, read_tokenizer
from jaxdist.huggingface.model_config import longest_sequence, model_values
from jaxdist.huggingface.peft_reading import PeftAdapter
from jaxdist.huggingface.schema import (
    ADAPTER_CONFIG,
    ADDED_TOKENS,
    CONFIG,
    FILES,
    GENERATION,
    INDEX,
    KEPT_TOKENS,
    SMALL_FILES,
    SOURCE,
    SPECIAL_TOKENS_MAP,
    TOKENIZER,
    TOKENIZER_CONFIG,
)
from jaxdist.huggingface.small_files import kept_dtype, read_kept, small_files
from jaxdist.huggingface.special_tokens import SpecialTokens
from jaxdist.training.run_dir import FILES as RUN_FILES
from jaxdist.training.run_dir import RunFolder
from jaxdist.weights.pretrained import keep_files
from jaxdist.weights.source import source_of

GOLDEN = Path(__file__).parent / "golden" / "llama31"
SECONDS = 20
"""The longest that anything may take here."""


def model(folder: Path) -> ModelConfig:
    opened = open_folder(folder)
    values = model_values(opened)
    return ModelConfig(**values, sequence=min(16, longest_sequence(opened, values)))


def tokenizer(folder: Path) -> None:
    given = read_tokenizer(folder)
    given.load().encode("a word", add_special_tokens=False)
    vocab = given.load().get_vocab_size()
    assert all(token < vocab for token in (given.special.bos or 0, given.special.eos or 0, *given.special.stops))


def template(folder: Path) -> None:
    read_chat_template(folder).render([{"role": "user", "content": "a word"}])


def keep(folder: Path) -> None:
    keep_files(source_of(folder).kept_files(), folder.parent / "kept")


def command(main: Callable, *more: str) -> Callable[[Path], None]:
    return lambda folder: main([*more, f"--init-from={folder}", "--mesh=1x1x1"])


def export(folder: Path) -> None:
    """What an export reads of a run, which keeps the files of the folder."""
    run = folder.parent / "run"
    run.mkdir(exist_ok=True)
    (run / KEPT).unlink(missing_ok=True)
    (run / KEPT).symlink_to(folder)
    own = GivenTokenizer((GOLDEN / TOKENIZER).read_text(), SpecialTokens(1, 2, (2,)))
    kept_dtype(run)
    small_files(read_kept(run), ModelConfig(family="llama"), "float32", own)


def resumed(folder: Path) -> None:
    """What every command reads of a run: here of one in the folder itself."""
    (folder / "config.toml").write_text("")
    run = RunFolder(folder)
    run.check_layout()
    assert run.identity() is None or len(run.identity()) < 100
    run.load_special_tokens(run.load_tokenizer())


def adapters(folder: Path) -> None:
    """What a run reads of adapters; a folder has none unless a test writes them."""
    if not os.path.lexists(folder / ADAPTER_CONFIG):
        with_adapters(folder)
    PeftAdapter(folder).config  # noqa: B018


def with_adapters(folder: Path) -> None:
    content = {"peft_type": "LORA", "base_model_name_or_path": "base", "r": 2, "lora_alpha": 4}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(content))


ALL = {*SMALL_FILES, SOURCE}

READERS: dict[Callable[[Path], object], set[str]] = {
    model: {CONFIG, INDEX},
    tokenizer: {CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS, KEPT_TOKENS},
    template: {TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, "chat_template.jinja", "chat_template.json"},
    keep: ALL - {SOURCE, CONFIG},
    export: ALL,
    resumed: {TOKENIZER, KEPT_TOKENS},
    command(explain.main): {CONFIG},
    command(train.main, "--dry-run"): {CONFIG},
    adapters: {ADAPTER_CONFIG},
}
"""What reads files of a folder, and which."""

BY_KEY = {
    model: {CONFIG, INDEX},
    tokenizer: {CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS, KEPT_TOKENS},
    template: {TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, "chat_template.json"},
    keep: set(),
    export: {CONFIG, SOURCE, TOKENIZER},
    resumed: {TOKENIZER, KEPT_TOKENS},
    adapters: {ADAPTER_CONFIG},
}
"""Which of them it takes to be JSON; the others are copied."""

UNREAD = {
    "environment.json": "is for people",
    "run.json": "a run whose id cannot be read gets another one: tests/training/test_hostile_folders.py",
    "metrics.jsonl": "a line that cannot be read is left out: tests/training/test_history.py",
    "starts.jsonl": "a line that cannot be read is left out: tests/training/test_goodput.py",
    "config.toml": "tests/request/test_reading.py",
    "loss.png": "is for people",
    "log.txt": "is for people",
    "log.txt.1": "is for people",
}
"""Files that nothing here reads."""

CONTENTS = {
    "empty": b"",
    "torn": b'{"a": ',
    "a list": b"[1]",
    "null": b"null",
    "a number": b"7",
    "a byte that is not UTF-8": b'{"a": "\xff"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "too deep for Python": b'{"a":' * 200_000,
    "deep": b'{"a":' * 200 + b"1" + b"}" * 200,
    "half a character": b'{"a": "\\ud800"}',
    "a long number": b'{"a": ' + b"1" * 5000 + b"}",
    "NaN": b'{"a": NaN}',
    "a key twice": b'{"a": 1, "a": 2}',
}
"""Contents that no file of JSON has."""

ODD: list[Any] = [None, [], {}, "", "x" * 5000, "\x1b[2J", -1, 0, 1.5, True, 10**30, 2**40, 10**6, 1e300, [[]], ["x"]]
ODD += [[{}], {"content": []}, [{"name": []}], [10**30], {"1": {}}, {"x": {"content": "a"}}, {"rope_type": []}]
ODD += [{"rope_type": "yarn", "factor": [], "original_max_position_embeddings": 10**30}, {"a": 7}, {"a": "../b"}]
"""Values that a key may get from anybody."""


MORE_KEYS = {
    CONFIG: ("rope_scaling", "sliding_window", "vocab_size"),
    TOKENIZER_CONFIG: ("image_token",),
    SPECIAL_TOKENS_MAP: ("image_token",),
    ADDED_TOKENS: ("<more>", ""),
}
"""Keys that are read and have no rule, since other tables or functions say what they may be."""


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path)


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(FILES[path.name].largest + 1)


KINDS = [fifo, device, loop, Path.mkdir, large]
"""What is no file that could be read."""


@contextmanager
def in_time() -> Iterator[None]:
    """Raise where the block takes longer than it may, as a read of a FIFO would."""

    def late(*_: object) -> None:
        raise TimeoutError(f"longer than {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Callable[[], Path]:
    """Make a whole folder anew; commands find no run of somebody's here."""
    monkeypatch.chdir(tmp_path)

    def make() -> Path:
        path = tmp_path / "folder"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(GOLDEN, path, ignore=shutil.ignore_patterns("expected.npz"))
        (path / SPECIAL_TOKENS_MAP).write_text("{}")
        (path / "chat_template.json").write_text('{"chat_template": "x"}')
        (path / SOURCE).write_text('{"dtype": "bfloat16"}')
        (path / KEPT_TOKENS).write_text('{"bos": 1, "eos": 2, "stops": [2]}')
        for name in (ADDED_TOKENS, "vocab.json", "merges.txt", "tokenizer.model"):
            (path / name).write_text("{}")
        return path

    return make


def refusal(read: Callable[[Path], object], folder: Path) -> list[str]:
    """The sentences with which a folder is refused; none where it is not."""
    with in_time():
        try:
            read(folder)
        except RequestError as refused:
            return refused.problems
    return []


def names(problems: list[str], name: str) -> bool:
    """Whether each problem is a sentence of bearable length about the file."""
    return bool(problems) and all(name in one and "\n" not in one and len(one) < 600 for one in problems)


def without_others(folder: Path, name: str) -> None:
    """Remove what would be read in place of a file."""
    for other in {"chat_template.jinja": (), "chat_template.json": ("chat_template.jinja", TOKENIZER_CONFIG)}.get(
        name, ("chat_template.jinja",) if name == TOKENIZER_CONFIG else ()
    ):
        (folder / other).unlink()


def for_reader(read: Callable[[Path], object], folder: Path, name: str) -> None:
    """Leave in the folder what makes `read` read the file."""
    if read is template:
        without_others(folder, name)
    if read is adapters:
        with_adapters(folder)
    if read is tokenizer and name != KEPT_TOKENS:
        (folder / KEPT_TOKENS).unlink()


def test_every_small_file_has_a_row():
    read = set().union(*READERS.values())
    assert read == set(FILES)
    of_runs = {name.rpartition("/")[2] for name in RUN_FILES}
    assert of_runs <= read | set(UNREAD)
    assert not read & set(UNREAD)


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_refused_by_everything_that_reads_it(folder, name):
    for read, files in READERS.items():
        if name not in files:
            continue
        for kind in KINDS:
            path = folder()
            for_reader(read, path, name)
            (path / name).unlink()
            kind(path / name)
            problems = refusal(read, path)
            assert names(problems, name), (read, kind, problems)


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_json_is_refused_by_everything_that_takes_it_for_json(folder, name):
    for read, files in BY_KEY.items():
        if name not in files:
            continue
        for kind, content in CONTENTS.items():
            path = folder()
            for_reader(read, path, name)
            (path / name).write_bytes(content)
            problems = refusal(read, path)
            assert names(problems, name), (read, kind, problems)


@pytest.mark.parametrize("name", [name for name, file in FILES.items() if file.rules is not None])
def test_every_key_may_have_any_value_and_is_refused_or_read(folder, name):
    for read, files in BY_KEY.items():
        if name not in files:
            continue
        path = folder()
        for_reader(read, path, name)
        content = json.loads((path / name).read_text())
        keys = {*content, *FILES[name].rules, *MORE_KEYS.get(name, ())}
        for key in sorted(keys):
            for value in ODD:
                (path / name).write_text(json.dumps(content | {key: value}))
                problems = refusal(read, path)
                assert all(len(one) < 900 and "\n" not in one for one in problems), (read, key, value, problems)


def test_a_template_that_is_no_text_is_refused(folder):
    path = folder()
    (path / "chat_template.jinja").write_bytes(b"\xff")
    assert names(refusal(template, path), "chat_template.jinja")


def test_a_tokenizer_with_a_key_twice_is_refused_where_tokens_are_added_to_it(folder):
    path = folder()
    (path / KEPT_TOKENS).unlink()
    (path / TOKENIZER).write_text((path / TOKENIZER).read_text().replace('"version"', '"version": "1.0", "version"', 1))
    assert refusal(tokenizer, path) == []
    own = json.loads((path / TOKENIZER).read_text())["added_tokens"]
    (path / ADDED_TOKENS).write_text(json.dumps({"<more>": len(own) + read_tokenizer(path).load().get_vocab_size()}))
    assert "tokenizer.json" in "".join(refusal(tokenizer, path))


@pytest.mark.slow
def test_a_whole_folder_is_read(folder):
    for read in READERS:
        assert refusal(read, folder()) == [], read
    assert open_config(folder()).config["model_type"] == "llama"
