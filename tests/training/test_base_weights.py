"""The base of a LoRA run is known again by its digest, wherever it is."""

import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxdist import files
from jaxdist.cluster import consensus, kv_store
from jaxdist.config import Config, RequestError
from jaxdist.training.checkpoint.manager import Checkpoints
from jaxdist.training.forward.step import TrainState
from jaxdist.training.run import Run
from jaxdist.weights import pretrained
from jaxdist.weights.base import Base, NoBase, base_for, base_of
from tests.group import Group
from tests.huggingface.exported import GOLDEN, abstract, model_of, run_from

LLAMA = GOLDEN / "llama31"


def config_of(init_from: Path, run: Path) -> Config:
    model = model_of(LLAMA).model_copy(update={"lora_rank": 2})
    return Config(model=model, init_from=init_from, run_dir=run, mesh="1x1x1")


def facts_of(base: Base) -> dict:
    return {"step": 4, **base.facts()}


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(LLAMA, tmp_path / "base"))


def go_on(run: Path, best: bool = False) -> None:
    """Save a later step of the run, with other weights, beside the one that is there; or as the best one."""
    params = jax.tree.map(lambda w: jnp.zeros(w.shape, w.dtype), abstract(model_of(LLAMA)))
    count = jnp.int32(2)
    with Checkpoints(run, keep=2) as checkpoints:
        save = checkpoints.save_best if best else checkpoints.save
        save(2, TrainState(count, params, (), count, count), {"step": 2})


def test_the_digest_of_a_folder_is_that_of_its_weights_alone(folder):
    before = base_of(folder)
    (folder / "README.md").write_text("other files do not count")
    shutil.copytree(folder, folder.parent / "copy")
    assert base_of(folder.parent / "copy") == before._replace(path=folder.parent / "copy")
    file = folder / "model-00002-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert base_of(folder).digest != before.digest


def test_each_file_is_read_by_one_process_and_the_digest_is_that_of_one(folder, monkeypatch):
    alone = base_of(folder).digest
    read = []

    def counting(path):
        read.append((kv_store.process(), path.name))
        return checksum(path)

    checksum = files.checksum
    monkeypatch.setattr(files, "checksum", counting)
    monkeypatch.setattr(files, "ThreadPoolExecutor", InPlace)
    with monkeypatch.context() as patch:
        assert Group(patch, 3).run(lambda: pretrained.digest(folder)) == [alone] * 3
    assert sorted(name for _, name in read) == sorted(path.name for path in folder.glob("*.safetensors"))
    assert len({process for process, _ in read}) == 2

    def failing(path):
        raise OSError(5, "Input/output error", str(path))

    def refused():
        with pytest.raises(RequestError) as error:
            pretrained.digest(folder)
        return str(error.value)

    monkeypatch.setattr(files, "checksum", failing)
    monkeypatch.setattr(consensus, "LEADER_SPEAKS", 0)
    found = Group(monkeypatch, 3).run(refused)
    assert "cannot be read by process 1 (Input/output error); make it readable" in found[0]
    assert "process 0 has refused" in found[1]


class InPlace:
    """Does the work of a pool of threads in the thread that asks, which knows its process."""

    def __init__(self, workers):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def map(self, call, items):
        return map(call, items)


