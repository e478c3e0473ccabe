"""Processes that see other files at the same path end before they compute with them, and say which file it is."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from pydantic import BaseModel
from safetensors.numpy import load_file, save_file

from jaxdist.config import Config
from jaxdist.huggingface.file_digests import SMALL, digests_of
from jaxdist.huggingface.schema import FILES
from jaxdist.training import copies
from jaxdist.training.copies import ELSEWHERE, brief, difference, paths_in, refusals
from tests.huggingface.exported import GOLDEN, model_of, run_from
from tests.processes import told

LLAMA = GOLDEN / "llama31"
SHARD = "model-00002-of-00002.safetensors"
NORM = "model.layers.1.input_layernorm.weight"


def rewritten(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Change the tensors of the second shard."""
    tensors = load_file(folder / SHARD)
    change(tensors)
    save_file(tensors, folder / SHARD, {"format": "pt"})


def half(tensors: dict[str, np.ndarray]) -> None:
    for name, values in tensors.items():
        tensors[name] = (values * 0.5).astype(ml_dtypes.bfloat16)


def one_number(tensors: dict[str, np.ndarray]) -> None:
    tensors[NORM] = tensors[NORM].copy()
    tensors[NORM][32] += 1


def replaced(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return change


CHANGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a shard x 0.5": (lambda f: rewritten(f, half), SHARD, "8 of 8 tensors, first lm_head.weight"),
    "one number of one tensor": (lambda f: rewritten(f, one_number), SHARD, f"1 of 8 tensors, first {NORM}"),
    "a tensor less": (lambda f: rewritten(f, lambda t: t.pop(NORM)), SHARD, ""),
    "a shard that is cut off": (lambda f: os.truncate(f / SHARD, 5000), SHARD, ""),
    "the tokenizer": (replaced("tokenizer.json", "the", "THE"), "tokenizer.json", ""),
    "the template": (replaced("chat_template.jinja", "{%", "x{%"), "chat_template.jinja", ""),
    "config.json": (replaced("config.json", "500000", "10000"), "config.json", ""),
    "what ends a text": (replaced("generation_config.json", "{", '{"x": 1, '), "generation_config.json", ""),
    "the index": (replaced("model.safetensors.index.json", "{", '{"x": 1, '), "model.safetensors.index.json", ""),
    "a file less": (lambda f: (f / "tokenizer_config.json").unlink(), "tokenizer_config.json", ""),
}
"""Of each kind of change: the change, the file that is named, and the tensors."""


def digests(folder: Path) -> dict:
    found = digests_of(sorted(folder.iterdir()), SMALL)
    return {path.name: digest for path, digest in found.items()}


@pytest.mark.parametrize("kind", CHANGES)
def test_every_change_is_found_and_named(tmp_path, kind):
    change, file, tensors = CHANGES[kind]
    there = brief(digests(LLAMA))
    folder = Path(shutil.copytree(LLAMA, tmp_path / "model"))
    assert difference(digests(folder), there) is None
    change(folder)
    found = difference(digests(folder), json.loads(json.dumps(there)))
    how = "lacks" if kind == "a file less" else "changes"
    assert found == (file, how, tensors)


def test_the_sentence_names_the_processes_and_the_file_of_the_leader():
    hosts = {0: "north", 1: "east", 2: "south", 3: "south"}
    other = ["w.safetensors", "changes", "1 of 2 tensors, first a"]
    files = {"w.safetensors": Path("/data/model/w.safetensors")}
    remedy = "copy the same files to all hosts, or name those of a file system that they share"
    assert refusals([None, other, None, other], files, hosts) == [
        f"process 1 on east and process 3 on south have another '/data/model/w.safetensors' than process 0 on north "
        f"(other numbers in 1 of 2 tensors, first a); {remedy}"
    ]
    assert refusals([None, ["t", "lacks", ""], ["u", "adds", ""]], {}, hosts) == [
        f"process 1 on east has no 't', which process 0 on north has; {remedy}",
        f"process 2 on south has 'u', which process 0 on north has not; {remedy}",
    ]
    many = refusals([None, *[other] * 20], files, {})
    assert "process 8 on an unknown host and 12 more have another" in many[0]


# ---- who compares what


@pytest.fixture
def compared(monkeypatch) -> list[str]:
    """The files that would have been compared, if there were other processes."""
    names: list[str] = []
    monkeypatch.setattr(copies, "check_copies", lambda files, small: names.extend(map(str, files.values())))
    return names


def path_knobs(section: type[BaseModel], before: str = "") -> Iterator[str]:
    """The knobs whose values are paths, by the checks of their types."""
    for name, field in section.model_fields.items():
        if isinstance(field.default, BaseModel):
            yield from path_knobs(type(field.default), f"{before}{name}.")
        elif "_valid_path" in f"{field.annotation} {field.metadata}":
            yield before + name


