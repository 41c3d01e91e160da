"""Other people's tests and tools: the official client's own tests, langchain, schemathesis."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest
from serving import Server, served


def test_the_official_clients_own_tests(tmp_path: Path):
    """From its source distribution, as the wheel leaves them out."""
    wanted = f"openai=={version('openai')}"
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "openai", wanted]
    subprocess.run([*fetch, "-d", str(tmp_path)], check=True, capture_output=True, timeout=300)
    (archive,) = tmp_path.glob("openai-*.tar.gz")
    with tarfile.open(archive) as content:
        content.extractall(tmp_path, filter="data")
    (folder,) = (path for path in tmp_path.glob("openai-*") if path.is_dir())
    tests = [f"tests/api_resources/{name}.py" for name in ("chat/test_completions", "test_completions", "test_models")]
    chosen = "(create and not all_params) or (Models and list)"
    with served(tmp_path / "server", "--any-model-name", "--max-model-len", "96") as server:
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-k", chosen, *tests],
            cwd=folder,
            env=os.environ | {"TEST_API_BASE_URL": f"{server.url}/v1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
    last = ran.stdout.rstrip().splitlines()[-1]
    print(last)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert int(last.split(" passed")[0].split()[-1]) >= 20


def test_langchain(server: Server):
    langchain_openai = pytest.importorskip("langchain_openai")
    from pydantic import BaseModel

    class City(BaseModel):
        """A city and its country"""

        name: str
        country: str

    def get_weather(city: str) -> str:
        """Tell the weather of a city."""
        return f"Sunny in {city}"

    model = langchain_openai.ChatOpenAI(model="smol", base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=120)
    answer = model.invoke("Name the capital of France.")
    assert "Paris" in answer.content
    assert answer.usage_metadata["output_tokens"] > 0
    streamed = list(model.stream("Name the capital of France."))
    assert "".join(chunk.content for chunk in streamed) == answer.content
    called = model.bind_tools([get_weather], tool_choice="get_weather").invoke("What is the weather in Paris?")
    assert [call["name"] for call in called.tool_calls] == ["get_weather"]
    assert isinstance(called.tool_calls[0]["args"]["city"], str)
    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(City, method=method).invoke("Paris is the capital of France.")
        assert isinstance(found, City), method


def test_schemathesis_finds_nothing(tmp_path: Path):
    """What the document promises holds, and what it does not allow is refused."""
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    # Chats without a limit go on to the end of the context, so it is a short one.
    with served(tmp_path / "server", "--max-model-len", "96") as server:
        run_schemathesis(server, tmp_path)


def run_schemathesis(server: Server, tmp_path: Path) -> None:
    command = [Path(sys.executable).with_name("schemathesis"), "--config-file", tmp_path / "schemathesis.toml", "run"]
    ran = subprocess.run(
        [*command, f"{server.url}/openapi.json", "--max-examples", os.environ.get("OCTAVO_SCHEMATHESIS_EXAMPLES", "15"), "--seed", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2}).status_code == 200


CONFIG = """
[checks.positive_data_acceptance]
# A request that fits its schema may still be too long for the model, or name a token that it lacks.
expected-statuses = ["2xx", "400", "404", "408", "413", "429"]
"""
