"""Prometheus metrics of a server, under the names that dashboards of open engines know (`vllm:*`).

Two sources: the counters of the engine core (EngineStats, read when /metrics is asked) and what the front ends see of
each request, summed over all of them (`shared_counters.py`). Observing costs a bisection, no locks: everything runs on
the event loop.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire.observe.engine_metrics import ACCEPTED_PER_POS, GAUGES, counters_of, engines_of
from quire.server.processes.shared_counters import LOST, PID, SharedCounters
from quire.types.output import ABORTED, EngineStats, RequestMetrics, RequestOutput
from quire.types.sampling import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from quire.engine.client import EngineInfo


def bounds(text: str) -> tuple[float, ...]:
    """Of a histogram's buckets, each but the last."""
    return tuple(map(float, text.split()))


# Bounds in seconds; the usual ones, and finer ones below where small models live.
LATENCY = bounds("0.005 0.01 0.025 0.05 0.1 0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960")
FIRST_TOKEN = bounds("0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560")
TOKEN_GAP = bounds("0.001 0.0025 0.005 0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80")
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ALL_ENGINES = "all"  # label of what belongs to several cores together, or to one that nobody knows
REFUSALS = ("overloaded", "queue_full", "draining", "invalid_request")  # why requests were not answered
MODES, KINDS = ("streaming", "non_streaming"), ("chat_completions", "responses", "other")
FOUND = ("tool_call", "no_tool_call")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # an engine of ours is always awake
STEP_SECONDS = bounds("0.0005 0.001 0.002 0.003 0.005 0.0075 0.01 0.015 0.02 0.03 0.05 0.075 0.1 0.15 0.25 0.5 1 2.5")
STEP_GAP = bounds("0.00001 0.00002 0.00005 0.0001 0.0002 0.0005 0.001 0.002 0.005 0.01 0.02 0.05 0.1 0.5")
BLOCK_TIMES = bounds("0.001 0.002 0.005 0.01 0.02 0.05 0.1 0.2 0.5 1 2 5 10 20 30 60 120 300 600 1200 1800")
FINISH_REASONS = ("stop", "length", "repetition", "abort", "error")


def one_two_five(limit: int) -> list[int]:
    """Bounds 1, 2, 5, 10, 20, 50, … up to `limit`."""
    bounds = [step * 10**power for power in range(len(str(limit))) for step in (1, 2, 5)]
    return [bound for bound in bounds if bound <= limit]


class Histogram:
    """cores: engine cores that are told from each other."""

    def __init__(self, counters: SharedCounters, name: str, text: str, bounds: Sequence[float], cores: int = 1) -> None:
        self.name, self.text, self.bounds = name, text, bounds
        self._counters, self._mine = counters, counters.mine
        self._size = len(bounds) + 2  # one a bucket, then the sum of the values
        self._starts = [counters.take(self._size) for _ in range(cores)]

    def observe(self, value: float, times: int = 1, core: int = 0) -> None:
        start = self._starts[core]
        self._mine[start + bisect_left(self.bounds, value)] += times
        self._mine[start + self._size - 1] += value * times

    def counts(self) -> list[float]:
        """Of each bucket, by all processes and cores."""
        return [sum(self._counters.sum(start + bucket) for start in self._starts) for bucket in range(self._size - 1)]

    def family(self, names: list[str], labels: Sequence[list[str]]) -> Metric:
        """labels: of each core."""
        family = HistogramMetricFamily(self.name, self.text, labels=names)
        for core, each in enumerate(labels):
            self.add_to(family, each, core)
        return family

    def add_to(self, family: HistogramMetricFamily, labels: list[str], core: int = 0) -> None:
        """As one of several with different labels."""
        seen, buckets, start = 0.0, [], self._starts[core]
        for slot, bound in enumerate([*map(str, map(float, self.bounds)), "+Inf"], start):
            seen += self._counters.sum(slot)
            buckets.append((bound, seen))
        family.add_metric(labels, buckets, self._counters.sum(start + self._size - 1))


