"""Steps that nobody asked for: what a start compiles, measures and warms up with."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from quire.types.plan import Admit, Attachment, AwaitMasks, Pool, PromptEmbeds, StepPlan, TokenMasks
from quire.types.pooling import WHOLE
from quire.types.sampling import SamplingParams
from quire.worker.masked_step import MaskedStep
from quire.worker.readback import StepHandle
from quire.worker.runner import Runner

ALL_FEATURES = SamplingParams(
    temperature=0.5,
    top_k=5,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.5,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    min_tokens=1,
    logit_bias={0: 1.0},
    allowed_token_ids=[0, 1],
    bad_words_token_ids=[[0, 1]],
    logprobs=1,
)


def spread(tokens: int, rows: int, most: int) -> np.ndarray:
    """Tokens of each of the rows, int32, as even as it goes. None has more than `most`, where its block table ends."""
    counts = np.full(rows, tokens // rows, dtype=np.int32)
    counts[: tokens % rows] += 1
    return np.minimum(counts, most, out=counts)


def prompt_chunks(
    counts: np.ndarray,
    admits: Sequence[Admit] = (),
    attachments: Sequence[Attachment] = (),
    seats: np.ndarray | None = None,
) -> StepPlan:
    """Chunks of the given lengths, in seats 1, 2 … unless told, whose KV all goes to the null block."""
    return StepPlan(
        step=0,
        admits=[*admits],
        seats=np.arange(1, len(counts) + 1, dtype=np.int32) if seats is None else seats,
        num_tokens=counts,
        num_decodes=0,
        token_ids=np.ones(int(counts.sum()), dtype=np.int32),
        samples=np.ones(len(counts), dtype=bool),
        blocks=[],
        max_seq_len=int(counts.max()),
        attachments=[*attachments],
    )


def embeddings(counts: np.ndarray, hidden: int) -> list[Attachment]:
    """For chunks of these lengths, whose every token is an embedding of its own."""
    values = np.zeros((int(counts.sum()), hidden), dtype=np.float32)
    return [PromptEmbeds(np.arange(len(counts), dtype=np.int32), counts, values)]


def prompts_to_pool(counts: np.ndarray) -> StepPlan:
    """Whole prompts of the given lengths, whose states are wanted."""
    every, none = np.ones(len(counts), dtype=bool), np.zeros(len(counts), dtype=bool)
    rows = np.arange(len(counts), dtype=np.int32)
    pool = Pool(rows, every, np.full_like(rows, WHOLE), counts, counts)
    admits = [Admit(seat, 0, int(n), SamplingParams(), [], 0) for seat, n in enumerate(counts, 1)]
    return msgspec.structs.replace(prompt_chunks(counts, admits), samples=none, attachments=[pool])


def run_picky(runner: Runner, params: SamplingParams, vocab_size: int, seats: int) -> StepHandle | MaskedStep:
    """A step with masks and with everything that `params` ask for; of several seats another asks for nothing."""
    # Both begin anew: where a step before them has filled their seats, they would run over the end of the block table.
    admits = [Admit(1, 0, 2, params, [0], 0), Admit(2, 0, 3, SamplingParams(temperature=0.0), [], 0)]
    counts = np.array([2, 3], dtype=np.int32)[:seats]
    step = runner.run(prompt_chunks(counts, admits[: len(counts)], [AwaitMasks()]))
    if not isinstance(step, MaskedStep):  # of a rank that does not sample
        return step
    words = -(-vocab_size // 32)
    step.mask(TokenMasks(step.step, np.array([1], dtype=np.int32), np.full((1, words), -1, dtype=np.int32)))
    return step
