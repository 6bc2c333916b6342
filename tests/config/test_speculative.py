"""`speculative_config`: its keys, and what it cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.config.resolve import resolve
from quire.config.speculative import SpeculativeConfig
from quire.foundation.errors import ConfigError

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def test_nothing_is_drafted_unless_asked() -> None:
    assert SpeculativeConfig.read({}) is None
    assert resolve(EngineConfig.from_flat(device="cpu")).speculative is None


@pytest.mark.parametrize(
    ("given", "longest", "shortest"),
    [
        ({}, 5, 5),
        ({"prompt_lookup_max": 3}, 3, 3),
        ({"prompt_lookup_min": 2}, 2, 2),
        ({"prompt_lookup_max": 4, "prompt_lookup_min": 2}, 4, 2),
        ({"prompt_lookup_max": None, "prompt_lookup_min": None}, 5, 5),
    ],
)
def test_lengths_that_are_not_given_follow_the_other(given: dict[str, Any], longest: int, shortest: int) -> None:
    found = SpeculativeConfig.read({**NGRAM, **given})
    assert found is not None
    assert (found.prompt_lookup_max, found.prompt_lookup_min, found.policy) == (longest, shortest, "auto")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "x"}, "unknown key 'model'; it may hold method"),
        ({"method": None}, "lacks 'method'"),
        ({"num_speculative_tokens": None}, "lacks 'num_speculative_tokens'"),
        ({"method": "eagle"}, "method must be one of ngram.*got 'eagle'"),
        ({"method": 3}, "`str`, got `int`"),
        ({"num_speculative_tokens": 0}, r"must be in \[1, 15\], got 0"),
        ({"num_speculative_tokens": 16}, r"must be in \[1, 15\], got 16"),
        ({"num_speculative_tokens": 2.5}, "`int`, got `float`"),
        ({"prompt_lookup_max": 2, "prompt_lookup_min": 3}, "got 3 and 2"),
        ({"prompt_lookup_min": 0}, "got 0 and 0"),
        ({"prompt_lookup_max": 32}, "<= 31"),
        ({"policy": "never"}, "Invalid enum value 'never'"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"speculative_config.*{message}"):
        EngineConfig.from_flat(speculative_config={**NGRAM, **given})


def test_a_step_must_have_room_for_drafts() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens = 4 has no room for a token and 4 drafts"):
        resolve(EngineConfig.from_flat(device="cpu", max_num_batched_tokens=4, speculative_config=NGRAM))


@pytest.mark.parametrize(
    ("option", "what"),
    [("pipeline_parallel_size", "stages"), ("prefill_context_parallel_size", "copies that share prompts")],
)
def test_of_several_ranks_those_that_share_layers_draft(option: str, what: str) -> None:
    options = {"device": "cpu", "tensor_parallel_size": 2, "speculative_config": NGRAM}
    assert resolve(EngineConfig.from_flat(**options)).speculative is not None
    told = rf"speculative_config: {what} do not draft; set {option}=1 \(got 2\), or leave speculative_config out"
    with pytest.raises(ConfigError, match=told):
        resolve(EngineConfig.from_flat(**options, **{option: 2}))


def test_a_model_that_pools_has_nothing_to_draft() -> None:
    config = EngineConfig.from_flat(device="cpu", runner="pooling", speculative_config=NGRAM)
    with pytest.raises(ConfigError, match="speculative_config is for models that generate"):
        resolve(replace(config))