class Counts:
    """How often this process has seen each of a few things: `counts[name] += 1`."""

    def __init__(self, counters: SharedCounters, names: Sequence[str]) -> None:
        self.names = names
        self._counters = counters
        self._slots = {name: counters.take(1) for name in names}

    def __getitem__(self, name: str) -> int:
        return int(self._counters.mine[self._slots[name]])

    def __setitem__(self, name: str, count: int) -> None:
        self._counters.mine[self._slots[name]] = count

    def total(self, name: str) -> int:
        """Of all processes."""
        return int(self._counters.sum(self._slots[name]))

    def each(self) -> list[int]:
        """Of each process, all names together."""
        return [int(sum(page[slot] for slot in self._slots.values())) for page in self._counters.pages]


def cache_labels(info: EngineInfo) -> dict[str, str]:
    """The KV cache as it came to be: every option of it, by the names that dashboards know where these differ."""
    config, report = info.resolved.config.cache, info.report
    return {
        **{field.name: str(getattr(config, field.name)) for field in fields(config)},
        "cache_dtype": info.resolved.kv_dtype,
        "num_gpu_blocks": str(report.num_blocks),
        "num_cpu_blocks": "0",
    }


class RequestClock:
    """Times the outputs of one request, if it is streamed. times: the engine's of it; None: it has told of none."""

    __slots__ = ("_last", "_metrics", "_streamed", "times")

    def __init__(self, metrics: Metrics, streamed: bool) -> None:
        self._metrics = metrics
        self._streamed = streamed
        self._last = 0.0
        self.times: RequestMetrics | None = None

    def tick(self, times: RequestMetrics | None) -> None:
        """An output has come, with these."""
        self.times = times
        if not self._streamed:
            return
        now = time.perf_counter()
        if self._last:
            self._metrics.token_gap.observe(now - self._last, core=core_of(times))
        self._last = now


def core_of(times: RequestMetrics | None) -> int:
    """The core that has told of a request with these, at least once."""
    return 0 if times is None else times.engine or 0


