"""use_beam_search: the n best answers of each prompt, found by a search as wide."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from fastapi import Request

from quire.foundation.errors import InputError
from quire.frontend.pooling.requests import RefusedError
from quire.server.generate import generation
from quire.server.generate.generation import REFUSALS, Generation, PromptIds
from quire.server.generate.params import NAMES, field_names
from quire.server.generate.protocol import GenerationBody
from quire.server.http.entry import retry_seconds
from quire.server.http.errors import ApiError
from quire.types.output import Logprob, RequestOutput
from quire.types.request import token_list
from quire.types.sampling import BeamSearchParams, SamplingParams


@dataclass(slots=True)
class BeamGeneration(Generation):
    """`params` says how many answers are shown, and with how many log-probabilities; `beams` how they are found."""

    beams: BeamSearchParams | None = None

    async def _source(self, prompt: PromptIds, request_id: str) -> AsyncGenerator[RequestOutput, None]:
        assert self.beams is not None
        if prompt.constraint is not None:
            raise InputError("use_beam_search cannot bind its answers to a grammar or a budget", "use_beam_search")
        found = self.service.running().beam_search(
            token_list(prompt.token_ids),
            self.beams,
            request_id,
            priority=self.priority,
            cache_salt=self.cache_salt,
            lora_request=self.service.adapter_of(self.model),
            data_parallel_rank=self.core,
        )
        try:
            async with aclosing(found) as outputs:
                async for output in outputs:
                    for answer in output.outputs:
                        if self.params.logprobs is None:
                            answer.logprobs = None
                        elif answer.logprobs is not None:
                            pairs = zip(answer.token_ids, answer.logprobs, strict=True)
                            answer.logprobs = [_shown(token, entries, self.params.logprobs) for token, entries in pairs]
                    yield output
        except RefusedError as error:
            seconds = retry_seconds(self.service)
            raise ApiError(REFUSALS.get(error.reason, 500), str(error), retry_after=seconds) from None


def start(
    request: Request, body: GenerationBody, model: str, prompts: list[PromptIds], params: SamplingParams, id_prefix: str
) -> Generation:
    """As `generation.start`. Raises InputError naming the field that is out of range."""
    context = request.app.state.service.running().info.max_model_len
    with field_names({"beam_width": "n"}):
        beams = BeamSearchParams(
            beam_width=body.n,
            max_tokens=params.max_tokens or context,
            ignore_eos=body.ignore_eos,
            length_penalty=body.length_penalty,
            early_stopping=body.early_stopping,
            include_stop_str_in_output=body.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )
    make = partial(BeamGeneration, beams=beams, names={**NAMES, "beam_width": "n"})
    return generation.start(request, body, model, prompts, params, id_prefix, make)


def _shown(token: int, entries: dict[int, Logprob], count: int) -> dict[int, Logprob]:
    """The token itself and the `count` likeliest."""
    return {token: entries[token]} | {i: entry for i, entry in entries.items() if (entry.rank or 0) <= count}
