"""Reading traces: what the real files hold, equal tokens for equal identities, and the share that an endless cache would have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.bench import traces
from octavo.bench.traces import TracedRequest, ideal_share, load
from octavo.errors import InvalidValueError, OctavoError


def lengths(requests: list[TracedRequest]) -> tuple[int, int, int]:
    return len(requests), sum(len(request.prompt) for request in requests), sum(len(request.answer) for request in requests)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("azure-conv", (19_366, 22_361_870, 4_088_665)),
        ("azure-code", (8_819, 18_059_974, 245_896)),
        ("vidur", (2_000, 5_122_080, 608_502)),
        ("mooncake-scaled", (500, 299_078, 21_858)),
    ],
)
def test_the_files_hold_what_their_publishers_say(data: Path, name: str, expected: tuple[int, int, int]) -> None:
    assert lengths(load(name, data)) == expected


@pytest.mark.parametrize("name", traces.DATASETS)
def test_every_request_has_a_prompt_and_an_answer_that_an_index_can_hold(data: Path, name: str) -> None:
    requests = load(name, data, 100)
    assert len(requests) == 100
    for request in requests:
        assert request.prompt
        assert request.answer
        assert 0 <= min(request.prompt + request.answer) <= max(request.prompt + request.answer) < 2**31


@pytest.mark.parametrize("name", ["azure-conv", "azure-code", "vidur"])
def test_where_only_lengths_are_known_nothing_is_shared(data: Path, name: str) -> None:
    assert ideal_share(load(name, data, 50), 1) == 0


def test_equal_identities_are_equal_tokens(data: Path) -> None:
    first, second, third, *_ = load("mooncake", data)
    assert first.prompt[:512] == second.prompt[:512] == third.prompt[:512]
    assert first.prompt[512:1024] != second.prompt[512:1024]
    assert len(first.prompt) == 6758  # thirteen blocks and part of another
    assert not set(first.answer) & set(second.answer)


def test_an_agents_next_turn_begins_with_its_last_and_the_answer(data: Path) -> None:
    requests = load("tau-bench", data)
    first, second = requests[0], requests[50]
    assert len(requests) == 642
    begun = first.prompt + first.answer
    assert second.prompt[: len(begun)] == begun
    assert len(second.prompt) > len(begun)
    assert 0.9 < ideal_share(requests, 16) < 0.99


def write(folder: Path, name: str, text: str) -> None:
    path = folder / traces.find(name).file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, newline="")


def test_the_last_block_is_cut_to_the_prompt(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 40, "output_length": 2, "hash_ids": [7, 3]},
        {"timestamp": 1, "input_length": 64, "output_length": 1, "hash_ids": [7, 9]},
    ]
    write(tmp_path, "mooncake-scaled", "".join(json.dumps(row) + "\n" for row in rows))
    first, second = load("mooncake-scaled", tmp_path)
    assert first == TracedRequest([7] * 32 + [3] * 8, [10, 10])
    assert second == TracedRequest([7] * 32 + [9] * 32, [11])


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "azure-conv", "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,3,2\r\nlater,1,4")
    monkeypatch.setenv("OCTAVO_DATA", str(tmp_path))
    assert load("azure-conv") == [TracedRequest([0, 0, 0], [0, 0]), TracedRequest([1], [1, 1, 1, 1])]
    assert len(load("azure-conv", count=1)) == 1


@pytest.mark.parametrize("name", traces.DATASETS)
def test_a_missing_file_is_refused_with_its_origin(tmp_path: Path, name: str) -> None:
    with pytest.raises(OctavoError, match=r"is not there; .* comes from https://github.com/\S+ \(.*OCTAVO_DATA"):
        load(name, tmp_path)


def test_an_unknown_data_set_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidValueError, match="dataset: 'azure'; allowed: azure-conv, azure-code, vidur"):
        load("azure")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("azure-conv", "a,b\n1,2\n"),
        ("vidur", "num_prefill_tokens,num_decode_tokens\n1,many\n"),
        ("mooncake", '{"input_length": 600, "output_length": 1, "hash_ids": [1]}\n'),
        ("tau-bench", "no json\n"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, name: str, text: str) -> None:
    write(tmp_path, name, text)
    with pytest.raises(InvalidValueError, match=f"not in the form of {name}"):
        load(name, tmp_path)


def test_the_ideal_share_of_a_hand_made_trace() -> None:
    requests = [
        TracedRequest([1, 2, 3, 4, 5], [6, 7]),  # leaves 1 to 6: the answer's last token is never computed
        TracedRequest([1, 2, 3, 4, 5, 6, 9], [8]),  # shares them all
        TracedRequest([1, 2, 3, 4], [8]),  # its last token is computed, so only the first block is shared
        TracedRequest([9, 2, 3, 4], [8]),  # its second block is known, after another first one
    ]
    assert ideal_share(requests, 2) == (6 + 2) / 20
    assert ideal_share(requests, 4) == 4 / 20
    assert ideal_share([], 4) == 0
