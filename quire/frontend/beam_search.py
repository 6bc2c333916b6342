"""Beam search on top of plain requests: each step asks one token and its alternatives of every running beam.

The search itself asks nobody: who drives it runs the requests of a step together. The prefix cache holds what beams
share, and rows that begin with the same blocks read these once, so a step costs about one decode step a beam.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.client import EngineInfo
from quire.foundation.errors import InputError
from quire.frontend.inputs import main_eos
from quire.frontend.outputs import RequestState
from quire.frontend.pooling.requests import RefusedError
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.types.output import BeamSearchOutput, BeamSearchSequence, Logprob
from quire.types.sampling import BeamSearchParams, RequestOutputKind, SamplingParams

Alternatives = dict[int, Logprob]


class BeamSearch:
    """Of one prompt, as transformers searches: the same candidates, scores and ends.

    score = cumulative logprob / length ** length_penalty, where the length is the answer's, its end token included.
    A step looks at the likeliest continuations of all beams together, at least twice as many as there are beams. Those
    of the first `beam_width` that end are kept with their scores; the others go on. At the last step all of the first
    `beam_width` end. `origin`: the prompt as the user gave it.

    Raises InputError if the engine cannot show so many alternatives.
    """

    def __init__(
        self,
        prompt_ids: list[int],
        params: BeamSearchParams,
        info: EngineInfo,
        tokenizer: Tokenizer | None,
        origin: str | list[int] | None = None,
    ) -> None:
        self._params = params
        self._num_prompt = len(prompt_ids)
        self._num_steps = min(params.max_tokens, info.max_model_len - self._num_prompt)
        eos = main_eos(info, tokenizer)
        ends = {*([] if eos is None else [eos]), *info.resolved.info.eos_token_ids}
        self._ends = set() if params.ignore_eos else ends
        self._num_candidates = max(2, 1 + len(self._ends)) * params.beam_width
        num_alternatives = min(self._num_candidates, info.report.vocab_size)
        limit = info.resolved.config.model.max_logprobs
        if num_alternatives > limit != -1:
            raise InputError(
                f"beam_width={params.beam_width} needs {num_alternatives} log-probabilities a step, and max_logprobs "
                f"is {limit}: start the engine with max_logprobs={num_alternatives}",
                "beam_width",
            )
        self.ask = SamplingParams(
            max_tokens=1,
            temperature=params.temperature,
            logprobs=num_alternatives,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        first = BeamSearchSequence(prompt_ids if origin is None else origin, list(prompt_ids), [])
        self.running = [first]  # whose next tokens `take` wants
        self._ended: list[tuple[float, BeamSearchSequence]] = []  # the best `beam_width`, best first
        self._step = 0

    @property
    def is_done(self) -> bool:
        return not self.running

    def take(self, answers: Sequence[Alternatives]) -> None:
        """The likeliest next tokens of each running beam."""
        self._step += 1
        width, is_last = self._params.beam_width, self._step >= self._num_steps
        grown = [
            _grow(beam, token, entry.logprob, alternatives)
            for beam, alternatives in zip(self.running, answers, strict=True)
            for token, entry in alternatives.items()
        ]
        grown.sort(key=lambda beam: -beam.cum_logprob)
        self.running = []
        for rank, beam in enumerate(grown[: self._num_candidates]):
            token = beam.tokens[-1]
            ends = token in self._ends
            if ends or is_last:
                beam.finish_reason, beam.stop_reason = ("stop", token) if ends else ("length", None)
                if rank < width:
                    self._ended.append((self._score(beam.cum_logprob, self._step), beam))
            elif len(self.running) < width:
                self.running.append(beam)
        self._ended.sort(key=lambda pair: -pair[0])
        del self._ended[width:]
        if self.running and not self._may_improve():
            self.running = []

    def result(self, tokenizer: Tokenizer | None) -> BeamSearchOutput:
        """The best answers, best first; `tokens` begin with the prompt."""
        keeps_end = self._params.include_stop_str_in_output
        skips_special = self._params.skip_special_tokens and not keeps_end
        found = [beam for _, beam in self._ended]
        for beam in found:
            if beam.finish_reason == "stop" and not keeps_end:
                del beam.tokens[-1]
            if tokenizer is not None:
                beam.text = tokenizer.decode(beam.tokens, skip_special_tokens=skips_special)
        return BeamSearchOutput(found)

    def _may_improve(self) -> bool:
        """Whether what runs could yet be better than the worst that ended."""
        params = self._params
        if len(self._ended) < params.beam_width:
            return True
        if params.early_stopping is True:
            return False
        grows = params.early_stopping == "never" and params.length_penalty > 0
        best = self._score(self.running[0].cum_logprob, self._num_steps if grows else self._step)
        return best > self._ended[-1][0]

    def _score(self, cum_logprob: float, length: int) -> float:
        return float(cum_logprob / length**self._params.length_penalty)


def alternatives(request_state: RequestState, count: int) -> Alternatives:
    """The `count` likeliest next tokens of a request that has finished. Raises RefusedError if it has none."""
    answer = request_state.take().outputs[0]
    if request_state.error is not None or not answer.logprobs:
        reason = request_state.error or f"the request ended: {answer.finish_reason}"
        raise RefusedError(f"beam search cannot go on: {reason}", str(answer.stop_reason))
    return {token: entry for token, entry in answer.logprobs[0].items() if (entry.rank or 0) <= count}


def _grow(beam: BeamSearchSequence, token: int, logprob: float, others: Alternatives) -> BeamSearchSequence:
    return BeamSearchSequence(
        orig_prompt=beam.orig_prompt,
        tokens=[*beam.tokens, token],
        logprobs=[*beam.logprobs, others],
        cum_logprob=beam.cum_logprob + logprob,
    )
