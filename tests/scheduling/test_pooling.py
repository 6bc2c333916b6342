"""Pooling requests in the scheduler: chunks, preemption, aborts, whole prompts; every vector arrives once, in order."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from quire.foundation.errors import ConfigError, InputError, QuireError
from quire.scheduling.scheduler import Scheduler
from quire.types.kv import KVGroupSpec
from quire.types.output import EngineOutput
from quire.types.plan import Pool, StepPlan
from quire.types.pooling import Pooling
from quire.types.request import EngineRequest, token_array
from quire.types.result import PooledRows, StepResult
from quire.types.sampling import RequestOutputKind, SamplingParams

SILENT = SamplingParams(max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY, skip_reading_prefix_cache=True)


def scheduler(*, kind: str = "full", block_size: int = 4, blocks: int = 30, **options: object) -> Scheduler:
    group = KVGroupSpec(kind=kind, block_size=block_size, num_layers=1, num_kv_heads=1, head_dim=8, dtype_bytes=4)
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 12, "max_model_len": 24}
    return Scheduler(num_blocks=blocks, groups=[group], hash_seed=b"0" * 16, **{**defaults, **options})  # type: ignore[arg-type]


def request(name: str, ids: list[int], *, by_token: bool = False, priority: int = 0) -> EngineRequest:
    wanted = Pooling(int(by_token), len(ids), len(ids))
    return EngineRequest(
        id=name, token_ids=token_array(ids), params=SILENT, max_tokens=1, pooling=wanted, priority=priority
    )


class Device:
    """Keeps a running sum a seat, as pooling over chunks does: a token's vector is (its id, the sum so far)."""

    def __init__(self) -> None:
        self.num_computed: dict[int, int] = {}
        self.sums: dict[int, int] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for admit in plan.admits:
            self.num_computed[admit.seat] = admit.num_computed
            assert admit.num_computed == 0
            self.sums[admit.seat] = 0
        [pool] = [one for one in plan.attachments if isinstance(one, Pool)]
        assert pool.rows.tolist() == list(range(plan.num_rows))
        assert not plan.samples.any()
        starts = np.concatenate([[0], np.cumsum(plan.num_tokens)])
        rows, counts, values = [], [], []
        for row, seat in enumerate(plan.seats.tolist()):
            lines = []
            for token in plan.token_ids[starts[row] : starts[row + 1]].tolist():
                self.sums[seat] += token
                lines.append((token, self.sums[seat]))
            self.num_computed[seat] += len(lines)
            kept = lines if pool.heads[row] else lines[-1:] if pool.ends[row] else []
            if kept:
                rows.append(row)
                counts.append(len(kept))
                values += kept
        pooled = PooledRows(
            np.array(rows, np.int32), np.array(counts, np.int32), np.array(values, np.float32).reshape(-1, 2)
        )
        tokens = np.full((plan.num_rows, 1), -1, np.int32)
        return StepResult(step=plan.step, tokens=tokens, counts=np.zeros(plan.num_rows, np.int32), pooled=[pooled])


def expected(spec: EngineRequest) -> list[list[float]]:
    sums = np.cumsum(spec.token_ids)
    lines = [[float(token), float(total)] for token, total in zip(spec.token_ids, sums, strict=True)]
    assert spec.pooling is not None
    return lines if spec.pooling.per_token else lines[-1:]


@pytest.mark.parametrize("seed", range(150))
def test_random_lives(seed: int) -> None:
    dice = random.Random(seed)
    whole = dice.random() < 0.3
    policy = dice.choice(["fcfs", "priority"])
    made = (
        scheduler(kind="none", block_size=32, blocks=5, max_num_batched_tokens=dice.randint(24, 60), policy=policy)
        if whole
        else scheduler(
            blocks=dice.randint(7, 20),
            max_prefill_chunk=dice.choice([0, 0, 3, 5]),
            policy=policy,
            enable_prefix_caching=dice.random() < 0.5,
        )
    )
    device, depth = Device(), dice.randint(1, 3)
    flying: deque[tuple[StepPlan, StepResult]] = deque()
    specs: dict[str, EngineRequest] = {}
    done: dict[str, EngineOutput] = {}
    aborted = set()
    while len(specs) < 25 or made.has_work:
        for _ in range(dice.choice([0, 0, 1, 4]) if len(specs) < 25 else 0):
            ids = [dice.randint(0, 9) for _ in range(dice.randint(1, 24))]
            spec = request(
                f"r{len(specs)}", ids, by_token=dice.random() < 0.4, priority=dice.randint(0, 2) if policy else 0
            )
            specs[spec.id] = spec
            made.add(spec)
        if dice.random() < 0.05 and specs:
            name = dice.choice(list(specs))
            if name not in done:
                aborted.add(name)
                made.abort([name])
        while len(flying) < depth and (plan := made.plan()) is not None:
            if whole:
                assert plan.num_rows == len(plan.admits), "each prompt is computed in one step"
            flying.append((plan, device.run(plan)))
        if flying:
            news = made.settle(*flying.popleft())
            assert not news.ids
            for output in news.special:
                assert output.request_id not in done
                done[output.request_id] = output
        made.check()
    while flying:
        made.settle(*flying.popleft())
    assert done.keys() == specs.keys() - aborted
    for name, output in done.items():
        assert output.finish_reason == "stop"
        assert output.pooled is not None
        assert output.pooled.tolist() == expected(specs[name])
    assert made.stats().prompt_tokens == sum(len(specs[name].token_ids) for name in done)
    assert made.kv.num_free == made.kv.pool.num_usable


def test_a_prompt_may_fill_the_context() -> None:
    made = scheduler()
    made.add(request("full", [1] * 24))
    with pytest.raises(InputError, match="25 tokens; the context of 24"):
        made.add(request("over", [1] * 25))


def test_whole_prompts_need_a_step_that_holds_the_longest() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens must be >= max_model_len = 24"):
        scheduler(kind="none", block_size=32, max_num_batched_tokens=23)


def test_a_result_without_a_vector_is_no_result() -> None:
    made = scheduler()
    made.add(request("r", [1, 2]))
    plan = made.plan()
    assert plan is not None
    empty = StepResult(step=plan.step, tokens=np.full((1, 1), -1, np.int32), counts=np.zeros(1, np.int32))
    with pytest.raises(QuireError, match="lacks the vectors"):
        made.settle(plan, empty)
