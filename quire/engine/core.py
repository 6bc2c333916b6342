"""The loop: requests in, plans out to the executor, results settled, outputs back. One thread, no waiting but for work.

Up to `resolved.depth` plans are in flight: while the device runs one step, the next is planned from counters that
advance at plan time. Depth 1 is the same loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from quire.config.parallel.expert_balance import ExpertBalance
from quire.config.resolve import Resolved
from quire.engine.adapters import HostedAdapters
from quire.engine.grammars import Grammars
from quire.engine.messages import (
    Abort,
    Aborted,
    Add,
    EngineInfo,
    FromCore,
    News,
    StopCore,
    Suspects,
    ToCore,
    Trial,
    UtilityCall,
    UtilityReply,
)
from quire.engine.steps import Steps
from quire.engine.totals import Totals
from quire.executor.base import Executor, StepFuture, failed_step
from quire.foundation.child import Failure
from quire.foundation.errors import ConfigError, EngineDeadError, InputError, QuireError
from quire.foundation.log import get_logger
from quire.kv.block_times import BlockTimes
from quire.observe.flight_record import record_folder, write_record
from quire.observe.profiling import PhaseClock
from quire.observe.work import WorkMeter
from quire.scheduling.drafting import Drafting
from quire.scheduling.scheduler import Scheduler
from quire.types.adapter import Adapter
from quire.types.kv import WorkerReport, keeps_state
from quire.types.output import (
    ABORTED,
    DRAINING,
    INVALID_REQUEST,
    QUEUE_FULL,
    EngineOutput,
    EngineOutputs,
    EngineStats,
)
from quire.types.plan import StepPlan
from quire.types.request import EngineRequest
from quire.types.view import EngineView, StepView

PLAN_MARGIN = 0.001  # seconds before a step ends when the next one should be on the device, however late it is planned
# A result is read after the hold, so a prediction that is too long would confirm itself. It must shrink, and soon: a
# process that was stopped for a minute must not hold every step for one.
MARGIN_SHARE = 0.1  # … and of the time that the steps in flight take
LONGEST_HOLD = 0.1  # seconds
# Statistics travel with the outputs this often: they are the heartbeat of a busy engine, and what its door goes by.
STATS_SECONDS = 0.2
WORD_SECONDS = 0.005  # for a message to leave this process, which may not live long
_log = get_logger(__name__)


class Inbox(Protocol):
    """Where messages for the core arrive: a socket, or a queue within the process."""

    def drain(self) -> list[ToCore]:
        """All that has arrived; never waits."""
        ...

    def wait(self, timeout: float | None, *sentinels: int) -> None:
        """Sleep until a message is there, one of the `sentinels` (file descriptors) is readable or `timeout` seconds
        passed."""
        ...


class StepError(EngineDeadError):
    """A step failed as a whole, and so does the engine: what the device holds cannot be trusted any more."""


class SubmittedStep(NamedTuple):
    plan: StepPlan
    future: StepFuture
    prompt_tokens: int
    work: float  # see PrefillBudget
    submitted: float  # time.perf_counter() just before


class EngineCore:
    """Owns the scheduler and drives the executor. Everything here runs in the one thread that calls `turn`."""

    def __init__(
        self,
        resolved: Resolved,
        executor: Executor,
        clock: PhaseClock | None = None,
        before: EngineStats | None = None,
    ) -> None:
        """before: the last report of the engine whose place this one takes; what it counted is counted on."""
        self.resolved = resolved
        self.stopped = False
        self._executor = executor
        self._grammars = Grammars(resolved)
        self._adapters = HostedAdapters(resolved.config.lora, executor)
        self._in_flight: deque[SubmittedStep] = deque()
        self._last_result = 0.0  # time.perf_counter() when the latest step was done
        self._is_busy = False  # there has been work ever since
        self._drained_at = 0.0  # time.monotonic() when the inbox was last emptied
        self._planning_seconds = 0.0  # that the latest plan took, its launch included
        self._untold: list[EngineOutput] = []  # ends of requests outside of any step; told with the next outputs
        self._num_new = 0  # requests added since the last plan
        self._draining: list[int] = []  # calls that are answered when all work is done
        self._failure: EngineDeadError | None = None
        self._suspects = Suspects([], was_killed=False)  # of the failure
        self._waiting_for_trial: dict[str, EngineRequest] = {}
        self._on_trial: str | None = None
        self._trial_is_fresh = False  # nothing has been computed since it was told
        self._before = Totals(before)
        self._can_prepare = False
        self._clock = clock or PhaseClock()
        self._logs_requests = resolved.config.observe.enable_log_requests
        self._num_steps = 0
        self._balance_steps = ExpertBalance.read(resolved.config.runtime).step_interval  # 0: never
        self._steps = Steps()
        self._meter: WorkMeter | None = None
        self._block_times: BlockTimes | None = None
        self._stats_due = 0.0
        self._stats_are_old = False  # something has happened since they were told
        self._utilities: dict[str, Callable[..., Any]] = {
            "ping": self._ping,
            "stats": self.stats,
            "look": lambda *args: [self.look(*args)],
            "record": self.record,
            "worker": executor.call,
            "workers": executor.call_each,
            "profile": lambda *args: executor.call("profile", *args),
            "load_adapter": lambda *adapter: self._adapters.load(Adapter(*adapter)),
            "drop_adapter": self._adapters.drop,
            "pin_adapter": self._adapters.pin,
        }

    def start(self) -> EngineInfo:
        """Bring the worker up. Raises ConfigError if the model cannot run here."""
        self._grammars.start()
        report = self._executor.start()
        self._scheduler = _make_scheduler(self.resolved, report, self._grammars)
        self._can_prepare = report.can_prepare
        self._utilities["reset_prefix_cache"] = self._scheduler.reset_prefix_cache
        self._utilities["check"] = self._scheduler.check
        self._utilities["life"] = self._scheduler.life
        if self.resolved.config.observe.enable_mfu_metrics:
            self._meter = WorkMeter(report.model_work, report.prompt_cost, report.groups)
        observe = self.resolved.config.observe
        if observe.kv_cache_metrics:
            self._block_times = self._scheduler.kv.pool.times = BlockTimes(observe.kv_cache_metrics_sample)
        self._clock.begin()
        return EngineInfo(self.resolved, report)

    def shutdown(self) -> None:
        self.stopped = True
        self._grammars.close()
        try:
            self._executor.shutdown()
        except Exception:
            _log.exception("the worker did not shut down cleanly")

    @property
    def has_work(self) -> bool:
        """Whether there is something to do; requests that wait for their grammar alone are nothing to do."""
        return bool(
            self._in_flight or self._untold or self._scheduler.has_work or self._can_try or self._adapters.is_awaited
        )

    @property
    def _can_try(self) -> bool:
        """Whether the next suspect may come in."""
        if not self._waiting_for_trial:
            return False
        return self._on_trial is None or self._scheduler.has_advanced(self._on_trial)

    # -- messages ------------------------------------------------------------------------------------------------

    def turn(self, inbox: Inbox, timeout: float | None) -> list[FromCore]:
        """Take what has arrived, make one step if there is work, and return what is to be sent.

        Sleeps at most `timeout` seconds (None: as long as it takes), and only if there is nothing to do.
        After a failure the last message is a Failure and `stopped` is set.
        """
        self._clock.lap("outbox")
        if self._trial_is_fresh:
            time.sleep(WORD_SECONDS)
            self._trial_is_fresh = False
        if not self.has_work:
            self._is_busy = False
            sentinels = (*self._grammars.sentinels, *self._executor.sentinels)
            inbox.wait(0.0 if self._can_prepare or self._grammars.can_prepare else timeout, *sentinels)
            self._clock.lap("idle")
        self._hold()
        self._drained_at = time.monotonic()
        messages = inbox.drain()
        replies = [reply for message in messages if (reply := self.handle(message)) is not None]
        replies += self._take_adapters()
        self._take_grammars()
        if self._can_try:
            return [*replies, self._try_suspect()]
        self._clock.lap("inbox")
        outputs = self.step() if self.has_work else self._idle(prepare=not messages)
        if outputs.tokens or outputs.special or outputs.stats is not None:
            replies.append(News(outputs))
        if self._draining and not self.has_work and not self._scheduler.num_compiling:
            replies.extend(UtilityReply(number) for number in self._draining)
            self._draining.clear()
        if self._failure is not None:
            self.stopped = True
            for request_id in self._scheduler.request_ids:
                self._log_end(request_id, "error")
            if self._untold:
                replies.append(News(EngineOutputs(special=self._untold)))
            replies += [self._suspects, Failure.of(self._failure)]
        return replies

    def handle(self, message: ToCore) -> FromCore | None:
        """Do what one message asks; returns what must be answered at once."""
        match message:
            case Add(request, _, suspect) if suspect:
                self._waiting_for_trial[request.id] = request
            case Add(request, again):
                self.add(request, again=again)
            case Abort(ids, reason):
                self.abort(ids, reason)
                return Aborted(ids)
            case UtilityCall(number, "drain", _):
                self._draining.append(number)
            case UtilityCall(number, "load_adapter", args) if self._is_computing and not self._adapters.has(
                Adapter(*args)
            ):
                self._adapters.begin(Adapter(*args), number)
            case UtilityCall(number, method, args):
                return self._call(number, method, args)
            case StopCore():
                self.abort(self._scheduler.request_ids)
                self._failure = EngineDeadError("the engine was shut down")
        return None

    def add(self, request: EngineRequest, *, again: bool = False) -> None:
        """Queue a request; one that is refused gets an error output from the next step.

        again: it was let in before, and is not refused for want of room.
        """
        self._stats_are_old = True
        if self._logs_requests:
            extra = {"request_id": request.id, "prompt": len(request.token_ids), "max_tokens": request.max_tokens}
            _log.info("request came", extra=extra)
        limit = self.resolved.config.schedule.max_num_queued_reqs
        if self._draining and not again:
            self._refuse(request.id, DRAINING, "the engine is finishing its work and takes no new requests")
        elif limit is not None and not again and self._is_queue_full(limit):
            self._refuse(request.id, QUEUE_FULL, f"the queue is full: max_num_queued_reqs is {limit}")
        else:
            if request.lora is not None and not self._adapters.has(request.lora) and self._is_computing:
                self._adapters.begin(request.lora, request)
            else:
                self._queue(request)

    def _queue(self, request: EngineRequest) -> None:
        try:
            if request.lora is not None:
                self._adapters.load(request.lora)
            self._scheduler.add(request)
        except InputError as error:
            self._refuse(request.id, INVALID_REQUEST, error.message, error.param)
            return
        except ConfigError as error:  # of the adapter
            self._refuse(request.id, INVALID_REQUEST, str(error), "lora_request")
            return
        if request.constraint is not None and request.constraint.grammar is not None:
            self._grammars.ask(request.id, request.constraint.grammar)
        else:
            self._num_new += 1

    @property
    def _is_computing(self) -> bool:
        """Whether somebody would be held up by what takes long."""
        return bool(self._in_flight or self._scheduler.has_work)

    def _take_adapters(self) -> list[UtilityReply]:
        """Requests whose adapter has been read join the queue; those for which it cannot be had end. Calls are
        answered."""
        replies: list[UtilityReply] = []
        try:
            served = self._adapters.take_read(wait=not self._is_computing)
        except EngineDeadError as error:
            self._fail(error)
            return replies
        for who, problem in served:
            if isinstance(who, int):
                replies.append(UtilityReply(who, failure=None if problem is None else Failure.of(problem)))
            elif problem is None:
                self._queue(who)
            else:
                self._refuse(who.id, INVALID_REQUEST, str(problem), "lora_request")
        return replies

    def abort(self, ids: Sequence[str], reason: str = ABORTED) -> None:
        """End requests and free what they hold; unknown ids are ignored."""
        self._stats_are_old = True
        ended = self._scheduler.abort(ids)
        self._grammars.forget(ids)
        ended += self._adapters.forget(ids)
        gone = set(ids)
        for request_id in self._waiting_for_trial.keys() & gone:
            del self._waiting_for_trial[request_id]
            ended.append(request_id)
        ended += [output.request_id for output in self._untold if output.request_id in gone]
        self._untold = [output for output in self._untold if output.request_id not in gone]
        for request_id in ended:
            self._log_end(request_id, reason)

    def _try_suspect(self) -> Trial:
        """Requests that engines may have died of come in one by one: should it happen again, it is known of which.

        To be told before anything else is done.
        """
        self._on_trial = next(iter(self._waiting_for_trial))
        self.add(self._waiting_for_trial.pop(self._on_trial), again=True)
        self._trial_is_fresh = True
        return Trial(self._on_trial)

    def _log_end(self, request_id: str, reason: str) -> None:
        if self._logs_requests:
            _log.info("request ended", extra={"request_id": request_id, "reason": reason})

    def _is_queue_full(self, limit: int) -> bool:
        """Requests that no plan has looked at yet wait only if there is no seat for them or others wait already."""
        stats = self._scheduler.stats()
        others_wait = stats.num_waiting - self._scheduler.num_compiling > self._num_new
        return stats.num_waiting + self._adapters.num_requests >= limit + (
            0 if others_wait else self.resolved.max_num_seqs - stats.num_running
        )

    def _take_grammars(self) -> None:
        """Requests whose grammar has come join the queue; those whose grammar is wrong end."""
        for request_id, grammar in self._grammars.poll():
            try:
                if isinstance(grammar, InputError):
                    self._scheduler.abort([request_id])
                    raise grammar
                end = self._scheduler.bind(request_id, grammar.matcher)
            except InputError as error:
                self._refuse(request_id, INVALID_REQUEST, error.message, error.param)
                continue
            if end is not None:
                self._untold.append(end)
            else:
                self._num_new += 1

    def _refuse(self, request_id: str, reason: str, message: str, param: str | None = None) -> None:
        output = EngineOutput(
            request_id=request_id, finish_reason="error", stop_reason=reason, error=message, error_param=param
        )
        self._untold.append(output)

    def _call(self, number: int, method: str, args: list[Any]) -> UtilityReply:
        try:
            if method not in self._utilities:
                raise InputError(f"the engine has no utility {method!r} (it has: {', '.join(self._utilities)}, drain)")
            return UtilityReply(number, msgspec.to_builtins(self._utilities[method](*args)))
        except EngineDeadError as error:
            self._fail(error)
            return UtilityReply(number, failure=Failure.of(error))
        except Exception as error:
            if not isinstance(error, QuireError):
                _log.exception("call %s failed", method)
            return UtilityReply(number, failure=Failure.of(error))

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self) -> EngineOutputs:
        """Plan and submit while there is room, then wait for the oldest step in flight and settle it."""
        untold, self._untold = self._untold, []
        news = EngineOutputs()
        try:
            self._submit_plans()
            if self._in_flight:
                news = self._settle_oldest()
            elif self._scheduler.has_work:
                raise EngineDeadError("internal error: requests are waiting, but the scheduler finds nothing to do")
        except Exception as error:
            self._fail(error)
        except BaseException:
            self._fail(InterruptedError("in the middle of a step"))
            raise
        if self._logs_requests:
            for output in (*untold, *news.special):
                if output.finish_reason is not None:
                    self._log_end(output.request_id, output.finish_reason)
        self._stats_are_old = True
        return EngineOutputs(
            ids=news.ids,
            tokens=news.tokens,
            counts=news.counts,
            special=untold + news.special,
            stats=self._due_stats(),
        )

    def _hold(self) -> None:
        """Plan no sooner than the device needs it: whoever comes meanwhile is in the next step, not behind it."""
        if not 0 < len(self._in_flight) < self.resolved.depth or not self._scheduler.can_be_late:
            return
        ends = self._in_flight[0].submitted
        for step in self._in_flight:
            ends = max(ends, self._last_result, step.submitted) + self._scheduler.prefill_budget.predict(step.work)
        now = time.perf_counter()
        pause = ends - now - max(PLAN_MARGIN, MARGIN_SHARE * (ends - self._in_flight[0].submitted))
        pause = min(pause - self._planning_seconds, LONGEST_HOLD)
        if pause > 0:
            time.sleep(pause)
            self._clock.lap("hold")

    def _submit_plans(self) -> None:
        while len(self._in_flight) < self.resolved.depth:
            began = time.perf_counter()
            plan = self._scheduler.plan()
            self._num_new = 0
            self._clock.lap("plan")
            if plan is None:
                return
            self._host(plan)
            submitted = time.perf_counter()
            prompt_tokens = int(plan.num_tokens.sum()) - plan.num_decodes
            future = self._executor.submit(plan)
            self._in_flight.append(SubmittedStep(plan, future, prompt_tokens, self._scheduler.planned_work, submitted))
            self._planning_seconds = time.perf_counter() - began
            self._clock.lap("submit")
            self._send_masks()

    def _host(self, plan: StepPlan) -> None:
        """See to it that the workers have the adapters that take slots in this step. Requests for one that has gone
        meanwhile end; what the step computes of them means nothing."""
        for adapter, error in self._adapters.load_all(change.adapter for change in plan.adapters):
            for request_id in self._scheduler.abort(self._scheduler.ids_with(adapter)):
                self._refuse(request_id, INVALID_REQUEST, str(error), "lora_request")

    def _send_masks(self) -> None:
        """Let the step submitted last go on, if it awaits masks and all tokens before it are known.

        The device is still busy with its logits.
        """
        masks = self._scheduler.masks()
        if masks is not None:
            self._clock.lap("mask")
            self._executor.mask(masks)
            self._clock.lap("submit")

    def _settle_oldest(self) -> EngineOutputs:
        plan, future, prompt_tokens, work, submitted = self._in_flight[0]
        try:
            result = future.result()
        except EngineDeadError:
            raise  # the worker is gone: nothing says that these requests were the reason
        except Exception as error:
            _log.exception("step %d failed", plan.step)
            result = failed_step(plan.step, error)
        self._clock.lap("wait")
        if result.error is not None:
            raise StepError(f"step {plan.step} failed: {result.error}")
        self._in_flight.popleft()
        now = time.perf_counter()
        seconds = now - max(submitted, self._last_result)
        between = now - self._last_result if self._is_busy else seconds
        predicted = self._scheduler.prefill_budget.predict(work)
        self._scheduler.observe(work, prompt_tokens, seconds, between)
        if self._meter is not None:
            self._meter.add(self._scheduler.work_of_oldest())
        outputs = self._scheduler.settle(plan, result)
        self._num_steps += 1
        if self._balance_steps and self._num_steps % self._balance_steps == 0:
            self._executor.call("rebalance_experts")
        gap = max(0.0, submitted - self._last_result) if self._is_busy else 0.0
        self._last_result, self._is_busy = now, True
        self._note_step(plan, prompt_tokens, seconds, gap, predicted)
        self._clock.lap("settle")
        if self.resolved.config.runtime.debug:
            self._scheduler.check()
        self._send_masks()
        return outputs

    def _fail(self, cause: Exception) -> None:
        """Remember why the engine ends; `turn` tells it. The first reason is the cause of the others."""
        if self._failure is None:
            error = cause
            if not isinstance(error, EngineDeadError):
                _log.error("the engine failed", exc_info=error)
                error = EngineDeadError(f"the engine failed: {Failure.of(error).message}")
            self._failure = error
            steps = 1 if isinstance(error, StepError) else self.resolved.depth
            self._suspects = Suspects(self._scheduler.ids_in(steps), was_killed=error.was_killed)
            if not isinstance(cause, InterruptedError):
                self._leave_record(str(error))
            if isinstance(cause, EngineDeadError):  # and no mistake of the scheduler
                self._untold += self._scheduler.unreported()
        self._in_flight.clear()

    def _idle(self, *, prepare: bool) -> EngineOutputs:
        """Look after the worker; it may do a little, some milliseconds, of what makes later steps smoother.

        When it has nothing left to do, the grammars get ready.
        """
        try:
            self._executor.check_health()
            if prepare and self._can_prepare:
                self._can_prepare = self._executor.call("prepare")
            elif prepare and self._grammars.can_prepare:
                self._grammars.prepare()
        except Exception as error:
            self._fail(error)
        return EngineOutputs(stats=None if self._failure is not None else self._due_stats())

    def _ping(self) -> str:
        """A sign of life. An idle worker is asked for its own; one that computes shows it by its results."""
        if not self.has_work:
            self._executor.ping()
        return "pong"

    # -- statistics ----------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters since the start and gauges of now."""
        stats = self._scheduler.stats()
        stats.num_steps = self._steps.num_steps
        stats.last_step_time = self._steps.last_time
        stats.phase_seconds = dict(self._clock.seconds)
        stats.queue = msgspec.structs.replace(self._scheduler.queue_stats(), as_of=self._drained_at)
        stats.num_waiting += len(self._waiting_for_trial)
        stats.num_deferred += len(self._waiting_for_trial)
        stats.computed_tokens = self._steps.prompt_tokens
        if self._meter is not None:
            self._meter.tell(stats)
        self._before.add_to(stats)
        return stats

    def _note_step(self, plan: StepPlan, prompt_tokens: int, seconds: float, gap: float, predicted: float) -> None:
        waiting, running = self._scheduler.num_waiting, self._scheduler.num_running
        self._steps.add(
            StepView(
                plan.step, time.time(), seconds, gap, predicted,
                prompt_tokens, plan.num_decodes, plan.num_drafts, waiting, running,
            )
        )  # fmt: skip

    def look(self, after: float = 0.0, watch: float = 0.0) -> EngineView:
        """What goes on here, for people. Some milliseconds if there is much.

        Args:
            after: steps that ended later than this, time.time(), are told.
            watch: seconds from now on in which the lives of requests are followed (`life`).
        """
        began = time.perf_counter()
        requests, cells = self._scheduler.look(watch)
        num_requests = self._scheduler.num_requests
        steps = self._steps.after(after)
        return EngineView(time.time(), steps, requests, num_requests, cells, time.perf_counter() - began)

    def _leave_record(self, cause: str) -> None:
        """Of a failure. What is broken may not be told; that changes nothing."""
        try:
            path = self.record(cause)
        except Exception as error:
            _log.warning("there is no flight record: %s: %s", type(error).__name__, error)
            return
        if path is not None:
            _log.error("the flight record is in %s", path)

    def record(self, cause: str, details: Any = None) -> str | None:
        """Write the flight record. Returns the path of the file, None if it cannot be written."""
        found = {
            "details": details,
            "model": self.resolved.config.model.names[0],
            "device": self.resolved.device,
            "stats": self.stats(),
            "in_flight": [_outline(step) for step in self._in_flight],
            "look": self.look(),
        }
        return write_record(record_folder(self.resolved.config.observe.flight_record_dir), cause, found)

    def _due_stats(self) -> EngineStats | None:
        """Now and then, and always before a pause if anything has happened, so that the gauges come to rest."""
        now = time.monotonic()
        if not self._stats_are_old or (now < self._stats_due and self.has_work):
            return None
        self._stats_due = now + STATS_SECONDS
        self._stats_are_old = False
        stats = self.stats()
        self._steps.tell(stats)
        if self._block_times is not None:
            stats.block_lifetimes, stats.block_idles, stats.block_gaps = self._block_times.take()
        return stats


