"""Mixtures in a request: a table or a short text, read and written the same; what is refused before data are read."""

import pytest

from jaxdist.config import RequestError
from jaxdist.config.mixture import of_parts, parse
from jaxdist.request import load
from jaxdist.request.reading import to_toml

TABLE = """
[data.mixture]
"web.txt" = 0.7
code = {path = "src", weight = 0.3}

[[data.mixture.phase]]
from = 0.9
code = 1
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    for name in ("web.txt", "src/a.txt", "src/b.txt", "books.txt"):
        (tmp_path / name).write_text(f"{name}\n" * 40)
    (tmp_path / "tokens.bin").write_bytes(bytes(range(200)) * 2)
    return tmp_path


def asked(text: str, **overrides):
    with open("my.toml", "w") as file:
        file.write(text)
    return load("my.toml", {name.replace("__", "."): value for name, value in overrides.items()})


def problems(text: str, **overrides) -> list[str]:
    with pytest.raises(RequestError) as error:
        asked(text, **overrides)
    return error.value.problems


def test_a_table_is_read_and_written_the_same(folder):
    config = asked(TABLE)
    mixture = config.data.mixture
    assert [(source.name, source.path, source.text) for source in mixture.sources] == [
        ("web.txt", "web.txt", None),
        ("code", "src", None),
    ]
    assert [tuple(phase) for phase in mixture.phases] == [(0, (0.7, 0.3)), (0.9, (0, 1))]
    (folder / "resolved.toml").write_text(to_toml(config))
    assert load("resolved.toml", {}).data == config.data
    assert str(mixture) == "web.txt 70 %, code 30 %; from 0.9 on code 100 %"


def test_a_source_may_say_where_its_text_is(folder):
    (folder / "rows.jsonl").write_text('{"a": {"b": "x"}}\n')
    rows = '[data.mixture]\n"rows.jsonl" = {path = "rows.jsonl", weight = 1, text = "a.b"}'
    mixture = asked(rows).data.mixture
    assert mixture.sources[0].text == "a.b"
    assert parse(mixture.table()) == mixture
    for said, reason in (
        ('"a..b"', '"a..b": must name a key, such as content'),
        ('"{a"', '"{a": a template has keys in braces'),
        ("3", '3; name a key, such as "content"'),
    ):
        (problem,) = problems(rows.replace('"a.b"', said))
        assert f"the text of 'rows.jsonl' is {reason}" in problem
    (problem,) = problems(rows.replace("text", "txt"))
    assert "must be a weight, or have both a path and a weight" in problem


@pytest.mark.parametrize(
    ("text", "sources"),
    [
        ("web.txt*0.7,src/*0.3", {"web.txt": 0.7, "src": 0.3}),
        ("web.txt*7, src/*.txt*3e0", {"web.txt": 7, "src/*.txt": 3}),
        ("web.txt*.5", {"web.txt": 0.5}),
    ],
)
def test_the_short_form_is_a_mixture(text, sources):
    for config in (load(None, {"data.path": text}), load(None, {"data.mixture": text}), asked(f"data.path = '{text}'")):
        assert config.data.path is None
        assert config.data.mixture == parse(sources)


def test_names_and_patterns_that_files_have_are_no_weights(folder):
    (folder / "a*0.5").write_text("text " * 99)
    (folder / "b7").write_text("text " * 99)
    for text in ("a*0.5", "b*7", "a*0.5,b*7"):
        assert load(None, {"data.path": text}).data.path == text
    assert load(None, {"data.path": "a*0.5*2,b*7*3"}).data.mixture == parse({"a*0.5": 2, "b*7": 3})


@pytest.mark.parametrize("overrides", [{"data.path": "books.txt"}, {"data.path": "books.txt*1"}])
def test_data_of_the_command_line_replace_those_of_the_file(overrides):
    for text in (TABLE, 'data.path = "web.txt"'):
        with open("my.toml", "w") as file:
            file.write(text)
        assert load("my.toml", overrides).data == load(None, overrides).data


WRONG = {
    "negative": ('"web.txt" = -1', "the weight of 'web.txt' is -1; give a finite number, 0 or more"),
    "nan": ('"web.txt" = nan', "the weight of 'web.txt' is nan; give a finite number"),
    "infinite": ('"web.txt" = inf', "the weight of 'web.txt' is inf; give a finite number"),
    "no number": ('"web.txt" = "much"', "the weight of 'web.txt' is \"much\"; give a number"),
    "sum of zero": ('"web.txt" = 0', "the weights are all 0; give one of them more"),
    "nothing": ("", "it has no sources"),
    "a source without a row": ('"web.txt" = 1\nsrc = 1e-7', "the weight of 'src' is less than a millionth of all"),
    "never read": (
        '"web.txt" = 1\nsrc = 0\n[[data.mixture.phase]]\nfrom = 0.5\n"web.txt" = 2',
        "'src' has a weight of 0 in every phase; raise it, or leave it out",
    ),
    "one source twice": ('"web.txt" = 1\na = {path = "./web.txt", weight = 1}', "it names 'web.txt' 2 times"),
    "half a source": ('a = {path = "web.txt"}', "'a' must be a weight, or have both a path and a weight"),
    "an unknown source": (
        '"web.txt" = 1\n[[data.mixture.phase]]\nfrom = 0.5\nbooks = 1',
        "phase 2 has a weight of 'books', which is no source of the mixture; add it to the mixture, with a weight of 0",
    ),
    "a phase that begins nowhere": ('"web.txt" = 1\n[[data.mixture.phase]]\n"web.txt" = 1', "add from = 0.9"),
    "a phase from the start": ('"web.txt" = 1\n[[data.mixture.phase]]\nfrom = 0\n"web.txt" = 1', "begins from 0; give"),
    "phases out of order": (
        '"web.txt" = 1\n' + "".join(f'[[data.mixture.phase]]\nfrom = {at}\n"web.txt" = 1\n' for at in (0.5, 0.2)),
        "a phase from 0.2 on follows one from 0.5 on; put them in order",
    ),
    "out of order in this run": (
        '"web.txt" = 1\n' + "".join(f'[[data.mixture.phase]]\nfrom = {at}\n"web.txt" = 1\n' for at in (0.5, 60)),
        "a phase of data.mixture begins after 60 steps, and the one before it after 75; put them in order",
    ),
    "after the end": (
        '"web.txt" = 1\n[[data.mixture.phase]]\nfrom = 150\n"web.txt" = 1',
        "a phase of data.mixture begins after 150 steps, and the run has 150 (train.steps); begin it earlier",
    ),
    "a file that is not there": ('"no.txt" = 1', "data.mixture 'no.txt' does not exist; give the path of a file"),
    "a file in two sources": (
        'src = 1\n"src/*.txt" = 1',
        "'src/a.txt' in 'src' and in 'src/*.txt'; leave it out of one",
    ),
    "a key for no JSON lines": ('"web.txt" = 1\n[data]\ntext = "content"', "none of the data are JSON lines"),
    "its own validation": (
        '"web.txt" = 1\n[data]\nvalidation_path = "books.txt"',
        "data.validation_path is 'books.txt', but each source of data.mixture holds out a part of its own",
    ),
    "epochs": ('"web.txt" = 1\n[train]\nepochs = 2', "train.epochs is 2, but the sources of data.mixture have epochs"),
    "both": ('"web.txt" = 1\n[data]\npath = "books.txt"', "data.path and data.mixture are both set in the config"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_mixture_is_refused_in_one_sentence(case):
    text, sentence = WRONG[case]
    (problem,) = problems(f"[data.mixture]\n{text}")
    assert sentence in problem


def test_spaces_around_a_weight_do_not_matter():
    mixture = of_parts(["web 1.txt * 0.7", " src/* *.3"])
    assert mixture == of_parts(["web 1.txt*0.7", "src/**.3"])
    assert [source.path for source in mixture.sources] == ["web 1.txt", "src/*"]


def test_a_part_without_a_weight_is_refused():
    with pytest.raises(RequestError, match=r"'src' has no weight; end each part with one, such as 'src\*0.5'"):
        load(None, {"data.path": "web.txt*0.7,src"})
