"""Folders in Hugging Face's layout: what is read, and every way in which one can be broken."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from octavo.errors import CheckpointError
from octavo.loading import open_checkpoint
from octavo.loading import safetensors as module
from octavo.loading.safetensors import INDEX, SafetensorsCheckpoint

WEIGHTS = {
    "a": torch.arange(12.0).reshape(4, 3),
    "b": torch.arange(5.0, dtype=torch.float64),
    "c": (torch.arange(8.0) / 7).to(torch.bfloat16).reshape(2, 2, 2),
    "d": torch.tensor(2.5, dtype=torch.float16),
    "e": torch.zeros(0, 4),
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 3}))
    return tmp_path


@pytest.fixture
def single(folder):
    save_file(WEIGHTS, folder / "model.safetensors")
    return folder


@pytest.fixture
def sharded(folder):
    """`a` and `b` in the first shard, the others in the second."""
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    save_file({name: WEIGHTS[name] for name in "ab"}, folder / first)
    save_file({name: WEIGHTS[name] for name in "cde"}, folder / second)
    write_index(folder, {name: first if name in "ab" else second for name in WEIGHTS})
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def assert_holds_the_weights(checkpoint, dtype=torch.float32):
    assert checkpoint.names() == set(WEIGHTS)
    for name, weight in WEIGHTS.items():
        out = torch.full(weight.shape, float("nan"), dtype=dtype)
        checkpoint.read(name, out)
        assert torch.equal(out, weight.to(dtype)), name
        assert checkpoint.shape(name) == tuple(weight.shape)
        assert checkpoint.dtype(name) == weight.dtype


class TestReading:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    def test_every_type_into_every_type(self, single, dtype):
        assert_holds_the_weights(SafetensorsCheckpoint(single), dtype)

    @pytest.mark.parametrize("chunk_bytes", [1, 24, 25, 10_000])
    def test_row_ranges(self, single, monkeypatch, chunk_bytes):
        monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
        assert_holds_the_weights(SafetensorsCheckpoint(single))

    def test_into_a_strided_parameter(self, single):
        out = torch.nn.Parameter(torch.zeros(3, 4)).t()
        SafetensorsCheckpoint(single).read("a", out)
        assert torch.equal(out, WEIGHTS["a"])

    def test_shards(self, sharded):
        assert_holds_the_weights(SafetensorsCheckpoint(sharded))

    def test_metadata(self, single):
        assert SafetensorsCheckpoint(single).generation_config == {}
        (single / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
        checkpoint = SafetensorsCheckpoint(single)
        assert checkpoint.path == single
        assert checkpoint.config["hidden_size"] == 3
        assert checkpoint.generation_config == {"eos_token_id": [1, 2]}

    def test_what_was_read_outlives_the_checkpoint(self, single):
        checkpoint = SafetensorsCheckpoint(single)
        out = torch.empty(4, 3)
        checkpoint.read("a", out)
        checkpoint.close()
        checkpoint.close()
        assert torch.equal(out, WEIGHTS["a"])
        with pytest.raises(CheckpointError, match="no tensor a"):
            checkpoint.read("a", out)

    def test_memory_stays_with_the_mapping(self, folder):
        memory = Path("/proc/self/smaps_rollup")
        if not memory.exists():
            pytest.skip("no figures of memory here")

        def anonymous() -> int:
            return next(int(line.split()[1]) * 1024 for line in memory.read_text().splitlines() if line.startswith("Anonymous:"))

        save_file({"w": torch.ones(32 * 1024, 1024, dtype=torch.bfloat16)}, folder / "model.safetensors")
        out = torch.zeros(32 * 1024, 1024)
        before = anonymous()
        SafetensorsCheckpoint(folder).read("w", out)
        assert anonymous() - before < 8 * 2**20

    def test_a_missing_name_and_a_wrong_shape(self, single):
        checkpoint = SafetensorsCheckpoint(single)
        for ask in (checkpoint.shape, checkpoint.dtype, lambda name: checkpoint.read(name, torch.empty(1))):
            with pytest.raises(CheckpointError, match=r"no tensor lm_head\.weight"):
                ask("lm_head.weight")
        with pytest.raises(CheckpointError, match=r"a has shape \[4, 3\], and the model's is \[3, 4\]"):
            checkpoint.read("a", torch.empty(3, 4))

    def test_other_types_are_named(self, folder):
        save_file({"ids": torch.arange(3)}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"ids is stored as I64; allowed: BF16, F16, F32, F64"):
            SafetensorsCheckpoint(folder).read("ids", torch.empty(3))


class TestOnlyWhatTheIndexAssigns:
    def test_stray_files_change_nothing(self, sharded):
        zeros = {name: torch.zeros_like(weight) for name, weight in WEIGHTS.items()}
        for stray in ("consolidated.safetensors", "model.safetensors", "model-00003-of-00003.safetensors"):
            save_file(zeros | {"stray": torch.zeros(1)}, sharded / stray)
        (sharded / "broken.safetensors").write_bytes(b"garbage")
        assert_holds_the_weights(SafetensorsCheckpoint(sharded))

    def test_stray_files_beside_a_single_one_change_nothing(self, single):
        save_file({"a": torch.zeros(4, 3)}, single / "consolidated.safetensors")
        assert_holds_the_weights(SafetensorsCheckpoint(single))

    def test_unindexed_tensors_do_not_exist(self, sharded):
        index = json.loads((sharded / INDEX).read_text())["weight_map"]
        del index["a"]
        write_index(sharded, index)
        assert SafetensorsCheckpoint(sharded).names() == set("bcde")

    def test_the_index_decides_between_two_shards(self, sharded):
        save_file({name: torch.zeros_like(WEIGHTS[name]) for name in "abcde"}, sharded / "model-00001-of-00002.safetensors")
        write_index(sharded, dict.fromkeys("cde", "model-00002-of-00002.safetensors") | {"a": "model-00001-of-00002.safetensors"})
        out = torch.empty(2, 2, 2)
        SafetensorsCheckpoint(sharded).read("c", out)
        assert torch.equal(out, WEIGHTS["c"].float())

    def test_a_missing_shard_is_named(self, sharded):
        (sharded / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"missing: model-00002-of-00002\.safetensors$"):
            SafetensorsCheckpoint(sharded)

    def test_a_tensor_its_shard_lacks_is_named(self, sharded):
        index = json.loads((sharded / INDEX).read_text())["weight_map"]
        write_index(sharded, index | {"a": "model-00002-of-00002.safetensors"})
        with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: lacks the tensor a,"):
            SafetensorsCheckpoint(sharded)

    @pytest.mark.parametrize("weight_map", [None, [], {"a": 1}, {"a": ""}, {"a": "../model.safetensors"}])
    def test_an_index_without_a_map(self, single, weight_map):
        write_index(single, weight_map)
        with pytest.raises(CheckpointError, match="no weight_map"):
            SafetensorsCheckpoint(single)

    def test_without_an_index_one_file_of_any_name_will_do(self, single):
        (single / "model.safetensors").rename(single / "weights.safetensors")
        assert_holds_the_weights(SafetensorsCheckpoint(single))

    def test_without_an_index_several_files_are_refused(self, sharded):
        (sharded / INDEX).unlink()
        with pytest.raises(CheckpointError, match=r"several safetensors files \(model-00001-of.*model-00002-of"):
            SafetensorsCheckpoint(sharded)

    def test_no_file(self, folder):
        with pytest.raises(CheckpointError, match="no safetensors file"):
            SafetensorsCheckpoint(folder)


class TestDamage:
    @pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
    def test_a_truncated_file(self, single, keep):
        file = single / "model.safetensors"
        file.write_bytes(file.read_bytes()[:keep])
        with pytest.raises(CheckpointError, match=r"model\.safetensors: not a whole safetensors file"):
            SafetensorsCheckpoint(single)

    @pytest.mark.parametrize("garbage", [b"garbage" * 100, b"\xff" * 64, (20).to_bytes(8, "little") + b"{" * 20, bytes(64)])
    def test_a_garbage_header(self, single, garbage):
        (single / "model.safetensors").write_bytes(garbage)
        with pytest.raises(CheckpointError, match="not a whole safetensors file"):
            SafetensorsCheckpoint(single)

    @pytest.mark.parametrize("file", ["config.json", "generation_config.json", INDEX])
    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
    def test_bad_json(self, single, file, content):
        (single / file).write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{file}: (not a JSON file|holds no JSON object)"):
            SafetensorsCheckpoint(single)

    def test_no_config(self, single):
        (single / "config.json").unlink()
        with pytest.raises(CheckpointError, match=r"no config\.json"):
            SafetensorsCheckpoint(single)

    def test_no_model_type(self, single):
        (single / "config.json").write_text("{}")
        with pytest.raises(CheckpointError, match="model_type is missing"):
            SafetensorsCheckpoint(single)


class TestOpening:
    def test_a_folder(self, single):
        assert isinstance(open_checkpoint(single), SafetensorsCheckpoint)

    def test_an_empty_folder(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"neither a config\.json nor a \.gguf"):
            open_checkpoint(tmp_path)

    def test_a_folder_of_several_models(self, tmp_path):
        for name in ("q4.gguf", "q8.gguf"):
            (tmp_path / name).touch()
        with pytest.raises(CheckpointError, match=r"name one: q4\.gguf, q8\.gguf"):
            open_checkpoint(tmp_path)

    def test_a_path_that_is_gone(self, tmp_path):
        with pytest.raises(CheckpointError, match="no such file or folder"):
            open_checkpoint(tmp_path / "model.gguf")

    def test_another_file(self, single):
        with pytest.raises(CheckpointError, match=r"allowed: a \.gguf file, or a folder"):
            open_checkpoint(single / "model.safetensors")

    def test_a_folder_with_one_gguf(self, tmp_path):
        """A damaged one, so that its own reader is seen to refuse it by name."""
        (tmp_path / "model.gguf").write_bytes(b"garbage")
        with pytest.raises(CheckpointError, match=r"model\.gguf"):
            open_checkpoint(tmp_path)
