"""Prints, at the end of a run, which model passed what: the parity matrix."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

FEATURES = {
    "test_logits_equal_transformers_in_any_chunking": "logits",
    "test_logits_are_transformers_in_any_chunking": "logits",
    "test_greedy_text_is_transformers_in_any_company": "company",
    "test_in_every_form_a_row_never_depends_on_its_neighbours": "neighbours",
    "test_bfloat16_is_as_near_to_float32_as_in_transformers": "bfloat16",
    "test_other_precisions_stay_near": "bfloat16",
    "test_a_pass_of_few_tokens_is_recorded": "recorded",
    "test_a_conversation_longer_than_its_blocks_would_hold_without_windows": "windows",
    "test_no_disturbance_shows_where_layers_have_windows": "windows",
    "test_a_gguf_and_a_folder_of_the_same_weights_agree": "gguf",
    "test_quantized_experts_are_transformers_on_the_same_numbers": "gguf",
    "test_logits_and_greedy_text_are_transformers": "gptq, awq",
    "test_codes_run_as_they_are": "gptq, awq",
    "test_codes_in_any_company": "gptq, awq",
}
LEGEND = """\
logits: within 2e-4 of transformers in float32, in any chunks. company: greedy text equal in mixed batches, with chunks, a prefix cache,
preemption and a small pool. neighbours: the same bits alone and among others, in bfloat16, int8 and int4. bfloat16: as near to float32
as transformers. recorded: a pass that is made again gives the same bits. windows: blocks behind them are given back, unnoticed."""

_passed: dict[str, dict[str, bool]] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    feature, spec = FEATURES.get(item.originalname), getattr(item, "callspec", None)
    if report.when == "call" and feature and spec and "name" in spec.params:
        row = _passed.setdefault(str(spec.params["name"]), {})
        row[feature] = row.get(feature, True) and report.passed
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not _passed:
        return
    columns = list(dict.fromkeys(FEATURES.values()))
    wide = max(map(len, _passed))
    terminalreporter.section("parity with transformers, model by feature")
    terminalreporter.write_line(" ".join([" " * wide, *columns]))
    for name, row in _passed.items():
        cells = [{True: "yes", False: "NO", None: "."}[row.get(column)].ljust(len(column)) for column in columns]
        terminalreporter.write_line(" ".join([name.ljust(wide), *cells]).rstrip())
    terminalreporter.write_line(LEGEND)
