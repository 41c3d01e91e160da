"""The script that alternates with other engines: what it makes of their lines, and its ratios, with engines that are made up."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "compare_peers.py"
LLAMA = ("llama.cpp-smollm2-135m-instruct-q4_1", "llama.cpp-smollm2-135m-q4_0")

RUN = """
case $1 in
  openvino) echo noise; echo '{"peer": "openvino-genai", "single_tokens_per_s": 70, "seconds": 50, "output_tokens_per_s": 300}' ;;
  llama) for name in instruct-q4_1 q4_0; do for count in 1 8; do
    echo "{\\"peer\\": \\"llama.cpp-smollm2-135m-$name\\", \\"sequences\\": $count, \\"decode_tokens_per_s\\": $((count * 100 + ${#name}))}"
  done; done; echo $OCTAVO_PEERS >&2 ;;
  vllm) echo "it broke" >&2; exit 3 ;;
esac
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_peers", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compare_peers", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    (tmp_path / "run.sh").write_text(RUN)
    return tmp_path


def test_lines_of_peers_are_read(script: ModuleType, scripts: Path) -> None:
    found = script.measure_peer("openvino", scripts, scripts)["openvino-genai"]
    assert found.pop("peak_bytes") > 1 << 20
    assert found == {"single_tokens_per_s": 70, "seconds": 50, "output_tokens_per_s": 300}
    found = script.measure_peer("llama", scripts, scripts)
    assert found == {LLAMA[0]: {"single_tokens_per_s": 113}, LLAMA[1]: {"single_tokens_per_s": 104}}


def test_a_peer_that_fails_or_says_nothing_is_named(script: ModuleType, scripts: Path) -> None:
    with pytest.raises(SystemExit, match=r"run\.sh vllm ended with 3:\nit broke"):
        script.measure_peer("vllm", scripts, scripts)
    with pytest.raises(SystemExit, match=f"llama: no line of {LLAMA[1]} in what"):
        script.parse("llama", json.dumps({"peer": LLAMA[0], "sequences": 1, "decode_tokens_per_s": 1}), 0)


def test_ratios_are_taken_within_a_round_against_the_best_variant(script: ModuleType) -> None:
    def made(ours: float, *theirs: float) -> dict[str, Any]:
        return {
            "octavo, GGUF": {"single_tokens_per_s": ours, "output_tokens_per_s": 600, "peak_bytes": 100},
            **{name: {"single_tokens_per_s": value} for name, value in zip(LLAMA, theirs, strict=True)},
            "openvino-genai": {"output_tokens_per_s": 500, "peak_bytes": 80},
        }

    found = {one["name"].split(",")[0]: one for one in script.ratios([made(200, 50, 100), made(90, 60, 30), made(300, 100, 300)])}
    assert set(found) == {"64 requests", "single stream", "peak memory"}
    single = found["single stream"]
    assert (single["median"], single["min"], single["max"], single["met"]) == (1.5, 1.0, 2.0, True)
    assert (found["64 requests"]["median"], found["64 requests"]["met"]) == (1.2, False)
    assert (found["peak memory"]["median"], found["peak memory"]["met"]) == (1.25, False)


def test_engines_take_turns_and_every_other_round_backwards(
    script: ModuleType, scripts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ours(name: str, *arguments: Any) -> dict[str, Any]:
        return {name: {"seconds": 25, "output_tokens_per_s": 600, "single_tokens_per_s": 140, "peak_bytes": 1 << 20, "device_busy": 0.9}}

    monkeypatch.setattr(script, "measure_ours", ours)
    monkeypatch.setattr(script, "wait_for_quiet", lambda limit, patience: 0.05)
    words = ["compare_peers", "--peers-scripts", str(scripts), "--peers-home", str(scripts), "--peers", "openvino,llama", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", words)
    script.main()
    content = json.loads(capsys.readouterr().out)
    order = [one["engine"] for one in content["measurements"]]
    assert order == ["octavo, GGUF", "openvino-genai", *LLAMA, *LLAMA, "openvino-genai", "octavo, GGUF"]
    assert content["summary"]["openvino-genai"]["output_tokens_per_s"] == {"median": 300, "min": 300, "max": 300}
    assert [one["met"] for one in content["ratios"]] == [True, True, True]


def test_what_is_wrong_is_named(
    script: ModuleType, scripts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, complaint in (
        ([str(scripts), "--peers", "openvino,magic"], "--peers: magic; allowed: openvino, vllm, llama"),
        ([str(scripts), "--rounds", "0"], "--rounds: 0; allowed"),
        ([str(scripts / "nowhere")], "has no run.sh"),
    ):
        monkeypatch.setattr(sys, "argv", ["compare_peers", "--peers-scripts", *words])
        with pytest.raises(SystemExit):
            script.main()
        assert complaint in capsys.readouterr().err
