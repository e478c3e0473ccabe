"""How `generate` draws: options win, then generation_config.json, of a folder or of a run that began with one."""

import json
from pathlib import Path

import pytest

from jaxdist.config import RequestError
from jaxdist.request.sampling import Sampling, sampling

NOTHING = dict.fromkeys(("temperature", "top_k", "top_p", "repetition_penalty", "seed")) | {"samples": 1}
QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}


@pytest.fixture(params=["folder", "run"])
def saying(request, tmp_path):
    """A folder of Hugging Face, or that of a run, with this generation_config.json: `saying({...})`."""

    def write(content: dict) -> Path:
        kept = tmp_path / "huggingface" if request.param == "run" else tmp_path
        kept.mkdir(exist_ok=True)
        (kept / "config.json").write_text("{}")
        (kept / "generation_config.json").write_text(json.dumps(content))
        return tmp_path

    return write


def test_without_a_word_it_is_as_usual_here(saying, tmp_path):
    usual = (Sampling(0.8, 50, 1.0, 1.0), "")
    assert sampling(NOTHING, tmp_path) == usual
    for content in ({"eos_token_id": 1}, {"temperature": None, "do_sample": True}):
        assert sampling(NOTHING, saying(content)) == usual


def test_the_file_counts_and_an_option_wins(saying):
    folder = saying(QWEN)
    found, line = sampling(NOTHING, folder)
    assert found == (0.6, 20, 0.95, 1.0)
    path = next(folder.rglob("generation_config.json"))
    assert line == (
        f"sampling: temperature 0.6, top_k 20, top_p 0.95 from {path}; repetition_penalty 1 as transformers has it"
    )
    found, line = sampling(NOTHING | {"top_k": 5, "repetition_penalty": 1.2}, folder)
    assert found == (0.6, 5, 0.95, 1.2)
    assert line == (
        f"sampling: temperature 0.6, top_p 0.95 from {path}; top_k 5, repetition_penalty 1.2 from the command line"
    )
    # What such a file leaves out is as in transformers, whose temperature is 1: that of Gemma 3 is so.
    assert sampling(NOTHING, saying({"do_sample": True, "top_k": 64, "top_p": 0.95}))[0] == (1.0, 64, 0.95, 1.0)


def test_a_file_that_takes_no_samples_is_greedy(saying):
    folder = saying({"do_sample": False, "repetition_penalty": 1.1})
    found, line = sampling(NOTHING, folder)
    assert found == (0.0, 50, 1.0, 1.1)
    assert line.startswith("sampling: temperature 0, repetition_penalty 1.1 from ")
    assert sampling(NOTHING | {"temperature": 0.5, "top_k": 3}, folder)[0] == (0.5, 3, 1.0, 1.1)
    with pytest.raises(RequestError, match=r"takes no samples, so that the likeliest token .* --top-k 3 has no effect"):
        sampling(NOTHING | {"top_k": 3}, folder)


def test_options_that_have_no_effect_are_refused(tmp_path):
    greedy = NOTHING | {"temperature": 0.0}
    assert sampling(greedy | {"repetition_penalty": 1.3}, tmp_path)[0] == (0.0, 50, 1.0, 1.3)
    with pytest.raises(RequestError) as error:
        sampling(greedy | {"top_k": 5, "top_p": 0.9, "seed": 3, "samples": 3}, tmp_path)
    assert len(error.value.problems) == 4
    assert error.value.problems[2].startswith(
        "--temperature is 0, so that the likeliest token is always taken and --seed 3 has no effect; leave it out"
    )
    assert "--samples 3 would write the same text each time" in error.value.problems[3]
    one = NOTHING | {"top_k": 1}
    assert sampling(one, tmp_path)[0] == (0.8, 1, 1.0, 1.0)
    with pytest.raises(RequestError) as error:
        sampling(one | {"temperature": 0.5, "samples": 3}, tmp_path)
    assert [problem.split("; ")[0].split(" and ")[1] for problem in error.value.problems] == [
        "--temperature 0.5 has no effect",
        "--samples 3 would write the same text each time",
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"temperature": -1}, "temperature is -1: must be at least 0; correct it, or give --temperature"),
        ({"top_p": 1.5}, "top_p is 1.5: must be at most 1; correct it, or give --top-p"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0: must be more than 0"),
        ({"temperature": "hot"}, "temperature"),
        ({"do_sample": "yes"}, "do_sample"),
    ],
)
def test_values_with_which_nothing_can_be_drawn_are_refused(saying, content, said):
    with pytest.raises(RequestError, match=said):
        sampling(NOTHING, saying(content))
