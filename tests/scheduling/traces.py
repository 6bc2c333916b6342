"""Random lives of a scheduler: arrivals, cancellations, tiny pools, any depth; every trace follows from its seed."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from quire.scheduling.drafting import Drafting
from quire.scheduling.prefixes import SharingThresholds
from quire.scheduling.scheduler import Scheduler
from quire.types.adapter import Adapter
from quire.types.kv import KVGroupSpec, capacity
from quire.types.output import EngineOutput
from quire.types.plan import StepPlan
from quire.types.request import BACKGROUND, EngineRequest
from quire.types.result import StepResult
from quire.types.sampling import RequestOutputKind
from tests.scheduling.simulator import VOCAB, Device, Reference, groups, history, make_request, state, windowed
from tests.scheduling.toy_grammar import ToyGrammar, ToyMatcher, ToySource, random_constraint

ANYTHING = SharingThresholds(1, 1, 1)
ADAPTERS = [Adapter(f"key {number}", f"adapter {number}", "/") for number in range(5)]


@dataclass(frozen=True)
class World:
    """The numbers of one trace."""

    block_size: int = 4
    num_blocks: int = 17
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_prefill_chunk: int = 0
    max_model_len: int = 64
    depth: int = 2
    policy: str = "fcfs"
    preempt_every_step: bool = False
    enable_prefix_caching: bool = True
    groups: tuple[KVGroupSpec, ...] = ()  # none: one that sees everything
    sharing_thresholds: SharingThresholds = ANYTHING
    num_drafts: int = 0
    always_drafts: bool = True
    adapter_slots: int = 0

    @property
    def specs(self) -> list[KVGroupSpec]:
        return list(self.groups) or groups(self.block_size)


def answer_all(plan: StepPlan) -> StepResult:
    """A token for every row that samples."""
    tokens = np.where(plan.samples, 7, -1).astype(np.int32)
    return StepResult(step=plan.step, tokens=tokens[:, None], counts=plan.samples.astype(np.int32))


class Life:
    """One scheduler with its device, driven as the engine core drives them, and checked at every turn."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.references: dict[str, Reference] = {}
        self.told: dict[str, list[EngineOutput]] = {}
        self.open: dict[str, None] = {}  # accepted, neither finished nor aborted
        self.num_deaths = 0
        self._begin()

    def _begin(self) -> None:
        world = self.world
        self.scheduler = Scheduler(
            max_num_seqs=world.max_num_seqs,
            max_num_batched_tokens=world.max_num_batched_tokens,
            max_prefill_chunk=world.max_prefill_chunk,
            max_model_len=world.max_model_len,
            num_blocks=world.num_blocks,
            groups=world.specs,
            policy=world.policy,  # type: ignore[arg-type]
            preempt_every_step=world.preempt_every_step,
            enable_prefix_caching=world.enable_prefix_caching,
            hash_seed=b"test",
            sharing_thresholds=world.sharing_thresholds,
            vocab_size=VOCAB,
            mask_source=ToySource(),
            drafting=Drafting(world.num_drafts, world.max_num_seqs, world.max_num_seqs, always=world.always_drafts)
            if world.num_drafts
            else None,
            adapter_slots=world.adapter_slots,
        )
        chunk = world.max_prefill_chunk or world.max_num_batched_tokens
        self.device = Device(
            world.specs, world.max_num_seqs, world.max_num_batched_tokens, chunk, draft_seed=world.num_drafts or None
        )
        self.in_flight: deque[tuple[StepPlan, StepResult | None]] = deque()  # the last may still await its masks
        self.compiling: list[str] = []  # requests whose grammar is not there yet
        self.plans: list[StepPlan] = []

    def die(self) -> None:
        """Scheduler and device are gone, with all that was in flight; new ones get what was told of the answers."""
        self.num_deaths += 1
        self._begin()
        for name in self.open:
            reference = self.references[name]
            self.device.references[reference.spec.seed] = reference
            self._add(msgspec.structs.replace(reference.spec, given=self.output(name)))

    @property
    def max_len(self) -> int:
        return min(self.world.max_model_len, capacity(self.world.specs, self.world.num_blocks))

    def _add(self, spec: EngineRequest) -> None:
        self.scheduler.add(spec)
        if spec.constraint is not None and spec.constraint.grammar is not None:
            self.compiling.append(spec.id)

    def add(self, spec: EngineRequest) -> None:
        self._add(spec)
        self.references[spec.id] = self.device.references[spec.seed] = Reference(spec, self.max_len)
        self.told[spec.id] = []
        self.open[spec.id] = None

    def bind(self, name: str) -> None:
        """The request's grammar is there, or it is known no more."""
        self.compiling.remove(name)
        constraint = self.references[name].spec.constraint
        assert constraint is not None
        assert constraint.grammar is not None
        make_matcher = partial(ToyMatcher, ToyGrammar(int(constraint.grammar.text)))
        if (output := self.scheduler.bind(name, make_matcher)) is not None:
            self.take(output)

    def abort(self, name: str) -> None:
        self.scheduler.abort([name])
        self.references[name].is_aborted = True
        self.open.pop(name, None)

    def plan(self) -> StepPlan:
        plan = self.plan_if_any()
        assert plan is not None, "nothing can be planned"
        return plan

    def plan_if_any(self) -> StepPlan | None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append((plan, self.device.execute(plan)))
            self._send_masks()
        return plan

    def _send_masks(self) -> None:
        masks = self.scheduler.masks()
        if masks is not None:
            plan, result = self.in_flight.pop()
            assert result is None
            assert not self.in_flight
            self.in_flight.append((plan, self.device.mask(masks)))

    def settle(self) -> list[EngineOutput]:
        plan, result = self.in_flight.popleft()
        assert result is not None, "masks were not made although all tokens before them are known"
        outputs = self.scheduler.settle(plan, result).each()
        self._send_masks()
        assert len({o.request_id for o in outputs}) == len(outputs), "two outputs for one request"
        for output in outputs:
            self.take(output)
        return outputs

    def take(self, output: EngineOutput) -> None:
        assert output.request_id in self.open, f"news of {output.request_id}, which is over"
        self.told[output.request_id].append(output)
        if output.finish_reason is not None:
            del self.open[output.request_id]
            self.verify(output.request_id)

    def turn(self) -> None:
        """One turn of the engine core: plan ahead, then settle the oldest."""
        while len(self.in_flight) < self.world.depth and self.plan_if_any() is not None:
            pass
        if self.in_flight:
            self.settle()
        else:
            assert not self.scheduler.has_work, "nothing is planned, nothing is in flight, and requests wait"

    def run(self, max_turns: int = 20_000) -> None:
        """Until all is done and settled."""
        turns = 0
        for name in [*self.compiling]:
            self.bind(name)
        while self.scheduler.has_work or self.in_flight:
            self.turn()
            turns += 1
            assert turns < max_turns, f"{len(self.open)} requests do not end"

    def output(self, name: str) -> list[int]:
        return [token for output in self.told[name] for token in output.token_ids]

    def verify(self, name: str) -> None:
        """A finished request was answered as if it had been alone."""
        reference, told = self.references[name], self.told[name]
        assert self.output(name) == reference.output, name
        assert (told[-1].finish_reason, told[-1].stop_reason) == reference.finish, name
        ends_with_stop = bool(reference.output) and reference.output[-1] in reference.spec.stop_token_ids
        assert told[-1].lacks_stop_token == (reference.finish[0] == "stop" and not ends_with_stop), name
        params = reference.spec.params
        if params.logprobs is not None:
            lines = [line for output in told for line in output.logprobs or []]
            assert [line.token_ids for line in lines] == [[token] for token in reference.output], name
        if params.prompt_logprobs is not None and reference.output:  # else the answer was over before any step
            lines = told[0].prompt_logprobs or []
            assert [line.token_ids for line in lines] == [[token] for token in reference.spec.token_ids[1:]], name

    def check_windows(self) -> None:
        """Nobody holds more than a chunk and what its next token sees."""
        chunk = self.world.max_prefill_chunk or self.world.max_num_batched_tokens
        if self.world.num_drafts:  # nobody knows how many of those in flight count
            chunk += self.world.depth * (1 + self.world.num_drafts)
        kv = self.scheduler.kv
        for request in self.scheduler._state.running.values():
            for spec, blocks in zip(self.world.specs, kv.held(request), strict=True):
                if spec.window:
                    most = -(-(spec.window + chunk) // spec.block_size) + 1
                    assert len(blocks) <= most, f"{request.id} holds {len(blocks)} blocks, {most} would do"

    def check_empty(self) -> None:
        """Nothing is left behind."""
        self.scheduler.check()
        assert not self.open
        stats = self.scheduler.stats()
        assert stats.num_running == stats.num_waiting == stats.num_seats_used == 0
        assert stats.num_free_blocks == self.world.num_blocks - 1
        assert stats.kv_usage == 0.0


def random_world(rng: random.Random, *, mixed: bool) -> World:
    block_size = rng.choice((1, 2, 4))
    specs = mixed_groups(rng, block_size) if mixed else groups(block_size)
    least = sum(spec.most_blocks(2) for spec in specs)
    seqs = rng.randint(1, 5)
    return World(
        block_size=block_size,
        num_blocks=1 + least + len(specs) * rng.randint(0, 12),
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + rng.choice((0, 0, 3, 12)),
        max_prefill_chunk=rng.choice((0, 0, 1, 3, 4)),
        max_model_len=rng.choice((12, 24)),
        depth=rng.randint(1, 3),
        policy=rng.choice(("fcfs", "priority")),
        preempt_every_step=rng.random() < 0.15,
        enable_prefix_caching=rng.random() < 0.8,
        groups=tuple(specs),
        sharing_thresholds=rng.choice((ANYTHING, SharingThresholds(4, 1, 1), SharingThresholds(2, 4, 8))),
    )


def mixed_groups(rng: random.Random, block_size: int) -> list[KVGroupSpec]:
    """Layers that see everything, and layers with windows, in pages of the same bytes."""
    specs = [
        windowed(block_size * rng.choice((1, 1, 2, 3)), rng.choice((1, 2, 3, 4, 5, 7, 8, 13)))
        for _ in range(rng.choice((1, 1, 1, 2)))
    ]
    if rng.random() < 0.75:
        full = KVGroupSpec("full", block_size * rng.choice((1, 1, 2, 5)), 1, 1, 8, 2)
        specs.insert(rng.randint(0, len(specs)), full)
    else:
        specs.append(history(rng.choice((4, 16, 64))))
    return specs


def with_states(world: World, rng: random.Random) -> World:
    """The same with a group that keeps states, or with such alone."""
    pages, others = rng.choice((1, 1, 2, 3)), world.specs
    if rng.random() < 0.25:
        others = [history(rng.choice((4, 16, 64)))]
    specs = others.copy()
    specs.insert(rng.randint(0, len(others)), state(pages))
    least = 1 + sum(spec.most_blocks(2) for spec in specs)
    num_blocks = max(world.num_blocks, least) + pages * rng.randint(0, 4)
    return replace(world, groups=tuple(specs), num_blocks=num_blocks)


def random_request(
    rng: random.Random, number: int, max_len: int, prefixes: list[list[int]], longest: int = 8
) -> EngineRequest:
    prefix = rng.choice(prefixes)
    prompt = prefix[: rng.randint(0, len(prefix))] + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 3))]
    prompt = (prompt or [1])[: max_len - 1]
    max_tokens = rng.randint(1, longest)
    options: dict[str, Any] = {}
    if rng.random() < 0.2:
        options["min_tokens"] = rng.randint(0, max_tokens)
    if rng.random() < 0.2:
        options["logprobs"] = 0
    if rng.random() < 0.15:
        options["prompt_logprobs"] = 0
    if rng.random() < 0.1:
        options["skip_reading_prefix_cache"] = True
    if rng.random() < 0.3:
        options["output_kind"] = RequestOutputKind.FINAL_ONLY
    if rng.random() < 0.3:
        options["constraint"] = random_constraint(rng)
        max_tokens = rng.randint(1, 12)
        options.pop("min_tokens", None)  # the device does not know of it
    return make_request(
        f"r{number}",
        prompt,
        max_tokens,
        number=number,
        stops=rng.choice(((), (0,), (0, 3, 5))),
        priority=rng.choice((0, 0, 1, -1, BACKGROUND)),
        cache_salt=rng.choice((None, None, None, "salt")),
        **options,
    )