def _outline(step: SubmittedStep) -> dict[str, Any]:
    plan = step.plan
    return {
        "step": plan.step,
        "seconds_ago": time.perf_counter() - step.submitted,
        "seats": plan.seats.tolist(),
        "num_tokens": plan.num_tokens.tolist(),
        "num_decodes": plan.num_decodes,
        "num_drafts": plan.num_drafts,
        "max_seq_len": plan.max_seq_len,
    }


def _make_scheduler(resolved: Resolved, report: WorkerReport, grammars: Grammars) -> Scheduler:
    schedule, cache = resolved.config.schedule, resolved.config.cache
    caching, drafting, wanted = cache.enable_prefix_caching, None, resolved.speculative
    if wanted is not None:
        drafting = Drafting(
            wanted.num_speculative_tokens,
            resolved.max_num_seqs,
            report.max_drafted_rows,
            report.draft_costs,
            always=wanted.policy == "always",
        )
    return Scheduler(
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=report.max_num_batched_tokens or resolved.max_num_batched_tokens,
        max_model_len=report.max_model_len,
        num_blocks=report.num_blocks,
        groups=report.groups,
        max_prefill_chunk=schedule.max_prefill_chunk,
        policy=schedule.scheduling_policy,
        preempt_every_step=schedule.preempt_every_step,
        enable_prefix_caching=not keeps_state(report.groups) if caching is None else caching,
        mixed_sizes=report.mixed_sizes,
        prompt_cost=report.prompt_cost,
        vocab_size=report.vocab_size,
        mask_source=grammars,
        drafting=drafting,
        adapter_slots=resolved.config.lora.max_loras if resolved.config.lora.enable_lora else 0,
        stages=resolved.config.runtime.pipeline_parallel_size,
    )