class Metrics(Collector):
    def __init__(self, model_name: str, info: EngineInfo, counters: SharedCounters) -> None:
        tokens = one_two_five(info.max_model_len)
        self._cache_labels = cache_labels(info)
        num_cores = info.resolved.config.runtime.data_parallel_size
        self._names = ["model_name", "engine"]
        self._core_labels = [[model_name, str(core)] for core in range(num_cores)]
        self._labels = self._core_labels[0] if num_cores == 1 else [model_name, ALL_ENGINES]
        self._enders = list(dict.fromkeys(engine for _, engine in (*self._core_labels, self._labels)))
        self._finished = Counts(counters, [f"{engine} {why}" for engine in self._enders for why in FINISH_REASONS])
        self._refusals = Counts(counters, REFUSALS)
        self._replays = Counts(counters, ["requests"])
        self._calls = Counts(counters, [f"{mode} {kind} {what}" for mode in MODES for kind in KINDS for what in FOUND])

        def histogram(name: str, text: str, bounds: Sequence[float]) -> Histogram:
            return Histogram(counters, name, text, bounds, num_cores)

        self.first_token = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN)
        self.token_gap = histogram("vllm:inter_token_latency_seconds", "Gap between outputs of a request.", TOKEN_GAP)
        self.token_mean = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean gap of a finished request.", TOKEN_GAP
        )
        self.whole = histogram("vllm:e2e_request_latency_seconds", "Arrival to finish.", LATENCY)
        self.queue = histogram("vllm:request_queue_time_seconds", "Arrival to first scheduled.", LATENCY)
        self.inference = histogram("vllm:request_inference_time_seconds", "First scheduled to last token.", LATENCY)
        self.prefill = histogram("vllm:request_prefill_time_seconds", "First scheduled to first token.", LATENCY)
        self.decode = histogram("vllm:request_decode_time_seconds", "First token to last token.", LATENCY)
        self.prompt_size = histogram("vllm:request_prompt_tokens", "Prompt tokens of finished requests.", tokens)
        self.answer_size = histogram("vllm:request_generation_tokens", "Generated tokens of finished requests.", tokens)
        self.longest_answer = histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of the longest of a request's answers.", tokens
        )
        self.asked_size = histogram("vllm:request_params_max_tokens", "max_tokens of finished requests.", tokens)
        self.asked_answers = histogram("vllm:request_params_n", "n of finished requests.", (1, 2, 5, 10, 20))
        self.computed_size = histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens of finished requests that no cache had.", tokens
        )
        self.step_seconds = histogram("quire:step_seconds", "Time of an engine step.", STEP_SECONDS)
        self.step_gap = histogram(
            "quire:step_gap_seconds", "Time before a step in which the device had nothing to do.", STEP_GAP
        )
        self.step_tokens = histogram("vllm:iteration_tokens_total", "Tokens of an engine step.", STEP_TOKENS)
        self.block_times: list[Histogram] = []
        if info.resolved.config.observe.kv_cache_metrics:
            self.block_times = [
                histogram("vllm:kv_block_lifetime_seconds", "From a block's taking to its eviction.", BLOCK_TIMES),
                histogram("vllm:kv_block_idle_before_evict_seconds", "Since its last use, then.", BLOCK_TIMES),
                histogram("vllm:kv_block_reuse_gap_seconds", "Between two uses of a block.", BLOCK_TIMES),
            ]
        self._histograms = [value for value in vars(self).values() if isinstance(value, Histogram)]
        self._stats = EngineStats()
        lora = info.resolved.config.lora
        self._max_loras = lora.max_loras if lora.enable_lora else 0
        self._adapter_names, self._adapters_changed = ("", ""), time.time()
        self.wait: Callable[[], float] = lambda: 0.0
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.counters = counters
        if len(counters.pages) == 1:
            ProcessCollector(registry=self._registry)

    def refuse(self, reason: str) -> None:
        """A request is not answered, for one of REFUSALS."""
        self._refusals[reason] += 1

    @property
    def total_rejected(self) -> int:
        """For want of room, by all processes."""
        return sum(self._refusals.total(reason) for reason in REFUSALS if reason != "invalid_request")

    def replay(self, count: int) -> None:
        """So many requests went on with another engine."""
        self._replays["requests"] += count

    def call_found(self, *, is_streamed: bool, kind: str, found: bool) -> None:
        """The parser of tool calls has read an answer. kind: one of KINDS."""
        self._calls[f"{MODES[0 if is_streamed else 1]} {kind} {FOUND[0 if found else 1]}"] += 1

    def end(self, reason: str, times: RequestMetrics | None = None, count: int = 1) -> None:
        """Answers have ended, for one of FINISH_REASONS. times: of their request; None: no core has told of it."""
        is_known = times is not None and times.engine is not None
        engine = self._core_labels[core_of(times)][1] if is_known else self._labels[1]
        self._finished[f"{engine} {reason}"] += count

    def num_ended(self, reason: str) -> int:
        """By all processes and cores."""
        return sum(self._finished.total(f"{engine} {reason}") for engine in self._enders)

    def finish(self, output: RequestOutput, num_tokens: int, longest: int, params: SamplingParams) -> None:
        """A request is done; `num_tokens` were generated for all its answers, `longest` for one of them at most."""
        n, max_tokens, times, core = params.n, params.max_tokens, output.metrics, core_of(output.metrics)
        self.prompt_size.observe(output.num_prompt_tokens, core=core)
        self.computed_size.observe(max(0, output.num_prompt_tokens - output.num_cached_tokens), core=core)
        self.answer_size.observe(num_tokens, core=core)
        self.longest_answer.observe(longest, core=core)
        self.asked_answers.observe(n, core=core)
        if max_tokens is not None:
            self.asked_size.observe(max_tokens, core=core)
        if times is None or times.finished_time is None:
            return
        self.whole.observe(times.finished_time - times.arrival_time, core=core)
        if times.first_token_time is None:
            return
        self.first_token.observe(times.first_token_time - times.arrival_time, core=core)
        decoding = times.finished_time - times.first_token_time
        self.decode.observe(decoding, core=core)
        if num_tokens > n:
            gap = decoding * n / (num_tokens - n)
            self.token_mean.observe(gap, core=core)
            if params.output_kind != RequestOutputKind.DELTA:  # its gaps were not seen one by one
                self.token_gap.observe(gap, num_tokens - n, core)
        if times.first_scheduled_time is not None:
            self.queue.observe(times.first_scheduled_time - times.arrival_time, core=core)
            self.prefill.observe(times.first_token_time - times.first_scheduled_time, core=core)
            self.inference.observe(times.finished_time - times.first_scheduled_time, core=core)

    def pooled(self, num_prompt_tokens: int, times: RequestMetrics) -> None:
        """A pooling request is done."""
        core = core_of(times)
        self.end("stop", times)
        self.prompt_size.observe(num_prompt_tokens, core=core)
        if times.finished_time is None:
            return
        self.whole.observe(times.finished_time - times.arrival_time, core=core)
        if times.first_scheduled_time is not None:
            self.queue.observe(times.first_scheduled_time - times.arrival_time, core=core)
            self.inference.observe(times.finished_time - times.first_scheduled_time, core=core)

    def steps(self, stats: EngineStats) -> None:
        """Those since the last call."""
        histograms = [self.step_tokens, self.step_seconds, self.step_gap, *self.block_times]
        for core, each in enumerate(stats.engines or [stats]):
            told: tuple[Sequence[float], ...] = (
                each.step_tokens, each.step_seconds, each.step_gaps,
                each.block_lifetimes, each.block_idles, each.block_gaps,
            )  # fmt: skip
            for histogram, values in zip(histograms, told, strict=False):
                for value in values:
                    histogram.observe(value, core=core)

    def render(self, stats: EngineStats) -> bytes:
        """The Prometheus text of now."""
        self._stats = stats
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        yield from self._engines(stats)
        yield from self._counted()
        wait = GaugeMetricFamily(
            "quire:queue_wait_seconds", "Predicted wait of a request that comes now.", labels=self._names
        )
        wait.add_metric(self._labels, self.wait())
        yield wait
        if self._max_loras:
            yield self._adapters(stats)
        cache = GaugeMetricFamily(
            "vllm:cache_config_info", "How the KV cache is set up.", labels=[*self._cache_labels, "engine"]
        )
        for number, each in engines_of(stats):
            blocks = {"num_gpu_blocks": str(each.num_blocks)} if each.num_blocks else {}
            cache.add_metric([*(self._cache_labels | blocks).values(), number], 1)
        yield cache
        success = CounterMetricFamily(
            "vllm:request_success", "Finished requests.", labels=[*self._names, "finished_reason"]
        )
        for engine in self._enders:
            for reason in FINISH_REASONS:
                lost = self.counters.sum(LOST) if reason == ABORTED and engine == self._labels[1] else 0
                count = self._finished.total(f"{engine} {reason}") + lost
                success.add_metric([self._labels[0], engine, reason], count)
        yield success
        for histogram in (*self._histograms, *self.block_times):
            yield histogram.family(self._names, self._core_labels)
        if len(self.counters.pages) > 1:
            yield from self._front_ends()

    def _engines(self, stats: EngineStats) -> Iterator[Metric]:
        """What the cores count, each for itself."""
        engines = [([self._labels[0], number], each) for number, each in engines_of(stats)]
        for field, (name, text) in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=self._names)
            for labels, each in engines:
                gauge.add_metric(labels, getattr(each, field))
            yield gauge
        for field, (name, text) in counters_of(stats).items():
            counter = CounterMetricFamily(name, text, labels=self._names)
            for labels, each in engines:
                counter.add_metric(labels, getattr(each, field))
            yield counter
        if stats.num_accepted_per_pos:
            accepted = CounterMetricFamily(*ACCEPTED_PER_POS, labels=[*self._names, "position"])
            for labels, each in engines:
                for place, count in enumerate(each.num_accepted_per_pos):
                    accepted.add_metric([*labels, str(place)], count)
            yield accepted
        phases = CounterMetricFamily("quire:core_seconds", "What the core's loop did.", labels=[*self._names, "phase"])
        for labels, each in engines:
            for phase, seconds in each.phase_seconds.items():
                phases.add_metric([*labels, phase], seconds)
        yield phases
        yield from self._more_of(engines)

    def _more_of(self, engines: Sequence[tuple[list[str], EngineStats]]) -> Iterator[Metric]:
        """Of the cores, with labels of their own."""
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Waiting requests: for room, or for a grammar or a slot of their adapter.",
            labels=[*self._names, "reason"],
        )
        sleep = GaugeMetricFamily(
            "vllm:engine_sleep_state", "Whether the engine sleeps.", labels=[*self._names, "sleep_state"]
        )
        source = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where their KV came from.",
            labels=[*self._names, "source"],
        )  # fmt: skip
        for labels, stats in engines:
            waiting.add_metric([*labels, "capacity"], stats.num_waiting - stats.num_deferred)
            waiting.add_metric([*labels, "deferred"], stats.num_deferred)
            for state in SLEEP_STATES:
                sleep.add_metric([*labels, state], state == SLEEP_STATES[0])
            source.add_metric([*labels, "local_compute"], stats.computed_tokens)
            source.add_metric([*labels, "local_cache_hit"], stats.cached_tokens)
            source.add_metric([*labels, "external_kv_transfer"], 0)
        yield from (waiting, sleep, source)

    def _counted(self) -> Iterator[Metric]:
        """By the front ends."""
        rejected = CounterMetricFamily(
            "quire:requests_rejected", "Requests that were not answered, by the reason.",
            labels=[*self._names, "reason"],
        )  # fmt: skip
        for reason in REFUSALS:
            rejected.add_metric([*self._labels, reason], self._refusals.total(reason))
        yield rejected
        replays = CounterMetricFamily(
            "quire:requests_replayed", "Requests that went on with another engine.", labels=self._names
        )
        replays.add_metric(self._labels, self._replays.total("requests"))
        yield replays
        calls = CounterMetricFamily(
            "vllm:tool_call_parser_invocations", "Answers in which the parser looked for tool calls.",
            labels=["model_name", "mode", "outcome", "request_type"],
        )  # fmt: skip
        for name in self._calls.names:
            mode, kind, outcome = name.split()
            if total := self._calls.total(name):
                calls.add_metric([self._labels[0], mode, outcome, kind], total)
        yield calls

    def _adapters(self, stats: EngineStats) -> Metric:
        """Who runs and waits with which, and since when."""
        names = (",".join(stats.waiting_adapters), ",".join(stats.running_adapters))
        if names != self._adapter_names:
            self._adapter_names, self._adapters_changed = names, time.time()
        family = GaugeMetricFamily(
            "vllm:lora_requests_info", "When the adapters in use last changed, and which they are.",
            labels=["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
        )  # fmt: skip
        family.add_metric([str(self._max_loras), *names], self._adapters_changed)
        return family

    def _front_ends(self) -> Iterator[Metric]:
        """Each process by itself: its answers, and what the system knows of it."""
        answers = CounterMetricFamily("quire:front_end_answers", "Finished answers by process.", labels=["front_end"])
        for number, count in enumerate(self._finished.each()):
            answers.add_metric([str(number)], count)
        yield answers
        families: dict[str, Metric] = {}
        for number, page in enumerate(self.counters.pages):
            if pid := int(page[PID]):
                for metric in ProcessCollector(pid=lambda pid=pid: pid, registry=None).collect():  # type: ignore[misc]
                    family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                    for sample in metric.samples:
                        family.add_sample(sample.name, {"front_end": str(number)}, sample.value)
        yield from families.values()
