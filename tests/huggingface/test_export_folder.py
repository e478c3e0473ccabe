"""`python -m jaxdist.checkpoints RUN --export FOLDER/`."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from jaxdist import checkpoints
from jaxdist.config import Config, Failed, ModelConfig, RequestError
from jaxdist.huggingface.reading import read_parameters
from jaxdist.process.exit_codes import STOPPED
from jaxdist.request import to_toml
from jaxdist.request.commandline import outcome
from jaxdist.training.export_marks import MARKER
from tests.huggingface import by_transformers
from tests.huggingface.exported import GOLDEN, NAMES, abstract, model_of, run_from, save, tensors
from tests.training.test_checkpoint import mounted


@pytest.fixture(scope="module")
def llama31(tmp_path_factory) -> Path:
    """A run that began with a folder that has a tokenizer."""
    run = tmp_path_factory.mktemp("runs") / "llama31"
    run_from(GOLDEN / "llama31", run)
    return run


def export(run: Path, out: Path, *more: str) -> None:
    assert checkpoints.main([str(run), f"--export={out}/", *more]) == 0


def refused(run: Path, out: Path | str, *more: str) -> str:
    with pytest.raises(RequestError) as error:
        checkpoints.main([str(run), f"--export={out}", *more])
    (problem,) = error.value.problems
    return problem


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def test_the_folder_is_that_of_the_source_again(llama31, tmp_path, capsys):
    out = tmp_path / "out"
    export(llama31, out)
    assert f"wrote {out}: 21 tensors, 127,616 bytes of bfloat16 in 1 file, of step 1" in capsys.readouterr().out
    expected = tensors(GOLDEN / "llama31")
    found = tensors(out)
    assert all(found[name].tobytes() == numbers.tobytes() for name, numbers in expected.items())
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (GOLDEN / "llama31" / name).read_bytes(), name
    assert {path.name for path in out.iterdir()} == {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
        *("model.safetensors", MARKER),
    }
    assert model_of(out) == model_of(GOLDEN / "llama31")


def test_config_json_keeps_what_was_there_and_has_the_keys_of_transformers_4_and_5(llama31, tmp_path):
    export(llama31, tmp_path / "out")
    config = read(tmp_path / "out" / "config.json")
    source = read(GOLDEN / "llama31" / "config.json")
    assert {key: config[key] for key in source} == source
    scaling = source["rope_parameters"]
    assert config["rope_theta"] == scaling["rope_theta"]
    assert config["rope_scaling"].items() <= scaling.items()
    assert config["rope_scaling"]["rope_type"] == "llama3"
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"


def test_generation_stops_where_the_run_does(llama31, tmp_path):
    """A run on conversations also stops at the token that ends an answer in its template, which the source may lack."""
    run = shutil.copytree(llama31, tmp_path / "run")
    shutil.copy(GOLDEN / "llama31" / "tokenizer.json", run)
    source = read(GOLDEN / "llama31" / "generation_config.json")
    for stops, named in (([1], 1), ([1, 7], [1, 7])):
        (run / "special_tokens.json").write_text(json.dumps({"bos": 0, "eos": 1, "stops": stops}))
        export(run, tmp_path / "out", "--force")
        assert read(tmp_path / "out" / "generation_config.json") == {**source, "eos_token_id": named}


def test_another_dtype_can_be_asked_for(llama31, tmp_path, capsys):
    export(llama31, tmp_path / "out", "--dtype=float32")
    assert "bytes of float32" in capsys.readouterr().out
    assert {str(numbers.dtype) for numbers in tensors(tmp_path / "out").values()} == {"float32"}
    assert read(tmp_path / "out" / "config.json")["dtype"] == "float32"


def test_without_a_source_the_dtype_is_that_of_the_precision(tmp_path):
    for precision, dtype in (("float32", "float32"), ("bfloat16", "bfloat16"), ("mixed", "bfloat16")):
        run = tmp_path / precision
        run_from(GOLDEN / "llama1", run, precision=precision)
        (run / "huggingface" / "source.json").unlink()
        export(run, tmp_path / f"of {precision}")
        assert {str(numbers.dtype) for numbers in tensors(tmp_path / f"of {precision}").values()} == {dtype}


def test_a_source_without_a_valid_dtype_asks_for_one(tmp_path):
    run = tmp_path / "run"
    run_from(GOLDEN / "llama1", run)
    (run / "huggingface" / "source.json").write_text('{"dtype": "int8"}')
    assert refused(run, f"{tmp_path}/out/").endswith(
        "does not give the dtype of weights; add --dtype, such as bfloat16"
    )
    export(run, tmp_path / "out", "--dtype=bfloat16")


def test_a_folder_that_is_not_empty_is_replaced_only_when_told_to(llama31, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    export(llama31, out)
    assert refused(llama31, out) == f"--export '{out}' is an earlier export; name another, or add --force to replace it"
    export(llama31, out, "--force", "--dtype=float32")
    assert {str(numbers.dtype) for numbers in tensors(out).values()} == {"float32"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_no_folder_of_ones_own_is_refused(llama31, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path)
    for target, told in (
        ("file/", "is not a folder; name one that is empty, or new"),
        ("link", "is a symbolic link; name the folder itself"),
        ("none/out/", "cannot be written: its folder does not exist; create it first"),
    ):
        assert refused(llama31, f"{tmp_path}/{target}").endswith(told)
    for name in ("checkpoints", "huggingface"):
        problem = refused(llama31, llama31 / name, "--force")
        assert problem.endswith(f"belongs to the run in '{llama31}', which writes {name} itself; name another file")


def test_an_export_that_fails_leaves_what_was_there(llama31, tmp_path, monkeypatch):
    out = tmp_path / "out"
    export(llama31, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("jaxdist.training.export.write_whole", full)
        with pytest.raises(Failed, match=f"^the export to '{out}' failed: no space left on device; nothing of it is "):
            export(llama31, out, "--force")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_images_have_no_such_form(tmp_path):
    (tmp_path / "config.toml").write_text(to_toml(Config(model=ModelConfig(family="cnn"), run_dir=tmp_path)))
    problem = refused(tmp_path, f"{tmp_path}/out/")
    assert problem.endswith("transformers has no form of family cnn; name a .safetensors file")


def test_a_balance_that_has_moved_is_refused_before_anything_is_written(tmp_path):
    golden = GOLDEN / "mixtral"
    run = tmp_path / "run"
    model = run_from(golden, run)
    params = read_parameters(golden, model, abstract(model))
    params["blocks"]["mlp"]["balance"] = params["blocks"]["mlp"]["balance"].at[1, 3].set(-1e-3)
    save(run, params, step=2)
    problem = refused(run, f"{tmp_path}/out/")
    assert problem.startswith("blocks.mlp.balance is not zero: ")
    assert "model.balance_rate 0 and a model.balance_loss" in problem
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_experts_that_transformers_has_not_are_refused_by_their_knob(tmp_path):
    run = tmp_path / "run"
    model = run_from(GOLDEN / "mixtral", run).model_copy(update={"router": "sigmoid"})
    (run / "config.toml").write_text(to_toml(Config(model=model, run_dir=run)))
    assert "computes a model of family moe with " in refused(run, f"{tmp_path}/out/")
    assert "router sigmoid" in refused(run, f"{tmp_path}/out/")


def test_a_dtype_is_for_folders_alone(llama31, tmp_path):
    problem = refused(llama31, tmp_path / "weights.safetensors", "--dtype=float16")
    assert problem.startswith("--dtype float16 is for a folder, and --export is ")


TEXT = "the loss of one device"


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    """A run that began with no folder, and has trained a tokenizer of its own."""
    run = tmp_path_factory.mktemp("runs") / "own"
    run_from(GOLDEN / "gpt2", run)
    shutil.rmtree(run / "huggingface")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator([TEXT] * 8, trainers.BpeTrainer(vocab_size=60, special_tokens=["<|endoftext|>"]))
    (run / "tokenizer.json").write_text(tokenizer.to_str())
    return run


def test_a_run_of_its_own_gets_all_files(own, tmp_path):
    out = tmp_path / "out"
    export(own, out)
    config = read(out / "config.json")
    assert (config["model_type"], config["bos_token_id"], config["eos_token_id"]) == ("gpt2", None, 0)
    assert model_of(out) == model_of(GOLDEN / "gpt2")
    assert read(out / "generation_config.json") == {"eos_token_id": 0}
    assert read(out / "tokenizer_config.json")["eos_token"] == "<|endoftext|>"
    assert read(out / "special_tokens_map.json") == {"eos_token": "<|endoftext|>"}
    assert (out / "tokenizer.json").read_text() == (own / "tokenizer.json").read_text()


def test_a_run_with_another_tokenizer_than_its_source_writes_its_own(llama31, own, tmp_path):
    run = Path(shutil.copytree(llama31, tmp_path / "run"))
    shutil.copy(own / "tokenizer.json", run)
    export(run, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == (own / "tokenizer.json").read_text()
    assert read(tmp_path / "out" / "tokenizer_config.json")["eos_token"] == "<|endoftext|>"
    assert not (tmp_path / "out" / "chat_template.jinja").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_transformers_loads_the_folder_and_computes_the_same(name, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    run_from(GOLDEN / name, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out")
    by_transformers.check(tmp_path / "out", GOLDEN / name)


@pytest.mark.slow
def test_transformers_loads_the_tokenizer_of_a_run(own, tmp_path):
    pytest.importorskip("transformers")
    export(own, tmp_path / "out")
    expected = Tokenizer.from_file(str(own / "tokenizer.json")).encode(TEXT).ids
    assert by_transformers.ids(tmp_path / "out", TEXT) == (expected, None, 0)


def test_no_place_is_refused_after_the_work(llama31, tmp_path, monkeypatch):
    """Nor with a traceback: what cannot get another folder, or file, in its place."""
    monkeypatch.setattr("jaxdist.training.export.step_of", None)
    (tmp_path / "here" / "mount" / "bound").mkdir(parents=True)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "bound file").write_text("mine")
    monkeypatch.chdir(tmp_path / "here")
    holds = "is, or holds, the folder in which the command runs; name a new folder in it, such as "
    rows = {
        ".": holds + f"{tmp_path}/here/exported/",
        "./": holds + f"{tmp_path}/here/exported/",
        "..": holds + f"{tmp_path}/exported/",
        "/": holds + "/exported/",
        "../file/": "is not a folder; name one that is empty, or new",
        "../file/x/": "cannot be written: its folder does not exist; create it first",
        "/proc/x.safetensors": "cannot be written: no such file or directory; name another",
        "/proc/x/": "cannot be written: no such file or directory; name another",
    }
    for target, told in rows.items():
        given = str(Path(target))
        for more in ((), ("--force",)):
            found = refused(llama31, target, *more)
            assert found.removeprefix(f"--export '{given}' ").removeprefix(f"--export '{target}' ") == told, target
    with mounted(tmp_path / "small", 1):
        for source, at in (("small", "here/mount"), ("here", "here/mount/bound"), ("file", "bound file")):
            (tmp_path / "here" / "mount" / "bound").mkdir(exist_ok=True)
            subprocess.run(["mount", "--bind", tmp_path / source, tmp_path / at], check=True)
            try:
                assert "is a mount point, which no other" in refused(llama31, tmp_path / at, "--force")
            finally:
                subprocess.run(["umount", "--lazy", tmp_path / at], check=True)


def test_the_base_of_a_run_and_what_others_wrote_stay(llama31, tmp_path):
    """A folder that was downloaded; the same as the base of a run; an export that is one."""
    run = Path(shutil.copytree(llama31, tmp_path / "run"))
    base = Path(shutil.copytree(GOLDEN / "llama31", tmp_path / "base"))
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    assert "has no jaxdist_export.json, by which an export knows its own folder again" in refused(run, base, "--force")
    export(run, tmp_path / "out")
    source = run / "huggingface" / "source.json"
    for named in (base, tmp_path / "out"):
        source.write_text(json.dumps(read(source) | {"path": str(named)}))
        assert f"would change '{named}', which the run '{run}' names as" in refused(run, named, "--force")
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before


TARGETS = {"folder": "out/", "file": "out.safetensors"}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_a_full_disk_is_a_sentence_before_the_work_or_in_it(llama31, tmp_path, target, monkeypatch):
    with mounted(tmp_path / "small", 1):
        (tmp_path / "small" / "ballast").write_bytes(bytes(960_000))
        problem = refused(llama31, f"{tmp_path}/small/{target}")
        assert problem.endswith("MB are free where they would be written; free some, or write them elsewhere")
        for module in ("training.export", "huggingface.writing"):
            monkeypatch.setattr(f"jaxdist.{module}.check_room", lambda *_: None)
        with pytest.raises(
            Failed, match=r"^the export to '.*' failed: no space left on device; nothing of it is left: "
        ):
            checkpoints.main([str(llama31), f"--export={tmp_path}/small/{target}"])
        assert [path.name for path in (tmp_path / "small").iterdir()] == ["ballast"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
@pytest.mark.usefixtures("heeding")
def test_a_signal_ends_an_export_with_a_sentence_and_nothing_is_left(llama31, tmp_path, name, monkeypatch, capsys):
    def killed(*_: object) -> None:
        os.kill(os.getpid(), signal.Signals[name])

    monkeypatch.setattr("jaxdist.training.export.write_whole", killed)
    assert outcome(checkpoints.main, [str(llama31), f"--export={tmp_path}/out/"]) == STOPPED
    what = "interrupted" if name == "SIGINT" else f"stopped by {name}"
    assert capsys.readouterr().err == f"jaxdist.checkpoints: {what}\n"
    assert list(tmp_path.iterdir()) == []
