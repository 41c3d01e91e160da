"""What curl sees: statuses, headers, ends of requests, figures."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from pydantic import ValidationError
from serving import Server, served

from octavo import LLM, SamplingParams
from octavo.server.protocol import CompletionRequest

LONG = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


def events(response: httpx.Response) -> list[Any]:
    return [json.loads(line[6:]) if line != "data: [DONE]" else None for line in response.text.splitlines() if line.startswith("data: ")]


def test_who_and_whether(server: Server):
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/ready").json() == {"status": "ready"}
    assert server.get("/version").json()["version"]
    assert server.get("/nothing").json()["error"]["type"] == "not_found_error"
    assert server.get("/v1/completions").status_code == 405


def test_tokens_and_back(server: Server):
    found = server.post("/tokenize", {"prompt": "Hello world", "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == 2
    assert found["token_strs"] == ["Hello", " world"]
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "Hello world"}
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}).json()
    text = server.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"]
    assert text.count("<|im_start|>user") == 1
    assert server.post("/tokenize", {}).status_code == 400


def test_ids_in_headers(server: Server):
    answer = server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1}, headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.json()["id"] == "cmpl-mine-1"
    answer = server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1, "request_id": "mine-2"}, headers={"X-Request-Id": "x"})
    assert answer.headers["x-request-id"] == "mine-2"
    assert len({server.get("/health").headers["x-request-id"] for _ in range(3)}) == 3


REFUSED = {
    "no prompt": ({}, "prompt: it is missing"),
    "an empty prompt": ({"prompt": ""}, "prompt"),
    "empty prompts": ({"prompt": [""]}, "prompt"),
    "no prompts": ({"prompt": []}, "prompt"),
    "too long": ({"prompt": [1] * 5000}, "5000 tokens; allowed: 2047"),
    "no token": ({"prompt": [10**9]}, "1000000000"),
    "an unknown field": ({"prompt": "Hi", "foo": 1}, "foo"),
    "best_of": ({"prompt": "Hi", "best_of": 2}, "best_of: 2; not supported"),
    "a text for a number": ({"prompt": "Hi", "n": "2"}, "n: '2'"),
    "out of range": ({"prompt": "Hi", "top_p": 0}, "top_p: 0"),
    "logprobs": ({"prompt": "Hi", "logprobs": 10**6}, "logprobs"),
    "no tokens": ({"prompt": "Hi", "max_tokens": 0}, "max_tokens: 0"),
    "options without a stream": ({"prompt": "Hi", "stream_options": {}}, "stream_options"),
    "a path": ({"prompt": "Hi", "logits_processors": ["os:system"]}, "logits_processors"),
    "a schema": ({"prompt": "Hi", "structured_outputs": {"json": {"type": "strin"}}}, "structured_outputs.json"),
    "half a character": ('{"prompt": "\\ud800"}', "prompt"),
    "no JSON": ("{", "not JSON"),
    "a number too large": ('{"prompt": "Hi", "n": 1' + "0" * 5000 + "}", ""),
    "not a number": ('{"prompt": "Hi", "temperature": NaN}', "temperature"),
    "deep": ('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", ""),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_a_400_that_says_so(server: Server, case: str):
    body, said = REFUSED[case]
    content = body if isinstance(body, str) else json.dumps(body)
    answer = server.client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 1000


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages"),
        ([{"role": "robot", "content": "Hi"}], "role"),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], "messages[0].content"),
    ],
)
def test_wrong_conversations(server: Server, messages: list[Any], said: str):
    answer = server.post("/v1/chat/completions", {"messages": messages})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_documents_are_refused_where_the_template_knows_of_none(server: Server):
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "documents": [{"text": "Cats purr."}]})
    assert answer.status_code == 400
    assert "documents: given; the model's chat template knows of none" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks(server: Server, stream: bool):
    place = urlsplit(server.url)
    body = json.dumps(LONG | {"stream": stream, "request_id": f"left-{stream}"})
    with socket.create_connection((place.hostname, place.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        server.wait_running()
    began = server.stats()["steps"]
    assert server.wait_idle()["steps"] - began <= 5
    # The id can be used again.
    assert server.post("/v1/completions", LONG | {"max_tokens": 1, "request_id": f"left-{stream}"}).status_code == 200


def test_an_id_is_one_requests(server: Server):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.post, "/v1/completions", LONG | {"request_id": "same"})
        server.wait_running()
        assert server.post("/v1/completions", {"prompt": "Hi", "request_id": "same"}).status_code == 400
        assert server.client.delete("/v1/requests/cmpl-same").json() == {"id": "cmpl-same", "aborted": True}
        answer = first.result().json()
    assert answer["choices"][0]["finish_reason"] == "abort"
    assert 0 < answer["usage"]["completion_tokens"] < 1500
    assert server.client.delete("/v1/requests/same").status_code == 404


def test_only_a_calls_own_names_end_it(server: Server):
    """A3: neither what ends like its id, nor an id that is over, ends a live call."""
    assert server.post("/v1/completions", LONG | {"max_tokens": 1, "request_id": "7"}).status_code == 200
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.post, "/v1/completions", LONG | {"request_id": "1", "max_tokens": 100})
        server.wait_running()
        for name in ("job-1", "chatcmpl-1", "cmpl-7", "7", "-1", ""):
            assert server.client.delete(f"/v1/requests/{name}").status_code in (404, 405)
        assert first.result().json()["choices"][0]["finish_reason"] == "length"
    with ThreadPoolExecutor(1) as pool:  # the id again: what was said to its predecessor has no effect
        second = pool.submit(server.post, "/v1/completions", LONG | {"request_id": "1", "max_tokens": 20})
        assert second.result().json()["usage"]["completion_tokens"] == 20


def test_an_aborted_echo_has_no_less_than_no_tokens(server: Server):
    """A6."""
    asked = {"prompt": [5] * 2000, "echo": True, "max_tokens": 0, "logprobs": 1, "request_id": "scored"}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/v1/completions", asked)
        server.wait_running()
        assert server.client.delete("/v1/requests/scored").status_code == 200
        assert answer.result().json()["usage"]["completion_tokens"] == 0
    whole = server.post("/v1/completions", {"prompt": "Hello world", "echo": True, "max_tokens": 0, "logprobs": 1}).json()
    assert whole["choices"][0]["text"] == "Hello world"
    assert whole["choices"][0]["logprobs"]["token_logprobs"][0] is None
    assert whole["choices"][0]["logprobs"]["token_logprobs"][1] < 0
    assert whole["usage"]["completion_tokens"] == 0


def test_usage_and_reasons_in_a_stream(server: Server):
    """A8."""
    asked = {"prompt": "Once upon a time", "max_tokens": 5, "ignore_eos": True, "stream": True}
    for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
        *chunks, done = events(server.post("/v1/completions", asked | options))
        assert done is None
        assert all("usage" not in chunk for chunk in chunks)
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    *chunks, last, _ = events(server.post("/v1/completions", asked | {"stream_options": {"include_usage": True}}))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    *chunks, _ = events(server.post("/v1/completions", asked | {"stream_options": {"continuous_usage_stats": True}}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert chunks[-1]["choices"]


def test_a_chat_over_http_reads_what_an_offline_one_does(server: Server, smollm2_gguf: Path):
    """A10. The template writes what begins a text, and nothing else does."""
    messages = [{"role": "user", "content": "Hi"}]
    asked = {"messages": messages, "max_tokens": 3, "return_token_ids": True}
    whole = server.post("/v1/chat/completions", asked).json()
    with LLM(smollm2_gguf, max_model_len=512, prealloc_blocks=32) as llm:
        (offline,) = llm.chat(messages, SamplingParams(max_tokens=1))
    assert whole["prompt_token_ids"] == offline.prompt_token_ids
    assert whole["prompt_token_ids"][:2] != [whole["prompt_token_ids"][0]] * 2
    first, *others, _ = events(server.post("/v1/chat/completions", asked | {"stream": True, "prompt_logprobs": 1}))
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert len(first["prompt_logprobs"]) == len(first["prompt_token_ids"])
    assert all("prompt_token_ids" not in chunk and "prompt_logprobs" not in chunk for chunk in others)


@pytest.mark.parametrize("small", [{"temperature": 1e-4}, {"temperature": 1.0, "top_p": 1e-4}, {"temperature": 1e-4, "top_p": 1e-4}])
def test_what_is_next_to_nothing_leaves_the_likeliest(server: Server, small: dict[str, float]):
    """S1. (S2, which tokens top_p keeps, is shown where the probabilities can be given: in the sampler's tests.)"""
    asked = {"prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True}
    greedy = server.post("/v1/completions", asked | {"temperature": 0}).json()["choices"][0]["text"]
    assert server.post("/v1/completions", asked | small).json()["choices"][0]["text"] == greedy


def test_more_logprobs_than_the_vocabulary_has(server: Server):
    """S4."""
    chat = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 49153}
    for answer in (server.post("/v1/chat/completions", chat), server.post("/v1/completions", {"prompt": "Hi", "logprobs": 49153})):
        assert answer.status_code == 400
        assert "49153" in answer.json()["error"]["message"]


def test_at_least_so_many_tokens_before_the_end(server: Server):
    """S7: whatever the prompt's length, and however the end is wished for."""
    (end,) = server.post("/tokenize", {"prompt": "<|im_end|>"}).json()["tokens"]
    for prompt in ("Hi", "Once upon a time, in a land far away, there lived a king"):
        asked = {"prompt": prompt, "min_tokens": 4, "max_tokens": 10, "logit_bias": {str(end): 100}, "return_token_ids": True}
        (choice,) = server.post("/v1/completions", asked).json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["token_ids"].index(end) == 4


def test_scores_are_numbers_where_tokens_are_cut_off(server: Server):
    """S9: JSON knows neither infinities nor NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    asked = {"prompt": "Once upon a time", "max_tokens": 4, "top_p": 0.1, "logprobs": 5, "allowed_token_ids": [1000, 2000]}
    answer = server.post("/v1/completions", asked)
    assert answer.status_code == 200
    (choice,) = json.loads(answer.text, parse_constant=refuse)["choices"]
    assert all(isinstance(score, float) for score in choice["logprobs"]["token_logprobs"])


def test_labels_are_logged_and_what_clients_repeat_is_read(server: Server):
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "call_1", "content": "A cat."})
    asked = {"messages": messages, "max_tokens": 1, "user": "somebody " * 100, "request_id": "labelled"}
    assert server.post("/v1/chat/completions", asked).status_code == 200
    time.sleep(0.1)
    (line,) = [line for line in server.log.read_text().splitlines() if "id=labelled" in line]
    assert "somebody somebody" in line
    assert line.count("somebody") < 20


def test_a_conversation_too_long_names_the_messages(server: Server):
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 3000}]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert "2047" in error["message"]


def test_answers_of_a_call_are_bounded(server: Server):
    answer = server.post("/v1/completions", {"prompt": ["Hi"] * 100, "n": 11})
    assert answer.status_code == 400
    assert "n: 11, for 100 prompts; allowed: 1024 answers" in answer.json()["error"]["message"]


HUGE = {
    "prompts": {"prompt": [None] * 500_000},
    "lists": {"prompt": [[None]] * 500_000},
    "stops": {"prompt": "Hi", "stop": [1] * 500_000},
    "fields": {"prompt": "Hi"} | {f"field_{place}": 1 for place in range(200_000)},
    "biases": {"prompt": "Hi", "logit_bias": {str(place): "x" for place in range(200_000)}},
}


@pytest.mark.parametrize("case", HUGE)
def test_a_large_body_of_wrong_elements_is_one_error(server: Server, case: str):
    """Were each an error of its own, such a body would hold the event loop for a minute and more."""
    with pytest.raises(ValidationError) as error:
        CompletionRequest.model_validate(HUGE[case])
    assert error.value.error_count() <= 4  # one for each alternative of a union
    assert server.post("/v1/completions", HUGE[case]).status_code == 400


def test_deadlines(server: Server):
    answer = server.post("/v1/completions", LONG | {"timeout_ms": 0.001})
    assert answer.status_code == 408
    answer = server.post("/v1/completions", LONG | {"timeout_ms": 0.001, "stream": True})
    assert answer.status_code == 408
    answer = server.post("/v1/completions", LONG | {"timeout_ms": 700, "stream": True})
    assert answer.status_code == 200
    *chunks, error, done = events(answer)
    assert done is None
    assert error["error"]["code"] == "timeout"
    assert all("error" not in chunk for chunk in chunks)
    answer = server.post("/v1/completions", LONG | {"timeout_ms": 700}).json()
    assert answer["choices"][0]["finish_reason"] == "timeout"
    server.wait_idle()


def test_metrics_count(server: Server):
    def value(name: str) -> float:
        lines = server.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and line[len(name)] in " {")

    before = value("octavo_generated_tokens_total"), value("octavo_time_to_first_token_seconds_count")
    server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 7, "ignore_eos": True, "n": 2})
    assert value("octavo_generated_tokens_total") == before[0] + 14
    assert value("octavo_time_to_first_token_seconds_count") == before[1] + 1
    for name in (
        "octavo_kv_utilization",
        "octavo_kv_internal_fragmentation",
        "octavo_kv_allocation_p99_seconds",
        "octavo_kv_mapping_ratio",
    ):
        assert 0 <= value(name) < 1
    assert value("vllm:num_requests_running") == value("vllm:num_requests_waiting") == 0
    assert value("vllm:generation_tokens_total") == value("octavo_generated_tokens_total")
    assert value("vllm:request_success_total") == value("octavo_answers_finished_total")


def test_the_log_tells_of_each_request(server: Server):
    server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 3, "ignore_eos": True, "request_id": "logged"})
    time.sleep(0.1)
    (line,) = [line for line in server.log.read_text().splitlines() if "id=logged" in line]
    for part in ("path=/v1/completions", "status=200", "completion_tokens=3", "finish=length"):
        assert part in line


def test_the_cache_can_be_reset(server: Server):
    asked = {"prompt": "The cache can be reset by whoever asks for it, and then it begins from nothing again.", "max_tokens": 1}
    server.post("/v1/completions", asked)
    assert server.post("/v1/completions", asked).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
    assert server.post("/reset_prefix_cache").json()["blocks"] > 0
    assert server.post("/v1/completions", asked).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_advice_on_a_live_server(server: Server):
    server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 30})
    ran = subprocess.run([sys.executable, "-m", "octavo", "advise", "--url", f"{server.url}/v1", "--json"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert {line["severity"] for line in json.loads(ran.stdout)} <= {"change", "consider", "fine"}
    ran = subprocess.run([sys.executable, "-m", "octavo", "advise", "--url", "http://127.0.0.1:9"], capture_output=True, text=True)
    assert ran.returncode == 2
    assert "http://127.0.0.1:9/record" in ran.stderr


def test_keys_limits_and_overload(tmp_path: Path):
    flags = [
        "--api-key",
        "secret",
        "--api-key",
        "other",
        "--max-waiting",
        "2",
        "--max-batch-size",
        "1",
        "--max-body-bytes",
        "5000",
        "--json-log",
    ]
    with served(tmp_path, *flags, "--cors-origin", "https://page.example") as server:
        assert server.get("/v1/models").status_code == 401
        assert server.get("/stats", headers={"Authorization": "Bearer wrong"}).json()["error"]["code"] == "invalid_api_key"
        server.client.headers["Authorization"] = "Bearer other"
        assert server.get("/v1/models").status_code == 200
        assert server.post("/v1/completions", {"prompt": "x" * 6000}).status_code == 413
        chunks = (b"x" * 1000 for _ in range(20))
        assert server.client.post("/v1/completions", content=chunks).status_code == 413
        preflight = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
        answer = server.client.options("/v1/completions", headers=preflight)
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        with ThreadPoolExecutor(3) as pool:
            first = [pool.submit(server.post, "/v1/completions", LONG | {"request_id": "a0"})]
            server.wait_running()
            first += [pool.submit(server.post, "/v1/completions", LONG | {"request_id": f"a{place}"}) for place in (1, 2)]
            while server.stats()["waiting"] < 2:
                time.sleep(0.01)
            answer = server.post("/v1/completions", {"prompt": "Hi"})
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            for place in range(3):
                assert server.client.delete(f"/v1/requests/a{place}").status_code == 200
            assert [one.result().status_code for one in first] == [200] * 3
        server.wait_idle()
        lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
        assert {line["status"] for line in lines} >= {200, 401, 413, 429}
        assert "secret" not in server.log.read_text()


def test_a_signal_drains(tmp_path: Path):
    with served(tmp_path, "--drain-seconds", "60") as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, "/v1/completions", LONG | {"max_tokens": 300})
        server.wait_running()
        server.process.send_signal(signal.SIGTERM)
        while server.get("/ready").status_code == 200:
            time.sleep(0.01)
        assert server.get("/health").status_code == 200
        answer = server.post("/v1/completions", {"prompt": "Hi"})
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert running.result().json()["usage"]["completion_tokens"] == 300
        assert server.process.wait(20) == 0


def test_what_is_left_after_the_drain_is_aborted(tmp_path: Path):
    with served(tmp_path, "--drain-seconds", "0.2") as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, "/v1/completions", LONG | {"stream": True})
        server.wait_running()
        server.process.send_signal(signal.SIGTERM)
        *_, last, done = events(running.result())
        assert last["choices"][0]["finish_reason"] == "abort"
        assert done is None
        assert server.process.wait(20) == 0


def test_a_model_that_is_not_there(tmp_path: Path):
    ran = subprocess.run([sys.executable, "-m", "octavo", "serve", str(tmp_path / "none.gguf")], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert "none.gguf" in ran.stderr
    assert "Traceback" not in ran.stderr
