from collections.abc import Iterator

import openai
import pytest
from serving import Server, served


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that do not break it."""
    folder = tmp_path_factory.mktemp("server")
    with served(folder, "--metrics-compat", "vllm", "--served-model-name", "smol", "--served-model-name", "other") as one:
        yield one


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as one:
        yield one
