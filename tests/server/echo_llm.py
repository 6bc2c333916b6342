"""A small truthful AsyncLLM: bytes are tokens, the answer repeats the prompt. For what a real model cannot be asked to
do on command: hang, die, answer ten thousand tokens a second."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from quire.config.engine import EngineConfig
from quire.config.model_info import ModelInfo
from quire.config.resolve import Resolved
from quire.engine.client import EngineInfo
from quire.foundation.errors import EngineDeadError, InputError
from quire.frontend.adapters import AdapterNames
from quire.frontend.inputs import Prompt
from quire.frontend.reply_formats import Formats
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.types.kv import WorkerReport
from quire.types.output import CompletionOutput, EngineStats, Logprob, RequestMetrics, RequestOutput
from quire.types.request import token_list
from quire.types.sampling import RequestOutputKind, SamplingParams

CONTEXT = 4096


TEMPLATE = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


@functools.cache
def byte_tokenizer() -> Tokenizer:
    """A real tokenizer in which every byte is the token of its number. Processes beside a server read it as well."""
    return Tokenizer(Path(__file__).parent / "byte_tokenizer")


def make_info(**options: Any) -> EngineInfo:
    config = EngineConfig.from_flat(**options)
    model = ModelInfo(
        path=str(Path(".")),
        architecture="Echo",
        hf_config={},
        vocab_size=256,
        max_position=CONTEXT,
        eos_token_ids=[0],
        bos_token_id=None,
        dtype="float32",
    )
    resolved = Resolved(
        config=config,
        info=model,
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        max_model_len=CONTEXT,
        max_model_len_is_explicit=False,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        depth=1,
        executor="uni",
    )
    report = WorkerReport(
        device="echo",
        num_blocks=257,
        max_model_len=CONTEXT,
        groups=[],
        vocab_size=256,
        weight_bytes=0,
        kv_bytes=0,
        free_bytes=0,
        attention_backend="none",
        phases={"load": 0.0},
    )
    return EngineInfo(resolved=resolved, report=report)


class EchoLLM:
    """`delay`: seconds a token. `frozen` set: no token comes. `die()` ends every request with EngineDeadError."""

    def __init__(self, delay: float = 0.0, **options: Any) -> None:
        self.info = make_info(**options)
        self.delay = delay
        self.frozen = False
        self.on_stats: Any = None
        self.adapters = AdapterNames()
        self.refuse_with: str | None = None  # stop_reason of a refusal
        self.dead_error: BaseException | None = None
        self.outage = None
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.seen: list[dict[str, Any]] = []
        self.pings = 0
        self._heard = time.monotonic()
        self._steps = 0
        self._last_step = 0.0

    @property
    def errored(self) -> bool:
        return self.dead_error is not None

    @property
    def last_heard(self) -> float:
        """It speaks whenever somebody listens, unless it is frozen."""
        if not self.frozen:
            self._heard = time.monotonic()
        return self._heard

    def ping(self) -> None:
        self.pings += 1

    def die(self) -> None:
        self.dead_error = EngineDeadError("the worker was killed")

    def check_health(self) -> None:
        if self.dead_error:
            raise self.dead_error

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.running), num_steps=self._steps, last_step_time=self._last_step)

    def get_tokenizer(self) -> Tokenizer:
        return byte_tokenizer()

    @property
    def chat_template(self) -> str:
        return TEMPLATE

    @property
    def formats(self) -> Formats:
        return Formats()

    def shutdown(self) -> None:
        self.running.clear()

    async def generate(
        self, prompt: Prompt | dict[str, Any], params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        if isinstance(prompt, dict):
            prompt = Prompt(token_ids=prompt["prompt_token_ids"])
        ids = token_list(prompt.token_ids)
        if not ids:
            raise InputError("prompt must not be empty", "prompt")
        room = CONTEXT - len(ids)
        if (params.max_tokens or 1) > room:
            raise InputError(f"max_tokens must fit into the context of {CONTEXT} tokens", "max_tokens")
        if self.refuse_with is not None:
            refusal = CompletionOutput(0, "", [], finish_reason="error", stop_reason=self.refuse_with)
            yield RequestOutput(request_id, None, ids, [refusal], True, error=self.refuse_with)
            return
        self.running.add(request_id)
        self.seen.append({"id": request_id, "params": params, "prompt": prompt, **options})
        arrival = time.time()
        delta = params.output_kind == RequestOutputKind.DELTA
        count = min(params.max_tokens or room, room)
        finished = False
        try:
            news: list[list[int]] = [[] for _ in range(params.n)]
            for i in range(count):
                while self.frozen and not self.errored:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(self.delay)
                self.check_health()
                self._steps += 1
                self._last_step = time.time()
                last = i + 1 == count
                for answer in news:
                    answer.append(ids[i % len(ids)])
                if delta or last:
                    finished = last
                    times = RequestMetrics(arrival, arrival, arrival + 0.001, time.time() if last else None)
                    yield RequestOutput(
                        request_id=request_id,
                        prompt=prompt.text,
                        prompt_ids=ids,
                        outputs=[self._answer(n, answer, params, last) for n, answer in enumerate(news)],
                        finished=last,
                        prompt_logprobs=self._prompt_logprobs(ids, params),
                        metrics=times,
                    )
                    news = [[] for _ in range(params.n)]
        finally:
            self.running.discard(request_id)
            if not finished:
                self.aborted.append(request_id)

    def _answer(self, index: int, ids: list[int], params: SamplingParams, last: bool) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text=byte_tokenizer().decode(ids),
            token_ids=ids,
            logprobs=[self._entries(i, *params.logprob_token_ids or ()) for i in ids]
            if params.logprobs is not None
            else None,
            finish_reason="length" if last else None,
        )

    def _entries(self, token: int, *asked: int) -> dict[int, Logprob]:
        other = (token + 1) % 256
        found = {one: Logprob(-9.0, 3) for one in asked}
        return found | {token: Logprob(-0.5, 1, chr(token)), other: Logprob(float("-inf"), 2, chr(other))}

    def _prompt_logprobs(self, ids: list[int], params: SamplingParams) -> list[dict[int, Logprob] | None] | None:
        if params.prompt_logprobs is None:
            return None
        return [None, *(self._entries(i) for i in ids[1:])]
