"""Scheduler: decides what every step computes.

There is no prefill and no decode mode: each request catches up from `num_computed` to all its tokens, and whoever is
one token behind decodes. A step takes first the decode rows, then chunks of running catch-ups, then waiting requests,
within a token budget. Counters advance here, when a step is planned; `settle` reads its outcome later, and several
plans may be in flight meanwhile. No plan depends on an outcome: lengths are known ahead, and a request that turns out
to have ended early wastes at most one row a plan in flight.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Literal

import numpy as np

from quire.foundation.errors import ConfigError, InputError
from quire.kv.manager import KVManager
from quire.scheduling.admission import Admission, rank
from quire.scheduling.build import PlanBuilder
from quire.scheduling.constraint import ConstraintState, MakeMatcher
from quire.scheduling.drafting import Drafting
from quire.scheduling.masks import MaskSource, make_masks
from quire.scheduling.prefill_budget import PrefillBudget
from quire.scheduling.prefixes import SHARING_THRESHOLDS, SharedPrefixFinder, SharingThresholds
from quire.scheduling.request import Request, Status
from quire.scheduling.seats import DecodeRows
from quire.scheduling.settle import settle
from quire.scheduling.state import Chunk, PlannedStep, State
from quire.scheduling.turns import Turns
from quire.scheduling.view import look
from quire.types.adapter import Adapter
from quire.types.kv import KVGroupSpec, PromptCost
from quire.types.output import EngineOutput, EngineOutputs, EngineStats, QueueStats
from quire.types.plan import StepPlan, TokenMasks
from quire.types.request import BACKGROUND, EngineRequest
from quire.types.result import StepResult
from quire.types.view import CHUNK, BlockCells, LifeEvent, RequestView, StepWork


class Scheduler:
    """max_prefill_chunk: tokens, 0 for no limit; num_blocks: the null block included; hash_seed: None draws one;
    mixed_sizes, prompt_cost: see WorkerReport; clock: seconds, to see how long requests have waited; prefix_worth: when
    the worker hears of rows that begin alike; vocab_size, mask_source: for requests with a constraint. adapter_slots:
    LoRA adapters that can be on the device. stages: of workers, each at a plan of its own at a time.

    Raises ConfigError for numbers with which no request could run.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_blocks: int,
        groups: Sequence[KVGroupSpec],
        max_prefill_chunk: int = 0,
        policy: Literal["fcfs", "priority"] = "fcfs",
        preempt_every_step: bool = False,
        enable_prefix_caching: bool = True,
        hash_seed: bytes | None = None,
        mixed_sizes: Sequence[tuple[int, int]] = (),
        prompt_cost: PromptCost | None = None,
        clock: Callable[[], float] = time.monotonic,
        sharing_thresholds: SharingThresholds = SHARING_THRESHOLDS,
        vocab_size: int = 0,
        mask_source: MaskSource | None = None,
        drafting: Drafting | None = None,
        adapter_slots: int = 0,
        stages: int = 1,
    ) -> None:
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs must be in [1, max_num_batched_tokens = {max_num_batched_tokens}], got {max_num_seqs}",
                "max_num_seqs",
            )
        self.kv = KVManager(num_blocks, groups, enable_prefix_caching=enable_prefix_caching, seed=hash_seed)
        self.max_tokens = min(max_model_len, self.kv.capacity)  # of one request, prompt included
        if self.max_tokens < 2:
            raise ConfigError(
                f"a request must be able to hold 2 tokens: max_model_len is {max_model_len} and the KV cache holds "
                f"{self.kv.capacity}",
                "max_model_len",
            )
        self._max_model_len = max_model_len
        self._budget = max_num_batched_tokens
        # Where nothing is kept from one step to the next, a prompt is computed in one or not at all.
        self._whole_prompts = any(spec.kind == "none" for spec in groups)
        if self._whole_prompts and max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens must be >= max_model_len = {max_model_len} for a model that computes a prompt "
                f"in one step, got {max_num_batched_tokens}",
                "max_num_batched_tokens",
            )
        self._max_chunk = (0 if self._whole_prompts else max_prefill_chunk) or max_num_batched_tokens
        self._by_priority = self._has_classes = policy == "priority"
        self._preempt_every_step = preempt_every_step
        self._drafting = drafting
        self._turns = Turns(stages) if stages > 1 else None
        self._state = State(self.kv, max_num_seqs, drafting, adapter_slots)
        self._admission = Admission(self._state)
        self.prefill_budget = PrefillBudget(mixed_sizes, prompt_cost)  # whoever measures the steps tells it
        self._clock = clock
        self._prefixes = SharedPrefixFinder(self.kv, max_num_seqs, sharing_thresholds)
        self._vocab_size, self._mask_source = vocab_size, mask_source
        self._arrivals, self._step = itertools.count(), 0
        self.planned_work = 0.0  # on prompts, in the plan made last; see PrefillBudget

    @cached_property
    def _sizes(self) -> np.ndarray:
        """Tokens a block of each group [groups, 1]."""
        return np.array(self.kv.block_sizes, np.int32)[:, None]

    # --- requests come and go -----------------------------------------------------------------------------------

    def add(self, spec: EngineRequest) -> None:
        """Queue a request. One with a grammar stands aside until `bind`. Raises InputError if it can never run."""
        self._check(spec)
        in_background = spec.priority == BACKGROUND
        self._has_classes = self._has_classes or in_background
        order = (spec.priority if self._by_priority or in_background else 0, next(self._arrivals))
        num_prompt = len(spec.token_ids)
        # A pooling request ends one token short of its limit, as one does whose last token is under way.
        limit = min(num_prompt + spec.max_tokens, self.max_tokens) if spec.pooling is None else num_prompt + 1
        request = Request(spec, order, limit, self._clock())
        self._state.lives.begin(request)
        if spec.given and len(request.tokens) >= limit:
            raise InputError(f"request {spec.id!r}: {len(spec.given)} tokens are given, and no more fit", "max_tokens")
        constraint = spec.constraint
        if constraint is not None and constraint.grammar is not None:
            request.status = Status.COMPILING
            self._state.num_compiling += 1
        else:
            if constraint is not None:
                request.bind(ConstraintState(constraint, None, self._vocab_size, request.stops))
            self._state.queue.push(request)
        self._state.requests[spec.id] = request

    def _check(self, spec: EngineRequest) -> None:
        """Raise InputError if it can never run."""
        num_prompt = len(spec.token_ids)
        if spec.id in self._state.requests:
            raise InputError(f"request id {spec.id!r} is in use", "request_id")
        if num_prompt == 0:
            raise InputError(f"request {spec.id!r}: the prompt must hold at least 1 token", "prompt")
        if spec.lora is not None and not self._state.adapters.num_slots:
            raise InputError("the engine takes no LoRA adapters: start it with enable_lora", "lora_request")
        if spec.max_tokens < 1:
            raise InputError(f"max_tokens must be >= 1, got {spec.max_tokens}", "max_tokens")
        num_output = 0 if spec.pooling is not None else 1
        beside = " with 1 token of output" if num_output else ""
        if num_prompt + num_output > self._max_model_len:
            raise InputError(
                f"the prompt has {num_prompt} tokens;{beside} the context of {self._max_model_len} tokens does not "
                "hold it",
                "prompt",
            )
        if num_prompt + num_output > self.kv.capacity:
            raise InputError(
                f"the prompt has {num_prompt} tokens;{beside} the KV cache of {self.kv.capacity} tokens does not hold "
                "it, even empty",
                "prompt",
            )

    def bind(self, request_id: str, make_matcher: MakeMatcher) -> EngineOutput | None:
        """The grammar of a request is compiled: it takes the place in the queue that it had from the beginning.

        An id that is not known any more is ignored. Returns the end of a request whose grammar allows nothing but the
        end. Raises InputError, and the request is gone, if it can never run.
        """
        state, request = self._state, self._state.requests.get(request_id)
        if request is None or request.status is not Status.COMPILING:
            return None
        assert request.spec.constraint is not None
        try:
            constraint = request.spec.constraint
            followed = ConstraintState(constraint, make_matcher, self._vocab_size, request.stops)
        except InputError:
            state.finish(request)
            raise
        request.bind(followed)
        if followed.is_done:
            state.finish(request)
            return EngineOutput(request_id=request_id, finish_reason="stop", lacks_stop_token=True)
        request.become(Status.WAITING)
        state.num_compiling -= 1
        state.queue.push(request)
        return None

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End requests at once; unknown ids are ignored. No output comes for them. Returns those that were known."""
        ended = []
        for request_id in request_ids:
            request = self._state.requests.get(request_id)
            if request is not None:
                self._state.finish(request)
                ended.append(request_id)
        return ended

    @property
    def request_ids(self) -> list[str]:
        """Of all that have not ended."""
        return list(self._state.requests)

    def ids_with(self, adapter: Adapter) -> list[str]:
        """Of requests with it."""
        return [request.id for request in self._state.requests.values() if request.spec.lora == adapter]

    def has_advanced(self, request_id: str) -> bool:
        """Whether a token of it was sampled here, or it is over."""
        request = self._state.requests.get(request_id)
        return request is None or len(request.tokens) > request.num_prompt + len(request.spec.given)

    def unreported(self) -> list[EngineOutput]:
        """The last news of an engine that ends between two steps: tokens of answers that nobody reads along."""
        return [
            EngineOutput(request_id=request.id, token_ids=request.tokens[request.num_reported :].tolist())
            for request in self._state.requests.values()
            if request.final_only and len(request.tokens) > request.num_reported
        ]

    def ids_in(self, steps: int) -> list[str]:
        """The requests in the `steps` oldest plans in flight."""
        found: dict[str, None] = {}
        for step in itertools.islice(self._state.in_flight, steps):
            found.update(dict.fromkeys([*step.decodes.ids, *(chunk.request.id for chunk in step.chunks)]))
        return list(found)

    @property
    def has_work(self) -> bool:
        """Whether there are requests that need not wait for their grammar."""
        return len(self._state.requests) > self._state.num_compiling

    @property
    def num_requests(self) -> int:
        """That have not ended."""
        return len(self._state.requests)

    @property
    def num_running(self) -> int:
        return len(self._state.running)

    @property
    def num_waiting(self) -> int:
        return len(self._state.queue) + self._state.num_compiling

    @property
    def num_compiling(self) -> int:
        return self._state.num_compiling

    # --- plan ---------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step; None if nothing can be computed before an earlier plan is settled (or at all).

        A plan that awaits masks is the last until `masks` has made them.
        """
        state = self._state
        if not self.has_work or (state.in_flight and state.in_flight[-1].bound):
            return None
        build = PlanBuilder(len(self.kv.groups), self._budget)
        if self.kv.frees_behind:
            for request in state.prefilling.values():
                self.kv.free_behind(request, int(state.seats.num_computed[request.seat]))
        if self._preempt_every_step:
            self._admission.preempt_one()
        if self._has_classes:
            self._admission.make_for_urgent()
        if self._drafting is None:
            self._decode(build)
        else:
            self._decode_drafted(build, self._drafting)
        if not build.num_drafts:
            self._keep_pace(build)
            for in_background in (False, True) if self._has_classes else (False,):  # the background gets what is left
                self._catch_up(build, in_background=in_background)
                self._admit(build, in_background=in_background)
        if not build.decodes and not build.chunks:
            return None
        # Rows that take turns would make other groups in every plan.
        prefixes = None if self._turns else self._prefixes.update(build.decodes)
        changes = state.adapters.take_changes()
        plan = build.finish(self._step, state.releases, prefixes, changes, self.kv.take_copies())
        state.releases = []
        self.planned_work = sum(
            self.prefill_budget.work(chunk.end - chunk.start, chunk.start) for chunk in build.chunks
        )
        state.in_flight.append(PlannedStep(plan, build.decodes, build.chunks, build.bound, self._is_full(build)))
        self._step += 1
        return plan

    def masks(self) -> TokenMasks | None:
        """What the step that was planned last awaits to sample; None as long as a step before it is not settled, and if
        it awaits nothing (more)."""
        if len(self._state.in_flight) != 1 or not (step := self._state.in_flight[0]).bound:
            return None
        bound, step.bound = step.bound, []
        return make_masks(step.plan.step, bound, self._vocab_size, self._mask_source)

    @property
    def can_be_late(self) -> bool:
        """Whether all that the next step would bring is one token more for requests that somebody reads along.

        Then the sooner it is planned the longer who comes next waits behind it. Never of stages, of which the first
        would be idle.
        """
        state = self._state
        return (
            self._turns is None
            and not state.prefilling
            and not len(state.queue)
            and state.seats.decode_rows().has_readers
        )

    def _decode(self, build: PlanBuilder) -> None:
        """One token for everyone who is one token behind."""
        seats, kv = self._state.seats, self.kv
        while True:
            rows = seats.decode_rows()
            if rows and self._turns is not None:
                alone = not self._state.prefilling and not len(self._state.queue)
                rows = self._turns.rows(seats, self._state.in_flight, alone=alone)
            if not rows:
                return
            computed = seats.num_computed.take(rows.seats)
            full = [np.flatnonzero(computed >= room.take(rows.seats)) for room in seats.room]
            if kv.frees_behind:
                self._free_behind(rows, computed, full)
            if sum(map(len, full)) <= kv.num_free:
                break
            self._state.preempt(self._admission.victim())
        for group, at in enumerate(full):
            if len(at):
                growing, size = rows.seats[at], kv.block_sizes[group]
                new = kv.allocate_one_each(group, seats.requests.take(growing).tolist())
                build.add_column(group, growing, computed[at] // size, new)
                seats.room[group, growing] += size
        computed += 1
        seats.num_computed[rows.seats] = computed
        build.add_decodes(rows, computed)
        drained = computed + 1 >= seats.limit.take(rows.seats)
        if drained.any():  # the samples under way reach the limit: no further row for these
            seats.stop_decoding(rows.seats[drained])

    def _free_behind(self, rows: DecodeRows, computed: np.ndarray, full: list[np.ndarray]) -> None:
        """Of rows that need another block anyway: by then windows have passed one."""
        for group, at in enumerate(full):
            if len(at) and self.kv.groups[group].spec.window:
                requests = [rows.requests[row] for row in at.tolist()]
                self.kv.free_behind_each(group, requests, computed[at].tolist())

    def _decode_drafted(self, build: PlanBuilder, drafting: Drafting) -> None:
        """The same where rows may bring drafts: blocks for as many tokens as may turn out right."""
        seats, kv = self._state.seats, self.kv
        while True:
            rows = seats.decode_rows()
            if not rows:
                return
            num_drafts = self._num_drafts(rows, drafting)
            most, computed, missing = self._reach(rows, num_drafts)
            if kv.frees_behind:  # windows follow what is computed for certain
                full = [np.flatnonzero(lacking) for lacking in missing]
                self._free_behind(rows, seats.least.take(rows.seats), full)
            if num_drafts and int(missing.sum()) > kv.num_free:
                num_drafts = 0
                most, computed, missing = self._reach(rows, 0)
            if int(missing.sum()) <= kv.num_free:
                break
            if not self._give_back(rows):
                self._state.preempt(self._admission.victim())
        self._grow(build, rows, missing)
        seats.least[rows.seats] += 1
        seats.most[rows.seats] = most
        seats.num_computed[rows.seats] = computed
        build.add_decodes(rows, computed, num_drafts)
        drained = seats.least.take(rows.seats) + 1 >= seats.limit.take(rows.seats)
        if drained.any():
            seats.stop_decoding(rows.seats[drained])

    def _grow(self, build: PlanBuilder, rows: DecodeRows, missing: np.ndarray) -> None:
        """missing: blocks that each row gets in each group [groups, rows]; set to 0."""
        seats = self._state.seats
        for group, lacking in enumerate(missing):
            size, room = self.kv.block_sizes[group], seats.room[group]
            while (growing := np.flatnonzero(lacking)).size:
                seated = rows.seats[growing]
                new = self.kv.allocate_one_each(group, seats.requests.take(seated).tolist())
                build.add_column(group, seated, room.take(seated) // size, new)
                room[seated] += size
                lacking[growing] -= 1

    def _give_back(self, rows: DecodeRows) -> bool:
        """Blocks that were for drafts which turned out wrong. Returns whether there were any."""
        seats, kv = self._state.seats, self.kv
        spare = seats.room[:, rows.seats] - seats.num_computed.take(rows.seats)
        found = np.flatnonzero((spare >= self._sizes).any(axis=0)).tolist()
        for row in found:
            request = rows.requests[row]
            kv.trim(request, int(seats.num_computed[request.seat]))
            seats.room[:, request.seat] = kv.room(request)
        return bool(found)

    def _num_drafts(self, rows: DecodeRows, drafting: Drafting) -> int:
        """Most that each of the rows brings to the next step; none if there are prompts to compute."""
        state, num_rows = self._state, len(rows)
        if state.prefilling or num_rows * (1 + drafting.num_drafts) > self._budget:
            return 0
        if len(state.queue) and self._num_free_seats():
            return 0
        return drafting.wanted(rows.seats, state.seats.may_draft.take(rows.seats))

    def _reach(self, rows: DecodeRows, num_drafts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """After a step with so many drafts a row: most tokens computed, the same within the limits, and the blocks
        lacking [groups, rows]."""
        seats = self._state.seats
        most = seats.most.take(rows.seats) + 1
        if num_drafts:
            most += np.int32(num_drafts) * seats.may_draft.take(rows.seats)
        computed = np.minimum(most, seats.limit.take(rows.seats) - 1)
        return most, computed, np.maximum(-((seats.room[:, rows.seats] - computed) // self._sizes), 0)

    def _keep_pace(self, build: PlanBuilder) -> None:
        """Bound the prompt tokens of a step whose decode rows have readers."""
        state = self._state
        if not build.decodes.has_readers:
            return
        behind = [*state.prefilling.values()]
        if (first := state.queue.peek()) is not None:
            behind.append(first)
        if behind:
            # Prompts in the background wait for nobody's sake.
            waited = max(
                (self._clock() - request.added for request in behind if not _in_background(request)), default=0.0
            )
            longest = max(len(request.tokens) for request in behind)
            build.allowance = self.prefill_budget.allowance(waited, len(build.decodes), longest)

    def _catch_up(self, build: PlanBuilder, *, in_background: bool) -> None:
        """Chunks of the running requests that are further behind, best rank first."""
        state = self._state
        for request in sorted(state.prefilling.values(), key=rank):
            if build.is_full:
                return
            if _in_background(request) is not in_background:
                continue
            if request.status is Status.RUNNING:  # else it has just made room for a better one
                self._skip_cached(request, build)
                most = self._most_tokens(int(state.seats.num_computed[request.seat]), build)
                if most and self._admission.for_one_more(request, build.chunks):
                    self._add_chunk(request, build, most)

    def _admit(self, build: PlanBuilder, *, in_background: bool) -> None:
        """Waiting requests, best rank first; one that does not fit yet holds back those behind it."""
        state = self._state
        while not build.is_full and state.seats.num_free:
            request = state.queue.peek() or self._brought_back()
            if request is None or (self._whole_prompts and len(request.tokens) > build.budget):
                return
            if _in_background(request) is not in_background:
                return
            if not state.adapters.has_room(request.spec.lora):
                state.queue.set_aside()
                continue
            fit = self._admission.find_fit(request)
            if fit is None:
                return
            hit, num_cached = fit
            most = self._most_tokens(num_cached, build)
            if not most:
                return
            state.queue.pop()
            first_time = request.status is Status.WAITING
            state.seat(request, hit, num_cached)
            if first_time:
                request.first_scheduled = time.time()
                request.num_cached = num_cached
                state.load.begin(request, in_background=in_background)
            self._count_lookup(request, num_cached)
            build.admits.append(request.admit(num_cached, with_history=self.kv.keeps_history_apart))
            build.add_ends(request.seat, self.kv.table(request), self.kv.held(request))
            self._add_chunk(request, build, most)

    def _brought_back(self) -> Request | None:
        """The best request that has stood aside, if its adapter has room by now."""
        queue = self._state.queue
        best = queue.first_aside()
        if best is None or best.spec.lora is None or not self._state.adapters.has_room(best.spec.lora):
            return None
        queue.bring_back(best.spec.lora.key)
        return queue.peek()

    def _most_tokens(self, context: int, build: PlanBuilder) -> int:
        """What the budgets have left for a chunk behind `context` tokens."""
        if build.allowance is None:
            return build.budget
        return min(build.budget, self.prefill_budget.tokens(build.allowance, context, is_first=not build.chunks))

    def _add_chunk(self, request: Request, build: PlanBuilder, most: int) -> None:
        """As many of the request's next tokens, up to `most`, as chunk limit and blocks allow (at least one fits)."""
        state, seats, kv = self._state, self._state.seats, self.kv
        seat, total = request.seat, len(request.tokens)
        start = int(seats.num_computed[seat])
        end = min(total, start + most, start + self._max_chunk, kv.next_stop(request, start))
        grows = end > int(seats.room[:, seat].min())
        if grows:
            end = kv.reach(request, end)
        aligned = end // kv.alignment * kv.alignment
        if end < total and aligned > start:
            end = aligned  # whole blocks can be shared, and at their ends others may have gone on
        if grows:
            new = kv.allocate(request, end)
            assert new is not None
            build.add_ends(seat, kv.table(request), new)
            seats.room[:, seat] = kv.room(request)
        seats.num_computed[seat] = end
        kv.register(request, end)
        kv.reach_state(request, end)
        request.note(CHUNK, start, end)
        build.add_chunk(Chunk(request, start, end, samples=end == total and request.spec.pooling is None))
        if build.allowance is not None:
            build.allowance -= self.prefill_budget.work(end - start, start)
        if end == total:
            del state.prefilling[request.id]
            seats.end_catching_up(seat)
            if total + 1 < request.limit:
                seats.start_decoding(seat)

    def _skip_cached(self, request: Request, build: PlanBuilder) -> None:
        """Jump over blocks that others have computed (or planned) since the request was admitted."""
        seats = self._state.seats
        computed = int(seats.num_computed[request.seat])
        hit, num_tokens = self.kv.find_more(request, computed, request.max_cached)
        if num_tokens == 0:
            return
        computed += num_tokens
        self.kv.adopt(request, hit, computed)
        seats.num_computed[request.seat] = computed
        seats.room[:, request.seat] = self.kv.room(request)
        self._state.totals.prefix_hits += num_tokens
        self._state.totals.cached_tokens += num_tokens
        if request.num_preemptions == 0:
            request.num_cached += num_tokens
        # To the worker it gives its seat back and takes it again, further on.
        self._state.releases.append(request.seat)
        build.admits.append(request.admit(computed, with_history=self.kv.keeps_history_apart))
        build.add_ends(request.seat, self.kv.table(request), self.kv.held(request))

    def _count_lookup(self, request: Request, num_cached: int) -> None:
        totals = self._state.totals
        if request.max_cached and self.kv.enable_prefix_caching:
            totals.prefix_queries += len(request.tokens)
            totals.prefix_hits += num_cached
            totals.cached_tokens += num_cached

    def _is_full(self, build: PlanBuilder) -> bool:
        """Whether prompts are left behind for nothing but want of budget."""
        if not len(self._state.queue):
            return build.budget <= 0 and bool(self._state.prefilling)
        return self._num_free_seats() > 0

    def _num_free_seats(self) -> int:
        """That waiting requests could take: none if the best of them lacks blocks."""
        free = self._state.seats.num_free
        first = self._state.queue.peek()
        if first is None:  # whoever waits lacks a slot of its adapter
            return 0 if len(self._state.queue) else free
        return free if free and self._admission.find_fit(first) is not None else 0

    # --- outcome ------------------------------------------------------------------------------------------------

    def observe(self, work: float, prompt_tokens: int, seconds: float, between: float) -> None:
        """The oldest step in flight is done and took the device `seconds`, for `work` as `prefill_budget` counts it;
        `between`: seconds since the one before, if the engine has been at work since then."""
        self.prefill_budget.observe(work, seconds)
        step = self._state.in_flight[0]
        if self._drafting is not None and not step.chunks:
            self._drafting.observe(len(step.decodes), step.plan.num_drafts, seconds)
        self._state.load.observe(between, prompt_tokens, is_full=step.is_full)

    def work_of_oldest(self) -> StepWork:
        """Of the oldest step in flight."""
        step = self._state.in_flight[0]
        plan, decodes = step.plan, len(step.decodes)
        read = int(self._state.seats.num_computed.take(step.decodes.seats).sum())
        attended = float(read)
        for chunk in step.chunks:
            read += chunk.end
            attended += (chunk.end - chunk.start) * (chunk.start + chunk.end) / 2
        tokens = int(plan.num_tokens.sum()) + decodes * plan.num_drafts
        return StepWork(tokens, decodes * (1 + plan.num_drafts) + len(step.chunks), read, attended)

    def settle(self, plan: StepPlan, result: StepResult) -> EngineOutputs:
        """Read the result of the oldest plan in flight. Returns the news, at most one output a request."""
        return settle(self._state, plan, result)

    def stats(self) -> EngineStats:
        """What the scheduler knows of the statistics; the engine core adds the rest."""
        state, totals, drafts = self._state, self._state.totals, self._drafting
        return EngineStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_deferred=state.num_compiling + state.queue.num_aside,
            kv_usage=self.kv.usage,
            num_blocks=self.kv.pool.num_usable,
            num_free_blocks=self.kv.num_free,
            num_seats_used=len(state.running),
            prompt_tokens=totals.prompt_tokens,
            generation_tokens=totals.generation_tokens,
            cached_tokens=totals.cached_tokens,
            prefix_queries=totals.prefix_queries,
            prefix_hits=totals.prefix_hits,
            num_preemptions=totals.num_preemptions,
            num_drafts=drafts.num_rounds if drafts else 0,
            num_draft_tokens=drafts.num_drafted if drafts else 0,
            num_accepted_tokens=int(drafts.accepted_at.sum()) if drafts else 0,
            running_adapters=state.adapters.running,
            waiting_adapters=state.queue.adapters if state.adapters.num_slots else [],
            num_accepted_per_pos=drafts.accepted_at.tolist() if drafts else [],
        )

    def look(self, watch: float) -> tuple[list[RequestView], BlockCells]:
        """The requests and the blocks of now. For `watch` seconds from now on lives of requests are followed."""
        self._state.lives.watch(watch, self._state.requests.values())
        return look(self._state)

    def life(self, request_id: str) -> list[LifeEvent] | None:
        """None: it was not followed."""
        if (request := self._state.requests.get(request_id)) is not None:
            return request.life
        return self._state.lives.ended(request_id)

    def queue_stats(self) -> QueueStats:
        """Who waits and how fast that goes."""
        state = self._state
        running = Counter(request.rank[0] for request in state.running.values())
        lacking = sum(
            len(request.tokens) - int(state.seats.num_computed[request.seat]) for request in state.prefilling.values()
        )
        return state.load.report(state.queue.classes, running, lacking, self._num_free_seats())

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached KV. Running requests go on with theirs, or are preempted and computed anew."""
        if reset_running_requests:
            for request in list(self._state.running.values()):
                self._state.preempt(request)
        self.kv.reset_prefix_cache()
        return True

    def check(self) -> None:
        """Raise AssertionError if seats, requests and blocks do not add up."""
        self.kv.check()
        self._state.check()


def _in_background(request: Request) -> bool:
    return request.rank[0] == BACKGROUND
