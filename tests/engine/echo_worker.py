"""A worker without a model. Its "KV cache" holds, at each position, a hash of all tokens up to there, computed from the
position before *through the block table*; the next token is that hash. So a wrong block, seat, count or token anywhere
changes the output, and `expected` knows what it should be. It keeps seats and tables like a real worker.

`hf_overrides` sets its moods: step_seconds, fail_at_step, refuse ("ConfigError", …), refuse_if (path of a file),
poison (a prompt token that a step fails of) and deadly (one that it dies of), prepares (calls it has use for),
fail_with (what it says then), of_rank (moods of one of several, by its number); call `boom`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from quire.config.engine import EngineConfig
from quire.config.model_info import ModelInfo
from quire.config.resolve import Resolved
from quire.foundation import errors
from quire.types.kv import KVGroupSpec, WorkerReport
from quire.types.plan import StepPlan, TokenMasks
from quire.types.ranks import ALONE, Rank
from quire.types.request import EngineRequest, token_array
from quire.types.result import StepResult
from quire.types.sampling import SamplingParams

NAME = "tests.engine.echo_worker:EchoWorker"
VOCAB = 997
PRIME = 1_000_003


class EchoStep:
    def __init__(self, result: StepResult | None, ready_at: float) -> None:
        self._result = result  # None: it awaits masks
        self._ready_at = ready_at

    def done(self) -> bool:
        return time.monotonic() >= self._ready_at

    def result(self) -> StepResult:
        while (left := self._ready_at - time.monotonic()) > 0:
            time.sleep(left)
        assert self._result is not None, "the result of a step whose masks did not come"
        return self._result

    def finish(self, result: StepResult) -> None:
        self._result = result


class EchoWorker:
    def __init__(self, resolved: Resolved, rank: Rank = ALONE) -> None:
        moods = resolved.config.model.hf_overrides
        self.moods = moods.get("of_rank", {}).get(str(rank.index), {}) if "of_rank" in moods else moods
        self.rank = rank
        refusal = self.moods.get("refuse")
        if refusal:
            raise getattr(errors, refusal, RuntimeError)(f"echo refuses\nto start ({refusal})")
        if os.path.exists(self.moods.get("refuse_if", "")):
            raise errors.DoesNotFitError("echo has no room yet")
        self.block_size = resolved.config.cache.block_size
        self.num_blocks = resolved.config.cache.num_gpu_blocks_override or 512
        self.max_model_len = resolved.max_model_len
        seats = resolved.max_num_seqs + 1
        self.table = np.full((seats, -(-self.max_model_len // self.block_size) + 1), -1, np.int64)
        self.num_computed = np.full(seats, -1, np.int64)  # -1: the seat is free
        self.last_token = np.full(seats, -1, np.int64)
        self.kv = np.full(self.num_blocks * self.block_size, -1, np.int64)
        self.busy_until = 0.0
        self.left_to_prepare = self.moods.get("prepares", 0)
        self.awaiting: tuple[StepPlan, np.ndarray, EchoStep] | None = None

    def start(self) -> WorkerReport:
        spec = KVGroupSpec("full", self.block_size, 1, 1, 1, 4)
        return WorkerReport(
            device="echo",
            num_blocks=self.num_blocks,
            max_model_len=self.max_model_len,
            groups=[spec],
            vocab_size=VOCAB,
            weight_bytes=0,
            kv_bytes=self.kv.nbytes,
            free_bytes=0,
            attention_backend="none",
            phases={"load": 0.0},
            can_prepare=self.left_to_prepare > 0,
        )

    def execute(self, plan: StepPlan) -> EchoStep:
        assert self.awaiting is None, "a step is overtaken that still awaits its masks"
        if plan.step == self.moods.get("fail_at_step"):
            raise RuntimeError(self.moods.get("fail_with", "echo was told to fail"))
        if self.moods.get("poison") in plan.token_ids:
            raise RuntimeError("echo was poisoned")
        if self.moods.get("deadly") in plan.token_ids:
            os.kill(os.getpid(), signal.SIGKILL)
        self._take_over(plan)
        hashes = np.empty(plan.num_rows, np.int64)
        decodes = plan.seats[: plan.num_decodes].astype(np.int64)
        hashes[: plan.num_decodes] = self._extend(decodes, self.last_token[decodes])
        offset = 0
        for row in range(plan.num_decodes, plan.num_rows):
            seat = plan.seats[row : row + 1].astype(np.int64)
            for token in plan.token_ids[offset : offset + plan.num_tokens[row]]:
                hashes[row] = self._extend(seat, np.array([token], np.int64))[0]
            offset += int(plan.num_tokens[row])
        assert offset == len(plan.token_ids)
        self.busy_until = max(self.busy_until, time.monotonic()) + self.moods.get("step_seconds", 0.0)
        if plan.awaits_masks:
            step = EchoStep(None, self.busy_until)
            self.awaiting = (plan, hashes, step) if self.rank.samples else None
            return step
        return EchoStep(self._sample(plan, hashes, {}), self.busy_until)

    def mask(self, masks: TokenMasks) -> None:
        assert self.awaiting is not None, "masks that no step awaits"
        plan, hashes, step = self.awaiting
        assert masks.step == plan.step
        self.awaiting = None
        bits = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")
        step.finish(self._sample(plan, hashes, dict(zip(masks.rows.tolist(), bits, strict=True))))

    def _sample(self, plan: StepPlan, hashes: np.ndarray, masks: dict[int, np.ndarray]) -> StepResult:
        tokens = np.where(plan.samples, hashes % VOCAB, -1).astype(np.int32)
        for row, mask in masks.items():
            tokens[row] = choose(int(hashes[row]), np.flatnonzero(mask).tolist())
        self.last_token[plan.seats] = tokens
        return StepResult(step=plan.step, tokens=tokens.reshape(-1, 1), counts=plan.samples.astype(np.int32))

    def _take_over(self, plan: StepPlan) -> None:
        for seat in plan.releases:
            assert self.num_computed[seat] >= 0, f"seat {seat} is released twice"
            self.num_computed[seat] = self.last_token[seat] = -1
            self.table[seat] = -1
        for admit in plan.admits:
            assert self.num_computed[admit.seat] == -1, f"seat {admit.seat} is taken"
            self.num_computed[admit.seat] = admit.num_computed
        for new in plan.blocks:
            self.table[new.seats, new.index] = new.blocks

    def _extend(self, seats: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Put one token behind each seat's sequence; returns the hashes. [rows] -> [rows]"""
        position = self.num_computed[seats]
        assert (position >= 0).all(), "a row of a free seat"
        assert (tokens >= 0).all(), "a token that nobody knows"
        before = np.where(position > 0, self.kv[self._slots(seats, np.maximum(position - 1, 0))], 0)
        assert (before >= 0).all(), "a KV slot is read that nobody wrote"
        hashes = (before * 31 + tokens + 1) % PRIME
        self.kv[self._slots(seats, position)] = hashes
        self.num_computed[seats] += 1
        return hashes

    def _slots(self, seats: np.ndarray, positions: np.ndarray) -> np.ndarray:
        blocks = self.table[seats, positions // self.block_size]
        assert (blocks > 0).all(), "a position without a block"
        return blocks * self.block_size + positions % self.block_size

    def call(self, method: str, *args: Any) -> Any:
        if method == "boom":
            raise ValueError("boom was called")
        if method == "prepare":
            assert time.monotonic() >= self.busy_until, "prepared while a step runs"
            self.left_to_prepare -= 1
            return self.left_to_prepare > 0
        seats = int((self.num_computed >= 0).sum())
        return {
            "pid": os.getpid(), "rank": self.rank.index, "method": method, "args": list(args), "seats": seats,
        }  # fmt: skip

    def shutdown(self) -> None:
        pass


def choose(state: int, allowed: list[int]) -> int:
    """0 if nothing is allowed, as a real sampler does."""
    return allowed[state % len(allowed)] if allowed else 0


def expected(
    prompt: list[int],
    max_tokens: int,
    stop_token_ids: list[int] | tuple[int, ...] = (),
    meaning: Callable[[list[int]], tuple[set[int] | None, bool, bool]] = lambda _: (None, False, False),
) -> list[int]:
    """The tokens that a right engine makes of `prompt`.

    meaning: of a constraint, (what may follow an output, None: anything; whether the output is over; whether it goes on
    although the last token is a stop token).
    """
    state, out = 0, []
    for token in prompt:
        state = (state * 31 + token + 1) % PRIME
    while len(out) < max_tokens and not meaning(out)[1]:
        allowed = meaning(out)[0]
        out.append(state % VOCAB if allowed is None else choose(state, sorted(allowed)))
        if out[-1] in stop_token_ids and not meaning(out)[2]:
            break
        state = (state * 31 + out[-1] + 1) % PRIME
    return out


def make_resolved(
    *,
    depth: int = 2,
    executor: str = "uni",
    max_num_seqs: int = 8,
    max_tokens: int = 64,
    max_model_len: int = 256,
    **options: Any,
) -> Resolved:
    """Options of an engine around this worker; `options` as in EngineConfig.from_flat."""
    config = EngineConfig.from_flat(**options)
    info = ModelInfo(
        path="", architecture="Echo", hf_config={}, vocab_size=VOCAB, max_position=max_model_len, eos_token_ids=[],
        bos_token_id=None, dtype="float32",
    )  # fmt: skip
    return Resolved(
        config=config, info=info, device="cpu", dtype="float32", kv_dtype="float32", max_model_len=max_model_len,
        max_model_len_is_explicit=True, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens, depth=depth,
        executor=executor,
    )  # fmt: skip


def make_request(request_id: str, prompt: list[int], max_tokens: int, **more: Any) -> EngineRequest:
    return EngineRequest(
        id=request_id, token_ids=token_array(prompt), params=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        max_tokens=max_tokens, arrival=time.time(), **more,
    )  # fmt: skip
