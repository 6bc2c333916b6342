"""Beam search on top of plain requests: each step asks one token and its alternatives of every live beam.

The prefix cache holds what beams share, so a step costs about one decode step a beam.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.frontend.inputs import Prompt
from quire.types.output import BeamSearchOutput, BeamSearchSequence, Logprob
from quire.types.sampling import BeamSearchParams, RequestOutputKind, SamplingParams

Alternatives = dict[int, Logprob]
AskNext = Callable[[Sequence[list[int]], SamplingParams], list[Alternatives]]  # token sequences → their next tokens


@dataclass(slots=True)
class _Search:
    """The beams of one prompt."""

    prompt: Prompt
    prompt_ids: list[int]
    live: list[BeamSearchSequence]
    done: list[BeamSearchSequence] = field(default_factory=list)


def beam_search(
    prompts: Sequence[Prompt],
    prompt_ids: Sequence[list[int]],
    params: BeamSearchParams,
    ask_next: AskNext,
    *,
    eos_token_id: int | None,
    vocab_size: int,
    context: int,
) -> list[BeamSearchOutput]:
    """The `beam_width` best answers of each prompt, best first; `tokens` begin with the prompt.

    score = cumulative logprob / length ** length_penalty, over the answer without EOS (whose logprob counts).
    A step looks at the 2 * beam_width likeliest tokens of each live beam. EOS ends a beam; the `beam_width` best of
    the others live on. Beams still alive after `max_tokens` steps, or at the end of the context (`context` tokens),
    take part as they are.
    """
    ask = SamplingParams(
        max_tokens=1,
        temperature=params.temperature,
        logprobs=min(2 * params.beam_width, vocab_size),
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    searches = []
    for prompt, ids in zip(prompts, prompt_ids, strict=True):
        origin = prompt.text if prompt.text is not None else ids
        searches.append(_Search(prompt, ids, [BeamSearchSequence(orig_prompt=origin, tokens=list(ids), logprobs=[])]))
    eos = None if params.ignore_eos else eos_token_id
    for _ in range(params.max_tokens):
        beams = [(s, beam) for s in searches for beam in s.live if len(beam.tokens) < context]
        if not beams:
            break
        answers = ask_next([beam.tokens for _, beam in beams], ask)
        grown: dict[int, list[BeamSearchSequence]] = {id(s): [] for s in searches}
        for (search, beam), alternatives in zip(beams, answers, strict=True):
            for token, logprob in alternatives.items():
                child = _grow(beam, token, logprob.logprob, alternatives)
                if token == eos:
                    child.finish_reason, child.stop_reason = "stop", eos
                    search.done.append(child)
                else:
                    grown[id(search)].append(child)
        for search in searches:
            if grown[id(search)]:
                search.live = _best(grown[id(search)], search, params)
            elif any(owner is search for owner, _ in beams):
                search.live = []  # every beam ended
    return [_result(search, params) for search in searches]


def _grow(beam: BeamSearchSequence, token: int, logprob: float, alternatives: Alternatives) -> BeamSearchSequence:
    return BeamSearchSequence(
        orig_prompt=beam.orig_prompt,
        tokens=[*beam.tokens, token],
        logprobs=[*beam.logprobs, alternatives],
        cum_logprob=beam.cum_logprob + logprob,
    )


def _best(beams: list[BeamSearchSequence], search: _Search, params: BeamSearchParams) -> list[BeamSearchSequence]:
    num_prompt = len(search.prompt_ids)

    def score(beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - num_prompt - (beam.finish_reason == "stop")
        return float(beam.cum_logprob / max(length, 1) ** params.length_penalty)

    return sorted(beams, key=score, reverse=True)[: params.beam_width]


def _result(search: _Search, params: BeamSearchParams) -> BeamSearchOutput:
    for beam in search.live:
        beam.finish_reason = "length"
    best = _best([*search.done, *search.live], search, params)
    for beam in best:
        if beam.finish_reason == "stop" and not params.include_stop_str_in_output:
            del beam.tokens[-1]
    return BeamSearchOutput(best)