def test_a_relative_path_is_kept_as_an_absolute_one(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert base_of(Path("base")).path == folder


def test_a_run_is_a_base_by_its_latest_step_and_stays_one_when_it_goes_on(tmp_path):
    run_from(LLAMA, tmp_path / "base")
    first = base_of(tmp_path / "base")
    assert first.path == tmp_path / "base/checkpoints/1"
    go_on(tmp_path / "base")
    assert base_of(tmp_path / "base").digest != first.digest
    config = config_of(tmp_path / "base", tmp_path / "run")
    assert base_for(config, facts_of(first), resumes=True) == first
    assert base_for(config, facts_of(first)) == first


def test_a_step_that_is_the_base_is_read_through_once(tmp_path, monkeypatch):
    """For its checksums; what Orbax reads then are the arrays."""
    run_from(LLAMA, tmp_path / "base")
    read = []

    def counting(path):
        read.append(path.name)
        return checksum(path)

    checksum = files.checksum
    monkeypatch.setattr(files, "checksum", counting)
    run = Run(config_of(tmp_path / "base", tmp_path / "run"))
    with jax.set_mesh(run.mesh):
        assert jax.tree.leaves(base_of(tmp_path / "base").read(run))
    assert len(read) == sum(path.is_file() for path in (tmp_path / "base/checkpoints/1").rglob("*"))


def test_the_best_step_that_stands_in_for_the_latest_is_the_base(tmp_path):
    run_from(LLAMA, tmp_path / "base")
    go_on(tmp_path / "base", best=True)
    shutil.rmtree(tmp_path / "base/checkpoints/1")
    base = base_of(tmp_path / "base")
    assert base.path == tmp_path / "base/checkpoints/best"
    assert base_for(config_of(tmp_path / "base", tmp_path / "run"), facts_of(base)) == base


def test_a_folder_above_the_base_does_not_name_it(folder):
    recorded = base_of(folder)
    with pytest.raises(RequestError, match="is neither the folder of a run nor a checkpoint in one"):
        base_for(config_of(folder.parent, folder.parent / "run"), facts_of(recorded), resumes=True)


@pytest.mark.parametrize("resumes", [True, False])
def test_a_base_that_has_moved_is_found_where_init_from_is_now(resumes, folder):
    recorded = base_of(folder)
    new = folder.rename(folder.parent / "new")
    config = config_of(new, folder.parent / "run")
    assert base_for(config, facts_of(recorded), resumes) == recorded._replace(path=new)


def test_who_resumes_with_another_base_is_refused_although_the_first_is_there(folder):
    recorded = base_of(folder)
    config = config_of(GOLDEN / "yarn", folder.parent / "run")
    with pytest.raises(RequestError, match=rf"{folder} of digest {recorded.digest}, but {GOLDEN}/yarn has digest \w+;"):
        base_for(config, facts_of(recorded), resumes=True)
    # Other commands take nothing from there: the base is still where it was.
    assert base_for(config, facts_of(recorded)) == recorded


def test_a_missing_base_is_refused_with_what_to_do(folder):
    recorded = base_of(folder)
    shutil.rmtree(folder)
    run = folder.parent / "run"
    with pytest.raises(RequestError) as error:
        base_for(config_of(folder, run), facts_of(recorded))
    assert error.value.problems == [
        f"the adapters were trained beside {folder} of digest {recorded.digest}, but there is nothing at {folder}; put "
        f"the same weights back there, or resume the run with --init-from and their new place (or write it as "
        f"init_from into {run}/config.toml)"
    ]


@pytest.mark.parametrize("fact", [{}, {"base": {}}, {"base": {"path": 1, "digest": "0"}}])
def test_adapters_whose_checkpoint_names_no_base_are_refused(fact, folder):
    with pytest.raises(RequestError, match=re.escape("does not say beside which weights its adapters were trained")):
        base_for(config_of(folder, folder.parent / "run"), {"step": 4, **fact})


def test_a_run_without_adapters_has_no_base(folder):
    config = config_of(folder, folder.parent / "run")
    dense = config.model_copy(update={"model": model_of(LLAMA)})
    assert isinstance(base_for(dense, {"step": 4}), NoBase)


@pytest.mark.slow
def test_new_adapters_are_made_without_a_base_beside_them():
    """Of all that an init draws, the compiled program keeps the adapters: no weight of the base is in its memory."""
    run = Run(config_of(LLAMA, Path("run")), batch=False)
    with jax.set_mesh(run.mesh):
        compiled = jax.jit(run.engine.draw_trained).lower(jax.random.key(0)).compile()
        base = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(run.engine.abstract_frozen()))
    assert compiled.memory_analysis().temp_size_in_bytes < base
