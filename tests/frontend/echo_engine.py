"""A small deterministic engine behind the client protocol: tokens depend on the history alone.

It keeps every promise of the protocol (stop tokens, min_tokens, lengths, log-probabilities, aborts, death), one token
a request and poll. What it answers is scripted, or drawn from logits that are a hash of the history.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.config.engine import EngineConfig
from quire.config.model_info import ModelInfo
from quire.config.resolve import Resolved
from quire.engine.client import EngineInfo
from quire.foundation.errors import EngineDeadError
from quire.types.kv import WorkerReport
from quire.types.output import EngineOutput, EngineOutputs, EngineStats, TokenLogprobs
from quire.types.request import EngineRequest

Script = Callable[[EngineRequest, int], int]  # (request, tokens made so far) → next token


def make_info(
    vocab_size: int = 400,
    max_model_len: int = 256,
    eos: Sequence[int] = (0,),
    generation_defaults: dict[str, Any] | None = None,
    **options: Any,
) -> EngineInfo:
    config = EngineConfig.from_flat(**options)
    info = ModelInfo(
        path=options.get("model", ""),
        architecture="Echo",
        hf_config={},
        vocab_size=vocab_size,
        max_position=max_model_len,
        eos_token_ids=list(eos),
        bos_token_id=None,
        dtype="float32",
        generation_defaults=generation_defaults or {},
    )
    resolved = Resolved(
        config=config,
        info=info,
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        max_model_len=max_model_len,
        max_model_len_is_explicit=False,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        depth=1,
        executor="uni",
    )
    report = WorkerReport(
        device="echo",
        num_blocks=100,
        max_model_len=max_model_len,
        groups=[],
        vocab_size=vocab_size,
        weight_bytes=0,
        kv_bytes=0,
        free_bytes=0,
        attention_backend="none",
        phases={},
    )
    return EngineInfo(resolved, report)


def log_softmax(history: Sequence[int], vocab_size: int) -> np.ndarray:
    """Log-probabilities of the next token, [vocab_size]."""
    seed = hashlib.blake2b(np.asarray(history, np.int64).tobytes(), digest_size=8).digest()
    logits = np.random.default_rng(int.from_bytes(seed)).normal(size=vocab_size) * 2
    return logits - np.log(np.exp(logits).sum())


@dataclass
class _Running:
    request: EngineRequest
    made: list[int] = field(default_factory=list)


class EchoClient:
    owns_engine = True

    def __init__(self, info: EngineInfo, script: Script | None = None, tokens_a_poll: int = 1) -> None:
        self.info = info
        self.last_heard = 0.0
        self.death = None
        self.can_restart = False
        self.script = script
        self.tokens_a_poll = tokens_a_poll
        self.running: dict[str, _Running] = {}
        self.added: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.refuse: str | None = None  # message for requests that can never run
        self.num_steps = 0
        self.is_shut_down = False
        self._death: EngineDeadError | None = None
        self._work = asyncio.Event()

    def die(self, message: str) -> None:
        self._death = EngineDeadError(message)
        self._work.set()

    def add(self, request: EngineRequest, *, again: bool = False, suspect: bool = False) -> None:  # noqa: ARG002
        if self._death is not None:
            raise self._death
        assert request.id not in self.running, "the engine met a duplicate id"
        self.added.append(request)
        self.running[request.id] = _Running(request)
        self._work.set()

    def abort(self, request_ids: Sequence[str], reason: str = "abort") -> None:  # noqa: ARG002
        for request_id in request_ids:
            self.aborted.append(request_id)
            self.running.pop(request_id, None)

    def poll(self, timeout: float | None = None) -> EngineOutputs:  # noqa: ARG002 (it never waits)
        if self._death is not None:
            raise self._death
        self.num_steps += 1
        outputs = [self._step(running) for running in list(self.running.values())]
        stats = EngineStats(num_running=len(self.running), num_steps=self.num_steps)
        plain = [o for o in outputs if o == EngineOutput(request_id=o.request_id, token_ids=o.token_ids[:1])]
        return EngineOutputs(
            ids=[o.request_id for o in plain],
            tokens=[o.token_ids[0] for o in plain],
            special=[o for o in outputs if o not in plain],
            stats=stats,
        )

    async def outputs(self) -> AsyncIterator[EngineOutputs]:
        while True:
            if not self.running and self._death is None:
                self._work.clear()
                await self._work.wait()
            yield self.poll()
            await asyncio.sleep(0)

    def call(self, method: str, *args: Any) -> Any:
        if method == "fail":
            raise ValueError(args[0])
        return {"method": method, "args": list(args)}

    async def call_async(self, method: str, *args: Any) -> Any:
        return self.call(method, *args)

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _step(self, running: _Running) -> EngineOutput:
        request = running.request
        if self.refuse is not None:
            del self.running[request.id]
            return EngineOutput(request_id=request.id, finish_reason="error", error=self.refuse)
        is_first = not running.made
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        reason, stop = None, None
        while reason is None and len(tokens) < self.tokens_a_poll:
            token, entry = self._next(request, running.made)
            running.made.append(token)
            tokens.append(token)
            logprobs.append(entry)
            if token in request.stop_token_ids and len(running.made) >= request.params.min_tokens:
                reason, stop = "stop", None if token == request.eos_token_id else token
            elif len(running.made) >= request.max_tokens:
                reason = "length"
        if reason is not None:
            del self.running[request.id]
        wants_prompt = is_first and request.params.prompt_logprobs is not None
        return EngineOutput(
            request_id=request.id,
            token_ids=tokens,
            logprobs=logprobs if request.params.logprobs is not None else None,
            prompt_logprobs=self._prompt(request) if wants_prompt else None,
            finish_reason=reason,
            stop_reason=stop,
            num_cached_tokens=3 if is_first else 0,
            queued=0.5 if is_first else 0.0,
        )

    def _next(self, request: EngineRequest, made: list[int]) -> tuple[int, TokenLogprobs]:
        size = self.info.report.vocab_size
        logits = log_softmax([*request.token_ids, *made], size)
        if self.script is not None:
            token = self.script(request, len(made))
        elif request.params.is_greedy:
            token = int(logits.argmax())
        else:
            rng = np.random.default_rng([request.seed % 2**63, len(made)])
            token = int(rng.choice(size, p=np.exp(logits)))
        return token, self._entry(logits, token, request.params.logprobs)

    def _prompt(self, request: EngineRequest) -> list[TokenLogprobs]:
        ids, size = request.token_ids, self.info.report.vocab_size
        return [
            self._entry(log_softmax(ids[:i], size), ids[i], request.params.prompt_logprobs) for i in range(1, len(ids))
        ]

    @staticmethod
    def _entry(logits: np.ndarray, token: int, count: int | None) -> TokenLogprobs:
        top = np.argsort(-logits, kind="stable")[: count or 0].tolist()
        rank = int((logits > logits[token]).sum()) + 1
        return TokenLogprobs([token, *top], [float(logits[i]) for i in (token, *top)], rank)


def says(text_ids: Sequence[int], then: int = 0) -> Script:
    """Answers every request with these ids, then with `then` (EOS) for ever."""
    return lambda _, made: text_ids[made] if made < len(text_ids) else then
