"""A sampler with requests seated, used the way the worker uses it."""

from __future__ import annotations

from typing import Any

import torch

from quire.types.plan import Admit, TokenMasks
from quire.types.sampling import SamplingParams
from quire.worker.logit_rows import logit_rows
from quire.worker.sampling.sampler import History, Sampler, SamplerOutput
from tests.sampling.rows import history

VOCAB = 60


class Bench:
    """A sampler with requests in seats 1, 2, …; each request is its parameters and the tokens it has."""

    def __init__(self, device: torch.device, *requests: tuple[dict[str, Any], list[int]], vocab: int = VOCAB) -> None:
        self.device = device
        self.past, self.seats, self.lengths = history([tokens for _, tokens in requests])
        self.sampler = Sampler(8, vocab, 8, device)
        self.sampler.admit([self.seated(seat, params) for seat, (params, _) in enumerate(requests, start=1)])

    @staticmethod
    def seated(seat: int, params: dict[str, Any]) -> Admit:
        params = dict(params)
        own = {name: params.pop(name) for name in ("num_prompt", "stop_ids", "seed_value") if name in params}
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 1000, **params})
        return Admit(seat, 0, own.get("num_prompt", 1), params, own.get("stop_ids", []), own.get("seed_value", seat))

    def sample(self, logits: torch.Tensor, masks: TokenMasks | None = None) -> SamplerOutput:
        seats_np = self.seats.numpy()
        features = self.sampler.features(seats_np)
        seats, lengths = self.seats.to(self.device), self.lengths.to(self.device)
        past = History(
            self.past.token_of_slot.to(self.device), self.past.block_table.to(self.device), self.past.block_size
        )
        logits = logit_rows(*logits.shape, self.device).copy_(logits)  # as in an engine rows lie apart
        found = self.sampler.masks(masks, None)
        if features.plain:
            if found is not None:
                found.apply(logits)
            out = torch.empty(len(seats), dtype=torch.int32, device=self.device)
            self.sampler.sample_plain(logits, seats, lengths, out)
            return SamplerOutput(out.unsqueeze(1), None)
        return self.sampler.sample(logits, seats, lengths, past, features, seats_np, found)

    def tokens(self, logits: torch.Tensor, masks: TokenMasks | None = None) -> list[int]:
        return self.sample(logits, masks).token_ids.squeeze(1).tolist()