def crowded_world(rng: random.Random, *, mixed: bool) -> World:
    """Room for many who decode together."""
    seqs, block_size = rng.randint(4, 12), rng.choice((1, 2, 4))
    specs = mixed_groups(rng, block_size) if mixed else groups(block_size)
    return World(
        block_size=block_size,
        num_blocks=len(specs) * rng.randint(20, 90),
        groups=tuple(specs),
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + rng.choice((8, 40)),
        max_model_len=48,
        depth=rng.randint(1, 3),
        policy=rng.choice(("fcfs", "priority")),
        preempt_every_step=rng.random() < 0.1,
        sharing_thresholds=rng.choice((ANYTHING, SharingThresholds(4, 4, 8), SharingThresholds(2, 4, 16))),
    )


def branching(rng: random.Random, count: int) -> list[list[int]]:
    """Beginnings of which many begin like another one."""
    stems: list[list[int]] = [[]]
    for _ in range(count):
        stem = rng.choice(stems)
        cut = rng.randint(len(stem) // 2, len(stem))
        stems.append(stem[:cut] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 14))])
    return stems[1:]


def with_drafts(world: World, rng: random.Random) -> World:
    """The same with drafts, and a budget that often has room for them."""
    num_drafts = rng.randint(1, 5)
    tokens = world.max_num_batched_tokens + rng.choice((0, num_drafts, num_drafts * world.max_num_seqs))
    return replace(world, num_drafts=num_drafts, max_num_batched_tokens=tokens, always_drafts=rng.random() < 0.7)


