"""Prometheus metrics: what happened to requests, counted as it happens, and the engine's own figures, read when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from octavo.core.stats import Stats
from octavo.outputs import RequestOutput

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
GAPS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)

DURATIONS = {
    "time_to_first_token": ("from arrival to the first token", "time_to_first_token"),
    "request": ("from arrival to the end", "e2e_request_latency"),
    "queue": ("from arrival to admission", "request_queue_time"),
    "prefill": ("from admission to the first token", "request_prefill_time"),
    "decode": ("from the first token to the end", "request_decode_time"),
}
"""Name, meaning, and vLLM's name."""


class Metrics:
    """One server's. compat: also under vLLM's names, labelled with the model's, which dashboards and inference gateways read."""

    def __init__(self, model: str, compat: bool = False) -> None:
        self.registry = CollectorRegistry()
        self._engine = _EngineFigures(model, compat)
        self.registry.register(self._engine)
        self._durations = {
            name: self._histograms(f"{name}_seconds", f"{theirs}_seconds", about, SECONDS, model, compat)
            for name, (about, theirs) in DURATIONS.items()
        }
        self._gaps = self._histograms(
            "inter_token_seconds", "inter_token_latency_seconds", "between two tokens of an answer", GAPS, model, compat
        )
        self._prompts = self._histograms("request_prompt_tokens", "request_prompt_tokens", "of a prompt", TOKENS, model, compat)
        self._answers = self._histograms(
            "request_generated_tokens", "request_generation_tokens", "of all answers to a request", TOKENS, model, compat
        )
        self._finished = Counter("octavo_answers_finished", "answers by finish reason", ["reason"], registry=self.registry)
        self._succeeded = (
            Counter("vllm:request_success", "answers by finish reason", ["model_name", "finished_reason"], registry=self.registry)
            if compat
            else None
        )
        self._responses = Counter("octavo_http_responses", "HTTP responses", ["route", "status"], registry=self.registry)
        self._model = model

    def _histograms(self, name: str, theirs: str, about: str, buckets: tuple[float, ...], model: str, compat: bool) -> list[Histogram]:
        found = [Histogram(f"octavo_{name}", about, buckets=buckets, registry=self.registry)]
        if compat:
            labelled = Histogram(f"vllm:{theirs}", about, ["model_name"], buckets=buckets, registry=self.registry)
            found.append(labelled.labels(model))
        return found

    def tokens(self, seconds: float, count: int) -> None:
        for histogram in self._gaps:
            for _ in range(count):
                histogram.observe(seconds / count)

    def ended(self, output: RequestOutput, num_generated: int) -> None:
        metrics = output.metrics
        admitted = next((event.time for event in metrics.events if event.kind == "admitted"), None)
        times = (metrics.arrival, admitted, metrics.first_token, metrics.finished)
        for name, (start, end) in zip(("queue", "prefill", "decode"), pairwise(times), strict=True):
            self._observe(name, start, end)
        self._observe("time_to_first_token", metrics.arrival, metrics.first_token)
        self._observe("request", metrics.arrival, metrics.finished)
        for histogram in self._prompts:
            histogram.observe(len(output.prompt_token_ids))
        for histogram in self._answers:
            histogram.observe(num_generated)
        for answer in output.outputs:
            reason = answer.finish_reason or "abort"
            self._finished.labels(reason).inc()
            if self._succeeded is not None:
                self._succeeded.labels(self._model, reason).inc()

    def responded(self, route: str, status: int) -> None:
        self._responses.labels(route, str(status)).inc()

    def text(self, stats: Stats | None, block_size: int = 0) -> bytes:
        """In Prometheus' text format. stats: None where there is no engine to ask."""
        self._engine.stats, self._engine.block_size = stats, block_size
        return generate_latest(self.registry)

    def _observe(self, name: str, start: float | None, end: float | None) -> None:
        if start is not None and end is not None:
            for histogram in self._durations[name]:
                histogram.observe(max(0.0, end - start))


class _EngineFigures:
    """What the engine counts itself."""

    def __init__(self, model: str, compat: bool) -> None:
        self.stats: Stats | None = None
        self.block_size = 0
        self._model = model
        self._compat = compat

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        if stats is None:
            return
        blocks = stats.blocks
        gauges = {
            "kv_utilization": ("used / committed blocks; 0.70 to 0.85 is healthy under load", stats.utilization),
            "kv_utilization_of_ceiling": ("used blocks / what the pool may grow to", stats.utilization_of_ceiling),
            "kv_internal_fragmentation": (
                "unused token slots of used blocks; above 0.20 the block size is wrong",
                stats.internal_fragmentation,
            ),
            "kv_allocation_p99_seconds": ("99th percentile of the time to allocate blocks", stats.allocation_p99_s),
            "kv_mapping_ratio": ("memory of block tables and index / KV memory; below 0.01", stats.block_table_ratio),
            "kv_blocks_ceiling": ("blocks that the pool may grow to", blocks.ceiling),
            "requests_running": ("sequences in the batch", stats.running),
            "requests_waiting": ("sequences that wait to be admitted", stats.waiting),
            "requests_swapped": ("sequences that are swapped out", stats.swapped),
        }
        for name, (about, value) in gauges.items():
            yield GaugeMetricFamily(f"octavo_{name}", about, value)
        kinds = GaugeMetricFamily("octavo_kv_blocks", "committed blocks", labels=["state"])
        for state in ("free", "cached", "used"):
            kinds.add_metric([state], getattr(blocks, state))
        yield kinds
        preemptions = CounterMetricFamily("octavo_preemptions", "sequences that gave way", labels=["kind"])
        preemptions.add_metric(["recompute"], stats.preemptions - stats.swap_outs)
        preemptions.add_metric(["swap"], stats.swap_outs)
        yield preemptions
        counters = {
            "prompt_tokens": ("of admitted requests", stats.prompt_tokens),
            "cached_prompt_tokens": ("of them, shared instead of computed", stats.cached_tokens),
            "generated_tokens": ("all of them", stats.generated_tokens),
            "recomputed_tokens": ("computed again after a preemption", stats.recomputed_tokens),
            "evicted_blocks": ("cached blocks that were forgotten", stats.evicted_blocks),
            "steps": ("steps of the engine", stats.steps),
        }
        for name, (about, value) in counters.items():
            yield CounterMetricFamily(f"octavo_{name}", about, value)
        for name, seconds in stats.seconds.items():
            yield CounterMetricFamily(f"octavo_{name}_seconds", f"time spent in `{name}`", seconds)
        if self._compat:
            yield from self._theirs(stats)

    def _theirs(self, stats: Stats) -> Iterator[Metric]:
        label, model = ["model_name"], [self._model]
        for name, value in {
            "num_requests_running": stats.running,
            "num_requests_waiting": stats.waiting + stats.swapped,
            "kv_cache_usage_perc": stats.utilization_of_ceiling,
        }.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", "by vLLM's name", labels=label)
            gauge.add_metric(model, value)
            yield gauge
        for name, value in {
            "num_preemptions": stats.preemptions,
            "prompt_tokens": stats.prompt_tokens,
            "generation_tokens": stats.generated_tokens,
            "prefix_cache_queries": stats.prompt_tokens,
            "prefix_cache_hits": stats.cached_tokens,
        }.items():
            counter = CounterMetricFamily(f"vllm:{name}", "by vLLM's name", labels=label)
            counter.add_metric(model, value)
            yield counter
        info = InfoMetricFamily("vllm:cache_config", "of the KV cache")
        info.add_metric([], {"block_size": str(self.block_size), "num_gpu_blocks": str(stats.blocks.ceiling)})
        yield info
