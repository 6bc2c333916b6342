"""quire top: a running server at a glance, from its metrics: Quire's, or another's that has vLLM's names."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.cli import options
from quire.cli.http_client import Server
from quire.foundation.errors import ConfigError, InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

BARS = " ▁▂▃▄▅▆▇█"
HISTORY = 60  # intervals that are drawn
Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class TopConfig:
    url: str = "http://127.0.0.1:8000"
    """Base URL of the server (--base-url is the same)."""
    api_key: str | None = None
    """API key; QUIRE_API_KEY and OPENAI_API_KEY work too."""
    interval: float = 2.0
    """Seconds from one look to the next."""
    once: bool = False
    """Print what one interval has seen, and leave."""


@dataclass(frozen=True)
class Look:
    """The metrics of one moment; a series by its name and labels."""

    when: float
    series: Mapping[tuple[str, Labels], float]

    def sum(self, name: str, **wanted: str) -> float:
        """Over all series of the name with these labels; 0: there are none."""
        need = wanted.items()
        return sum(value for (one, labels), value in self.series.items() if one == name and need <= labels)

    def by(self, name: str, label: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for (one, labels), value in self.series.items():
            if one == name:
                key = dict(labels).get(label, "")
                found[key] = found.get(key, 0.0) + value
        return found


def run(arguments: Sequence[str]) -> int:
    values = options.parse("top", "A running server at a glance. Ctrl-C leaves.", arguments, (TopConfig,))
    config = options.section_of(TopConfig, values)
    if not 0 < config.interval < math.inf:
        raise ConfigError(f"interval must be > 0 seconds, got {config.interval}", "interval")
    server = Server(config.url, config.api_key)
    screen = Screen(str(server), take(server))
    if config.once or not sys.stdout.isatty():
        from rich.console import Console

        time.sleep(config.interval)
        Console().print(screen.draw(take(server)))
        return 0
    from rich.live import Live

    with Live(screen.waiting(), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(config.interval)
            try:
                drawn = screen.draw(take(server))
            except InputError as error:  # it may come again
                drawn = screen.missing(str(error))
            live.update(drawn, refresh=True)


def take(server: Server) -> Look:
    """Raises InputError if there is no server, or one without metrics that are known here."""
    from prometheus_client.parser import text_string_to_metric_families

    text = server.send("GET", server.root + "/metrics").read().decode("utf-8", "replace")
    series: dict[tuple[str, Labels], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series[sample.name, frozenset(sample.labels.items())] = sample.value
    if not any(name.startswith("vllm:") for name, _ in series):
        raise InputError(
            f"{server}/metrics has none of the metrics vllm:*; is statistics off (disable_log_stats)?", "url"
        )
    return Look(time.monotonic(), series)


def quantile(before: Look, now: Look, name: str, share: float) -> float | None:
    """Of what a histogram has counted between two looks, within its bucket as if spread evenly; None: nothing."""
    old, new = before.by(f"{name}_bucket", "le"), now.by(f"{name}_bucket", "le")
    counts = sorted((float(bound), count - old.get(bound, 0.0)) for bound, count in new.items())
    if not counts or counts[-1][1] <= 0:
        return None
    rank, low, below = share * counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count >= rank:
            if math.isinf(bound):
                return low
            return low + (bound - low) * ((rank - below) / (count - below) if count > below else 1.0)
        low, below = bound, count
    return None


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def sparkline(values: Sequence[float]) -> str:
    top = max(values, default=0.0)
    return "".join(BARS[round(value / top * (len(BARS) - 1)) if top else 0] for value in values)


@dataclass
class Screen:
    title: str
    last: Look
    tokens: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))

    def waiting(self) -> RenderableType:
        return f"{self.title}: looking …"

    def missing(self, why: str) -> RenderableType:
        from rich.text import Text

        return Text(f"{self.title}\n{why}", style="red")

    def draw(self, now: Look) -> RenderableType:
        """What has been since the look before."""
        from rich.panel import Panel
        from rich.table import Table

        rows = list(self._rows(now))
        self.last = now
        grid = Table.grid(padding=(0, 2))
        for name, text in rows:
            grid.add_row(f"[bold]{name}[/]", text)
        models = ", ".join(sorted(name for name in now.by("vllm:num_requests_running", "model_name") if name))
        return Panel(grid, title=f"{models}  ({self.title})", title_align="left", expand=False)

    def _rows(self, now: Look) -> Iterator[tuple[str, str]]:
        rate = self._rate(now)
        generated = rate("vllm:generation_tokens_total")
        self.tokens.append(generated)
        running, waiting = now.sum("vllm:num_requests_running"), now.sum("vllm:num_requests_waiting")
        done, refused = rate("vllm:request_success_total"), rate("quire:requests_rejected_total")
        yield "requests", f"{running:.0f} running, {waiting:.0f} waiting, {done:.1f}/s done, {refused:.1f}/s refused"
        yield "tokens/s", f"{generated:,.0f} made, {rate('vllm:prompt_tokens_total'):,.0f} read"
        yield "", sparkline(self.tokens)
        for title, name in (
            ("first token", "vllm:time_to_first_token_seconds"),
            ("gap", "vllm:inter_token_latency_seconds"),
            ("in queue", "vllm:request_queue_time_seconds"),
        ):
            yield title, self._latency(now, name)
        used = _mean(now.by("vllm:kv_cache_usage_perc", "engine").values())
        preempted = rate("vllm:num_preemptions_total")
        yield "KV cache", f"[{'█' * round(used * 30):░<30}] {used:.0%}, {preempted:.1f}/s preempted"
        asked, found = rate("vllm:prefix_cache_queries_total"), rate("vllm:prefix_cache_hits_total")
        yield "prefix cache", f"{found / asked:.0%} of {asked:,.0f} tokens/s found" if asked else "not asked"
        drafted, right = (rate(f"vllm:spec_decode_num_{kind}_tokens_total") for kind in ("draft", "accepted"))
        if drafted:
            yield "drafts", f"{right / drafted:.0%} of {drafted:,.0f} tokens/s right"
        ended = now.by("vllm:request_success_total", "finished_reason")
        yield "ended by", ", ".join(f"{reason} {count:,.0f}" for reason, count in ended.items() if count) or "none yet"
        yield from self._cores(now)
        if restarts := now.sum("quire:engine_restarts_total"):
            yield "restarts", f"[red]{restarts:.0f} engines died[/]"

    def _cores(self, now: Look) -> Iterator[tuple[str, str]]:
        """Each of several by itself."""
        healthy = now.by("vllm:engine_healthy", "engine")
        for core in sorted(healthy, key=int) if len(healthy) > 1 else ():
            running, waiting = (now.sum(f"vllm:num_requests_{what}", engine=core) for what in ("running", "waiting"))
            made = "vllm:generation_tokens_total"
            seconds = max(now.when - self.last.when, 1e-9)
            rate = max(now.sum(made, engine=core) - self.last.sum(made, engine=core), 0.0) / seconds
            used = now.sum("vllm:kv_cache_usage_perc", engine=core)
            state = f"{running:.0f} running, {waiting:.0f} waiting, {rate:,.0f} tokens/s, KV cache {used:.0%}"
            yield f"core {core}", state if healthy[core] else f"[red]is being started again[/], {waiting:.0f} waiting"

    def _rate(self, now: Look) -> Callable[[str], float]:
        seconds = max(now.when - self.last.when, 1e-9)
        return lambda name: max(now.sum(name) - self.last.sum(name), 0.0) / seconds

    def _latency(self, now: Look, name: str) -> str:
        half, most = (quantile(self.last, now, name, share) for share in (0.5, 0.99))
        if half is None or most is None:
            return "nothing in this interval"
        return f"half {half * 1000:,.1f} ms, 99 % {most * 1000:,.1f} ms"
