"""A folder of Hugging Face is opened: which file holds which tensor, and what is wrong with a folder."""

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from jaxdist.config import RequestError
from jaxdist.huggingface.folder import is_folder, layers_left_out, open_config, open_folder, twofold
from jaxdist.huggingface.tensor_checks import check_tensors
from tests.huggingface.folders import model_of, tensors_of

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def folder(tmp_path):
    """A copy of a folder in two shards."""
    return Path(shutil.copytree(GOLDEN / "llama31", tmp_path / "llama31"))


def refusal(path):
    with pytest.raises(RequestError) as refused:
        open_folder(path)
    return refused.value.problems


def test_the_index_gives_the_file_of_each_tensor(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    opened = open_folder(folder)
    assert opened.files == {name: folder / file for name, file in index["weight_map"].items()}
    assert len(set(opened.files.values())) == 2
    assert opened.config["model_type"] == "llama"


def test_the_header_gives_the_tensors_of_a_single_file():
    files = open_folder(GOLDEN / "gpt2").files
    assert set(files.values()) == {GOLDEN / "gpt2" / "model.safetensors"}
    assert "transformer.h.1.mlp.c_fc.weight" in files


def test_a_single_file_counts_and_not_the_index_beside_it(folder):
    """As in transformers."""
    assert twofold(folder) == ""
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model.safetensors")
    files = open_folder(folder).files
    assert set(files.values()) == {folder / "model.safetensors"}
    assert "the weights are those of model.safetensors, as in transformers" in twofold(folder)


def test_layers_of_multi_token_prediction_are_left_out_with_a_sentence(tmp_path):
    folder = tmp_path / "deepseek"
    shutil.copytree(GOLDEN / "deepseek_v3", folder)
    assert layers_left_out(folder) == ""
    tensors = tensors_of(folder)
    model = model_of(folder)
    assert model.layers == 3
    save_file(tensors | {"model.layers.3.eh_proj.weight": tensors["model.norm.weight"]}, folder / "model.safetensors")
    assert "multi-token prediction behind its 3 layers, which are not read" in layers_left_out(folder)
    check_tensors(open_folder(folder), model)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_a_last_layer_is_not_taken_for_one_of_multi_token_prediction(name, tmp_path):
    """It is where config.json names one layer less, and none that predicts further tokens."""
    folder = tmp_path / name
    shutil.copytree(GOLDEN / name, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": config["num_hidden_layers"] - 1}
    config.pop("num_nextn_predict_layers", None)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match=r"holds tensors that this model does not use: model\.layers\."):
        check_tensors(open_folder(folder), model_of(folder))


def test_the_links_of_the_cache_are_followed(folder, tmp_path):
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in folder.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert is_folder(snapshot)
    assert open_folder(snapshot).files.keys() == open_folder(folder).files.keys()


def test_config_json_alone_is_enough_for_predictions(folder, tmp_path):
    (tmp_path / "alone").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "alone")
    assert open_config(tmp_path / "alone").config == open_config(folder).config
    assert "has a config.json, but no weights" in refusal(tmp_path / "alone")[0]


@pytest.mark.parametrize("name", ["config.toml", "run.json"])
def test_the_folder_of_a_run_is_none_of_hugging_face(folder, name):
    (folder / name).touch()
    assert not is_folder(folder)


def test_a_folder_without_config_json_is_refused(folder):
    (folder / "config.json").unlink()
    assert not is_folder(folder)
    assert "has no config.json" in refusal(folder)[0]


def test_what_is_no_folder_is_refused(folder):
    assert "is not a folder" in refusal(folder / "config.json")[0]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.gguf"])
def test_weights_in_another_form_are_to_be_converted(folder, name):
    for path in folder.glob("model*"):
        path.unlink()
    (folder / name).touch()
    assert f"as {name}" in refusal(folder)[0]
    assert "save_pretrained" in refusal(folder)[0]
    assert (f"M.from_pretrained('{folder}', dtype='auto')" in refusal(folder)[0]) == name.endswith(".bin")


def test_shards_without_their_index_are_refused(folder):
    (folder / "model.safetensors.index.json").unlink()
    assert "copy the index too" in refusal(folder)[0]


def test_an_absent_shard_is_named(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "names files that are not there: model-00002-of-00002.safetensors" in refusal(folder)[0]


@pytest.mark.parametrize("name", ["../other/model.safetensors", "model.bin"])
def test_an_index_that_leads_elsewhere_is_refused(folder, name):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"names '{name}', which is not a *.safetensors file beside it" in refusal(folder)[0]


def test_an_index_without_files_is_refused(folder):
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "has no weight_map" in refusal(folder)[0]


@pytest.mark.parametrize(
    ("content", "expected"), [("{", "not valid JSON"), ("[]", "not an object"), ("[" * 10**5, "JSON")]
)
def test_a_damaged_config_is_refused(folder, content, expected):
    (folder / "config.json").write_text(content)
    assert expected in refusal(folder)[0]


def test_a_pipe_in_the_place_of_a_file_is_refused(folder):
    (folder / "model.safetensors.index.json").unlink()
    os.mkfifo(folder / "model.safetensors.index.json")
    assert "cannot be read" in refusal(folder)[0]
