"""An obviously correct device and an obviously correct answer, to hold the scheduler against.

The reference answers each request alone: its next token is a function of everything before it. The device executes
plans: it keeps seats and block tables as the plans tell, and in every KV slot a fingerprint of all that the KV there
depends on (cache salt, every token up to it). A row may compute only if all slots it reads hold the fingerprints of
its own request's tokens; a window reads no others than those in it, and a state must be that of the token before. A
page belongs to the group that wrote to it last.
So sharing, chunking, preemption, running ahead and what windows give back must not change a single token.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.types.kv import MAX_TOKENS, KVGroupSpec
from quire.types.plan import Admit, PageCopies, PromptLogprobs, StepPlan, TokenMasks
from quire.types.request import EngineRequest, token_array
from quire.types.result import LogprobRows, StepResult
from quire.types.sampling import SamplingParams
from quire.types.structured import Constraint
from tests.scheduling.toy_grammar import EOS, VOCAB, Meaning, meaning, tokens_of


def groups(block_size: int, count: int = 1) -> list[KVGroupSpec]:
    return [KVGroupSpec("full", block_size, 1, 1, 8, 2) for _ in range(count)]


def windowed(block_size: int, window: int) -> KVGroupSpec:
    return KVGroupSpec("window", block_size, 1, 1, 8, 2, window=window)


def history(block_size: int) -> KVGroupSpec:
    return KVGroupSpec("history", block_size, 1, 1, 1, 4, planes=1)


def state(pages: int) -> KVGroupSpec:
    return KVGroupSpec("state", MAX_TOKENS, 1, 1, 1, 4, state_bytes=64, pages=pages)


def make_request(
    name: str,
    prompt: list[int],
    max_tokens: int,
    *,
    number: int = 0,
    stops: tuple[int, ...] = (EOS,),
    priority: int = 0,
    cache_salt: str | None = None,
    arrival: float = 0.0,
    constraint: Constraint | None = None,
    **params: Any,
) -> EngineRequest:
    """`number` identifies the request to the device: it travels as the seed."""
    return EngineRequest(
        id=name,
        token_ids=token_array(prompt),
        params=SamplingParams(max_tokens=max_tokens, **params),
        max_tokens=max_tokens,
        stop_token_ids=list(stops),
        eos_token_id=EOS,
        seed=number,
        priority=priority,
        cache_salt=cache_salt,
        arrival=arrival,
        constraint=constraint,
    )


@dataclass
class Reference:
    """One request answered alone."""

    spec: EngineRequest
    max_len: int  # tokens that fit, prompt included
    tokens: list[int] = field(init=False)  # prompt and answer, on past any stop up to the limit
    prints: list[int] = field(init=False)  # what the KV of each position depends on
    allowed: list[set[int] | None] = field(init=False)  # what may be sampled after so many tokens of output; None: all
    output: list[int] = field(init=False)
    finish: tuple[str, int | None] = field(init=False)
    is_aborted: bool = False  # what it may sample does not matter any more

    def __post_init__(self) -> None:
        spec = self.spec
        limit = min(len(spec.token_ids) + spec.max_tokens, self.max_len)
        num_prompt = len(spec.token_ids)
        self.tokens, self.prints, self.allowed = [], [], []
        self.output, self.finish = [], ("length", None)
        is_over = self._is_over()
        salt = (spec.cache_salt or "") + (spec.lora.key if spec.lora else "")
        state = zlib.crc32(salt.encode())  # 0 without; the same in every process
        for position in range(limit):
            if position < len(spec.token_ids):
                token = spec.token_ids[position]
            else:
                self.allowed.append(None if is_over else self._meaning().allowed)
                choice = self.allowed[-1]
                token = (state >> 7) % VOCAB if choice is None else sorted(choice)[(state >> 7) % len(choice)]
            self.tokens.append(token)
            state = hash((state, token))
            self.prints.append(state)
            if position >= num_prompt and not is_over:
                self.output.append(token)
                is_over = self._is_over()

    def _is_over(self) -> bool:
        """Whether the output ends here, other than by its length."""
        spec, output, now = self.spec, self.output, self._meaning()
        stops = output and output[-1] in spec.stop_token_ids and len(output) >= spec.params.min_tokens
        if stops and not now.outlives_stop:
            self.finish = ("stop", None if output[-1] == EOS else output[-1])
        elif now.is_over:
            self.finish = ("stop", None)
        return self.finish[0] == "stop"

    def _meaning(self) -> Meaning:
        constraint = self.spec.constraint or Constraint()
        return meaning(constraint, self.output, self.spec.stop_token_ids)


@dataclass
class Seat:
    admit: Admit
    reference: Reference
    num_computed: int
    last_token: int = -1


Row = tuple[int, Seat, int, bool, int]  # seat number, seat, tokens, whether it samples, tokens that it does
WRONG = -1  # the fingerprint of a draft that was not what came, and its token


class Device:
    def __init__(
        self,
        specs: Sequence[KVGroupSpec],
        max_seats: int,
        max_tokens: int,
        max_chunk: int,
        draft_seed: int | None = None,
    ) -> None:
        """draft_seed: of how many drafts turn out right; None: nothing is drafted."""
        self.chance = None if draft_seed is None else random.Random(draft_seed)
        self.num_drafted_rows = self.num_accepted = 0
        self.specs, self.max_seats = specs, max_seats
        self.max_tokens, self.max_chunk = max_tokens, max_chunk
        self.references: dict[int, Reference] = {}  # by request number
        self.seats: dict[int, Seat] = {}
        self.adapters: dict[int, str] = {}  # keys by slot
        self.tables: list[dict[tuple[int, int], int]] = [{} for _ in specs]
        self.pages: dict[int, tuple[int, dict[int, int]]] = {}  # by block: the group that wrote there, its fingerprints
        self.prefixes: list[tuple[int, set[int]]] = []  # (shared tokens, seats) a group, as told and not yet released
        self.decodes: list[tuple[int, Admit]] = []  # of the step before
        self.num_computed = 0  # tokens ever computed
        self.num_groupings = 0  # times that prefixes were told
        self.num_shared_rows = 0  # decode rows that were in a group
        self.num_masks = 0
        self.num_copies = 0  # of states
        self.step = -1
        self._awaiting: tuple[StepPlan, list[Row]] | None = None

    def execute(self, plan: StepPlan) -> StepResult | None:
        """None: the plan awaits masks, which `mask` takes."""
        assert self._awaiting is None, "a step that has not sampled yet is overtaken"
        assert plan.step == self.step + 1, "steps must come in order"
        self.step += 1
        self._copy_states(plan.restores)  # before a history of ids is written to a page that a copy had
        self._take_news(plan)
        self._check_prefixes(plan)
        tokens, news = plan.token_ids.tolist(), []
        assert len(set(plan.seats.tolist())) == plan.num_rows, "a seat has two rows"
        drafts = plan.num_drafts * plan.num_decodes
        assert int(plan.num_tokens.sum()) + drafts <= self.max_tokens, "the token budget is overrun"
        assert not drafts or plan.num_decodes == plan.num_rows, "drafts beside catch-up rows"
        assert len(tokens) == int(plan.num_tokens[plan.num_decodes :].sum()), "token_ids and num_tokens differ"
        for row, (seat_number, count, samples) in enumerate(
            zip(plan.seats.tolist(), plan.num_tokens.tolist(), plan.samples.tolist(), strict=True)
        ):
            seat = self.seats[seat_number]
            if row < plan.num_decodes:
                assert count == 1, "a decode row has one token"
                assert samples, "a decode row samples"
                if self.chance is not None and seat.num_computed + 1 >= seat.admit.limit:
                    news.append((seat_number, seat, 0, True, 0))  # its last token came with drafts, in the step before
                    continue
                right, wrong = self._draft(plan, seat)
                assert seat.num_computed + 1 + right + wrong <= plan.max_seq_len, "max_seq_len is no upper bound"
                start = seat.num_computed + 1
                ids = [seat.last_token, *seat.reference.tokens[start : start + right], *[WRONG] * wrong]
                self._write(seat_number, seat, ids)
                news.append((seat_number, seat, 1 + right, samples, 1 + right))
                continue
            assert 1 <= count <= self.max_chunk, f"a chunk of {count} tokens"
            ids, tokens = tokens[:count], tokens[count:]
            self._write(seat_number, seat, ids)
            news.append((seat_number, seat, count, samples, int(samples)))
        # Only after all writes: a row may read what its neighbour computes in this very step.
        for row in news:
            self._read(plan, *row[:4])
        self._copy_states(plan.snapshots)
        self.num_computed += int(plan.num_tokens.sum())
        if plan.awaits_masks:
            self._awaiting = plan, news
            return None
        return self._sample(plan, news, {})

    def mask(self, masks: TokenMasks) -> StepResult:
        assert self._awaiting is not None, "masks that nobody waits for"
        plan, news = self._awaiting
        self._awaiting = None
        assert masks.step == plan.step
        rows = masks.rows.tolist()
        assert rows == sorted(set(rows))
        assert all(plan.samples[row] for row in rows)
        self.num_masks += len(rows)
        return self._sample(plan, news, {row: tokens_of(bits) for row, bits in zip(rows, masks.bits, strict=True)})

    def _draft(self, plan: StepPlan, seat: Seat) -> tuple[int, int]:
        """Drafts of a row that will be right, and others behind them."""
        if not plan.num_drafts or not seat.admit.may_draft or self.chance is None:
            return 0, 0
        assert seat.admit.limit == len(seat.reference.tokens)
        count = self.chance.randint(0, max(0, min(plan.num_drafts, seat.admit.limit - seat.num_computed - 2)))
        right = self.chance.choice((0, count, self.chance.randint(0, count)))
        self.num_drafted_rows += 1
        self.num_accepted += right
        return right, count - right

    def _sample(self, plan: StepPlan, news: list[Row], masks: dict[int, set[int]]) -> StepResult:
        sampled = [self._tokens(*line, masks.get(row)) for row, line in enumerate(news)]
        tokens = np.full((plan.num_rows, 1 + plan.num_drafts), -1, np.int32)
        for line, ids in zip(tokens, sampled, strict=True):
            line[: len(ids)] = ids
        counts = np.array([len(ids) for ids in sampled], np.int32)
        return StepResult(
            step=plan.step,
            tokens=tokens,
            counts=counts,
            logprobs=self._logprobs(plan, sampled),
            prompt_logprobs=self._prompt_logprobs(plan, news),
            drafted=None if self.chance is None else np.maximum(counts - 1, 0),
            matched=None if self.chance is None else np.maximum(counts - 1, 0),
        )

    def _take_news(self, plan: StepPlan) -> None:
        for number in plan.releases:
            del self.seats[number]
            for _, members in self.prefixes:
                members.discard(number)
            for table in self.tables:  # a released row is wiped, so that nothing relies on what it held
                for key in [key for key in table if key[0] == number]:
                    del table[key]
        for admit in plan.admits:
            assert 1 <= admit.seat <= self.max_seats
            assert admit.seat not in self.seats, f"seat {admit.seat} is taken twice"
            reference = self.references[admit.seed]
            assert admit.num_prompt == len(reference.spec.token_ids)
            self.seats[admit.seat] = Seat(admit, reference, admit.num_computed)
            keeps = any(spec.kind == "history" for spec in self.specs)
            told = [] if admit.history is None else admit.history.tolist()
            assert told == reference.tokens[: admit.num_computed if keeps else 0], "not the tokens computed"
        for change in plan.adapters:
            self.adapters[change.slot] = change.adapter.key
        for seat in self.seats.values():
            wanted = seat.reference.spec.lora
            there = self.adapters[seat.admit.adapter] if seat.admit.adapter else None
            assert there == (wanted and wanted.key), f"{seat.reference.spec.id} has another's adapter"
        for spec, table, new in zip(self.specs, self.tables, plan.blocks, strict=True):
            for seat_number, index, block in zip(
                new.seats.tolist(), new.index.tolist(), new.blocks.tolist(), strict=True
            ):
                assert block > 0, "the null block was handed out"
                is_empty = self.chance is not None and index * spec.block_size >= self.seats[seat_number].num_computed
                assert (seat_number, index) not in table or is_empty, "a table entry was given twice"
                table[seat_number, index] = block
        for group, spec in enumerate(self.specs):
            if spec.kind == "history":
                for admit in plan.admits:
                    for position in range(admit.num_computed):
                        self._put(group, admit.seat, position, self.seats[admit.seat].reference.prints[position])

    def _check_prefixes(self, plan: StepPlan) -> None:
        """Groups are told when they change only, and whoever shares a prefix really has the same blocks there."""
        rows = plan.seats[: plan.num_decodes].tolist()
        decodes = [(number, self.seats[number].admit) for number in rows]
        if (told := plan.prefixes) is not None:
            assert decodes != self.decodes, "groups are told anew for the same rows"
            before = {(count, frozenset(members)) for count, members in self.prefixes}
            starts = told.starts.tolist()
            assert starts[0] == 0
            assert starts[-1] == len(told.seats) == len(set(told.seats.tolist())), "a seat is in two groups"
            assert set(told.seats.tolist()) <= set(rows), "a seat that does not decode is in a group"
            self.prefixes = [
                (count, set(told.seats[start:end].tolist()))
                for count, start, end in zip(told.num_tokens.tolist(), starts[:-1], starts[1:], strict=True)
            ]
            assert before != {(count, frozenset(members)) for count, members in self.prefixes}, "no news"
            assert all(len(members) > 1 for _, members in self.prefixes)
            self.num_groupings += 1
        self.decodes = decodes
        for count, members in self.prefixes:
            group = next(i for i, spec in enumerate(self.specs) if spec.kind == "full")
            table, size = self.tables[group], self.specs[group].block_size
            assert count > 0
            assert count % size == 0
            present = members & set(rows)
            prefixes = {tuple(table[number, i] for i in range(count // size)) for number in present}
            assert len(prefixes) <= 1, f"seats {present} do not share {count} tokens"
            assert all(self.seats[number].num_computed >= count for number in present), "no token is left of their own"
            self.num_shared_rows += len(present)

    def _write(self, number: int, seat: Seat, ids: list[int]) -> None:
        reference = seat.reference
        for position, token in enumerate(ids, seat.num_computed):
            right = reference.tokens[position]
            assert token in (right, WRONG), f"{reference.spec.id} is fed a foreign token at {position}"
            for group, spec in enumerate(self.specs):
                if spec.pages:
                    self._move_on(group, number, position, reference)
                else:
                    self._put(group, number, position, WRONG if token == WRONG else reference.prints[position])

    def _move_on(self, group: int, number: int, position: int, reference: Reference) -> None:
        """A state stands for all tokens up to the last, and takes the next one; the first takes none before."""
        for page in range(self.specs[group].pages):
            block = self.tables[group][number, page]
            owner, prints = self.pages.get(block, (-1, {}))
            found = prints.get(0) if owner == group else None
            before = reference.prints[position - 1] if position else found
            assert found == before, f"{reference.spec.id} goes on from a foreign state at {position}"
            self.pages[block] = group, {0: reference.prints[position]}

    def _copy_states(self, copies: PageCopies | None) -> None:
        """One after the other, each read wholly before it is written. Whether it was a state shows when it is used."""
        if copies is None:
            return
        assert all(spec.kind != "state" or copies.sources.shape[1] == spec.pages for spec in self.specs)
        for sources, targets in zip(copies.sources.tolist(), copies.targets.tolist(), strict=True):
            read = [(group, prints.copy()) for group, prints in (self.pages[source] for source in sources)]
            self.pages.update(zip(targets, read, strict=True))
        self.num_copies += len(copies.sources)

    def _put(self, group: int, number: int, position: int, print_: int) -> None:
        size = self.specs[group].block_size
        block = self.tables[group][number, position // size]
        if self.pages.get(block, (-1, {}))[0] != group:  # what another group kept in its bytes is gone
            self.pages[block] = group, {}
        self.pages[block][1][position % size] = print_

    def _read(self, plan: StepPlan, number: int, seat: Seat, count: int, samples: bool) -> None:
        reference, length = seat.reference, seat.num_computed + count
        for group, (spec, table) in enumerate(zip(self.specs, self.tables, strict=True)):
            seen_from = max(0, seat.num_computed - spec.window + 1) if spec.window else 0
            if spec.pages:
                pages = [self.pages[table[number, page]] for page in range(spec.pages)]
                assert pages == [(group, {0: reference.prints[length - 1]})] * spec.pages, "a state is shared"
                continue
            for position in range(seen_from, length):
                owner, prints = self.pages[table[number, position // spec.block_size]]
                found = prints.get(position % spec.block_size) if owner == group else None
                assert found == reference.prints[position], f"{reference.spec.id} reads foreign KV at {position}"
        assert length <= plan.max_seq_len, "max_seq_len is no upper bound"
        if count:
            assert length < len(reference.tokens), f"{reference.spec.id} overruns its limit"
        seat.num_computed = length
        assert not samples or length >= len(reference.spec.token_ids), f"{reference.spec.id} samples inside its prompt"

    def _tokens(
        self, _number: int, seat: Seat, _count: int, _samples: bool, wanted: int, mask: set[int] | None
    ) -> list[int]:
        if not wanted:
            return []
        reference = seat.reference
        allowed = reference.allowed[seat.num_computed - len(reference.spec.token_ids)]
        assert reference.is_aborted or mask == allowed, f"{reference.spec.id} may sample {mask}, it should be {allowed}"
        tokens = reference.tokens[seat.num_computed + 1 - wanted : seat.num_computed + 1]
        seat.last_token = tokens[-1]
        return tokens

    def _logprobs(self, plan: StepPlan, sampled: list[list[int]]) -> LogprobRows | None:
        rows: list[int] = []
        tokens: list[int] = []
        for row, number in enumerate(plan.seats.tolist()):
            if plan.samples[row] and self.seats[number].reference.spec.params.logprobs is not None:
                lines = sampled[row] + [WRONG] * (1 + plan.num_drafts - len(sampled[row]))
                rows += [row] * len(lines)
                tokens += lines
        return _lines(rows, tokens)

    def _prompt_logprobs(self, plan: StepPlan, news: list[Row]) -> LogprobRows | None:
        rows: list[int] = []
        tokens: list[int] = []
        for attachment in plan.attachments:
            if not isinstance(attachment, PromptLogprobs):
                continue
            for row, next_id in zip(attachment.rows.tolist(), attachment.next_ids.tolist(), strict=True):
                _, seat, count, *_ = news[row]
                prompt = seat.reference.spec.token_ids
                ids = [*prompt[seat.num_computed - count + 1 : seat.num_computed], next_id]
                tokens += [token for token in ids if token >= 0]
                rows += [row] * (len(tokens) - len(rows))
        return _lines(rows, tokens)


def _lines(rows: list[int], tokens: list[int]) -> LogprobRows | None:
    """Two columns, the second padding; the log-probability is a function of the token."""
    if not rows:
        return None
    ids = np.array([[token, -1] for token in tokens], np.int32)
    return LogprobRows(
        rows=np.array(rows, np.int32),
        counts=np.ones(len(rows), np.int32),
        token_ids=ids,
        logprobs=-ids.astype(np.float32),
        ranks=np.ones(len(rows), np.int32),
    )