def test_each_path_of_a_configuration_is_compared_unless_something_else_does(tmp_path, compared):
    """A knob that is new is compared without being named anywhere."""
    knobs = set(path_knobs(Config))
    assert knobs > ELSEWHERE
    config = Config()
    for name in knobs:
        section, _, knob = name.rpartition(".")
        (tmp_path / name).touch()
        update = {knob: tmp_path / name}
        if section:
            update = {section: getattr(config, section).model_copy(update=update)}
        config = config.model_copy(update=update)
    assert paths_in(config).keys() == knobs
    copies.check_named(config)
    assert set(compared) == {str(tmp_path / name) for name in knobs - ELSEWHERE}


def test_the_small_files_of_every_form_are_compared(tmp_path, compared):
    run_from(LLAMA, tmp_path / "run")
    of_run = {str(tmp_path / "run" / name) for name in ("config.toml", "tokenizer.json", "huggingface/config.json")}
    for named, expected in [
        (LLAMA, {str(LLAMA / name) for name in FILES}),
        (tmp_path / "run", of_run),
        (tmp_path / "run/checkpoints/best", of_run),
    ]:
        compared.clear()
        copies.check_named(Config(model=model_of(LLAMA), init_from=named, run_dir=tmp_path / "new"))
        assert set(compared) >= expected
    compared.clear()
    copies.check_named(Config(model=model_of(LLAMA), run_dir=tmp_path / "run"), reads_run=True)
    assert set(compared) >= of_run


TWO = """
import os
from contextlib import suppress
from pathlib import Path
from jaxdist.config import Config, RequestError
from jaxdist.huggingface.model_config import model_values
from jaxdist.huggingface.folder import open_config
from jaxdist.request import load
from jaxdist.training import copies
from jaxdist.training.checkpoint.manager import Checkpoints
from jaxdist.training.run import Run
from jaxdist.weights.base import Base
from jaxdist.weights.source import stored_at

copies.LEADER_SPEAKS = 0
os.chdir(arguments[process])
config = load(None, {"init_from": "same", "mesh": "2x1x1", "run_dir": "new", "model.sequence": "16"})
run = Run(config, batch=False)

def problem(call):
    try:
        call()
    except RequestError as error:
        return str(error)

def weights(folder):
    copies.check_named(config.model_copy(update={"init_from": folder}))
    stored_at(folder).restore(run, "latest")

def step(folder):
    with Checkpoints(folder, keep=None) as checkpoints:
        checkpoints.restore_params(run.engine.abstract_params(), {}, checkpoints.find())

with jax.set_mesh(run.mesh):
    found = {kind: problem(lambda: weights(Path(kind))) for kind in arguments[2].split(",")}
    # Each host has mounted the base of adapters elsewhere.
    found["base"] = problem(lambda: Base(Path("a shard x 0.5").absolute(), "").read(run))
    found["run"] = problem(lambda: step(Path("run")))
    found["same run"] = problem(lambda: step(Path(arguments[3])))
tell([process, found])
"""


@pytest.mark.slow
def test_two_processes_with_different_copies_end_with_one_sentence(tmp_path):
    """Every kind of change, also in the base of adapters and in the step of a run; the same files are read."""
    kinds = ["a shard x 0.5", "the tokenizer", "the template", "a file less"]
    for host in ("a", "b"):
        (tmp_path / host).mkdir()
        for kind in ["same", *kinds]:
            folder = Path(shutil.copytree(LLAMA, tmp_path / host / kind))
            if host == "b" and kind != "same":
                CHANGES[kind][0](folder)
        run_from(tmp_path / host / "same", tmp_path / host / "run")
    arguments = (str(tmp_path / "a"), str(tmp_path / "b"), ",".join(["same", *kinds]), str(tmp_path / "a/run"))
    (_, first), (_, second) = sorted(told(TWO, 2, *arguments, devices=2, seconds=240))
    for same in ("same", "same run"):
        assert first.pop(same) is second.pop(same) is None
    assert set(second.values()) == {"process 0 has refused the request, and says why"}
    for kind in kinds:
        _, file, tensors = CHANGES[kind]
        verb = "no" if kind == "a file less" else "another"
        assert f" has {verb} '{kind}/{file}'" in first[kind]
        assert tensors in first[kind]
    assert f"has another '{tmp_path}/a/a shard x 0.5/{SHARD}' than process 0 on" in first["base"]
    assert "process 1 on" in first["run"]
    assert "run/checkpoints/" in first["run"]
