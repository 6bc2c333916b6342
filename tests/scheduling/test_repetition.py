"""RepetitionDetector against its definition, on answers that nearly repeat."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from quire.foundation.errors import InputError
from quire.scheduling.repetition import RepetitionDetector
from quire.types.repetition import MAX_PATTERN, RepetitionDetectionParams
from quire.types.sampling import SamplingParams


def repeats(answer: Sequence[int], params: RepetitionDetectionParams) -> bool:
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        tail = list(answer[-size * params.min_count :])
        if len(tail) == size * params.min_count and tail == tail[:size] * params.min_count:
            return True
    return False


@pytest.mark.parametrize("seed", range(40))
def test_it_finds_the_first_repetition_there_is(seed: int) -> None:
    rng = random.Random(seed)
    high = rng.randint(1, 12)
    params = RepetitionDetectionParams(
        max_pattern_size=high, min_pattern_size=rng.randint(0, high), min_count=rng.randint(2, 5)
    )
    prompt = [rng.randrange(2) for _ in range(rng.randint(1, 30))]  # looks like the answer, and does not count
    tokens, detector, found = array("i", prompt), RepetitionDetector(params), 0
    pattern = [rng.randrange(3) for _ in range(high)]
    for position in range(150):
        tokens.append(rng.randrange(3) if rng.random() < 0.08 else pattern[position % len(pattern)])
        expected = repeats(tokens[len(prompt) :], params)
        assert detector.advance(tokens, len(prompt)) == expected
        found += expected
    assert found or params.min_count * max(1, params.min_pattern_size) > 8


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_pattern_size": -1}, "max_pattern_size must be an integer"),
        ({"max_pattern_size": MAX_PATTERN + 1, "min_count": 2}, "max_pattern_size must be an integer"),
        ({"max_pattern_size": True, "min_count": 2}, "max_pattern_size must be an integer"),
        ({"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}, "min_pattern_size must be <= max"),
        ({"max_pattern_size": 3}, "min_count must be >= 2"),
        ({"max_pattern_size": 3, "min_count": 1}, "min_count must be >= 2"),
        ({"max_patern_size": 3}, "there is no field 'max_patern_size'"),
    ],
)
def test_wrong_fields(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        SamplingParams(repetition_detection=fields)
    assert caught.value.param == "repetition_detection"


def test_off_by_default() -> None:
    assert SamplingParams(repetition_detection={}).repetition_detection == RepetitionDetectionParams()


@pytest.mark.parametrize(
    "options", [{"async_scheduling": False}, {"async_scheduling": True, "preempt_every_step": True}]
)
def test_answers_end_where_they_would_have_gone_on_in_circles(options: dict[str, Any]) -> None:
    """The demo model writes a fact over and over; the answers of its neighbours are their own."""
    from quire import LLM

    asked = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    watch = RepetitionDetectionParams(max_pattern_size=30, min_pattern_size=2, min_count=3)
    prompts = ["hello", "The capital of France", "hello"]
    with LLM(device="cpu", dtype="float32", num_threads=1, max_model_len=160, **options) as llm:
        free = [output.outputs[0] for output in llm.generate(prompts, asked, use_tqdm=False)]
        watched = asked.clone(repetition_detection=watch)
        late = watched.clone(min_tokens=70)
        outputs = llm.generate(prompts, [watched, asked, late], use_tqdm=False)
        assert llm.call("check") is None
    ended, neighbour, ended_late = (output.outputs[0] for output in outputs)
    ends = [count for count in range(1, 91) if repeats(free[0].token_ids[:count], watch)]
    assert ends[0] < 70 < ends[-1]
    assert ended.token_ids == free[0].token_ids[: ends[0]]
    assert (ended.finish_reason, ended.stop_reason) == ("repetition", "repetition_detected")
    assert neighbour.token_ids == free[1].token_ids
    assert len(ended_late.token_ids) == next(count for count in ends if count >= 70)