def random_life(
    seed: int,
    *,
    mixed: bool = False,
    deaths: float = 0.0,
    drafts: bool = False,
    adapters: bool = False,
    states: bool = False,
) -> Life:
    """Live through the trace of `seed`; any AssertionError is a bug.

    Args:
        mixed: several groups of layers, some of them with windows.
        deaths: of engines, a turn.
        drafts: rows may bring several tokens a step.
        adapters: of LoRA, more than there are slots.
        states: some layers keep one.
    """
    rng = random.Random(seed)
    crowded = rng.random() < 0.1
    world = crowded_world(rng, mixed=mixed) if crowded else random_world(rng, mixed=mixed)
    world = with_states(world, rng) if states else world
    world = with_drafts(world, rng) if drafts else world
    life = Life(replace(world, adapter_slots=rng.randint(1, 3)) if adapters else world)
    prefixes = branching(rng, 6 if crowded else 2)
    to_come = rng.randint(10, 30) if crowded else rng.randint(1, 7)
    number = 0
    while number < to_come or life.scheduler.has_work:
        while number < to_come and rng.random() < 0.5:
            request = random_request(rng, number, life.max_len, prefixes, longest=20 if drafts else 8)
            if adapters:
                request = msgspec.structs.replace(request, lora=rng.choice((None, *ADAPTERS)))
            life.add(request)
            number += 1
        if life.compiling and rng.random() < 0.3:
            life.bind(rng.choice(life.compiling))
        if life.open and rng.random() < 0.03:
            life.abort(rng.choice(list(life.open)))
        if rng.random() < 0.01:
            life.scheduler.reset_prefix_cache(rng.random() < 0.5)
        if rng.random() < deaths:
            life.die()
        if len(life.in_flight) < life.world.depth and rng.random() < 0.8:
            life.plan_if_any()
        else:
            life.turn()
        if rng.random() < 0.2:
            life.scheduler.check()
            life.check_windows()
        assert life.device.step < 5_000, f"{len(life.open)} requests do not end"
    life.run()
    life.check_empty()
    return life
