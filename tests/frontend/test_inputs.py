"""The door: what comes in, what is refused, and with which words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.foundation.errors import InputError
from quire.frontend.inputs import build
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from tests.frontend.echo_engine import make_info

INFO = make_info(vocab_size=400, max_model_len=32, eos=(7, 5))


def one(prompt: Any, tokenizer: Tokenizer | None = None, **fields: Any) -> EngineRequest:
    (request,) = build(prompt, SamplingParams(**fields), INFO, tokenizer, request_id="r")
    return request


def refused(prompt: Any, tokenizer: Tokenizer | None, param: str, *words: str, **fields: Any) -> None:
    with pytest.raises(InputError) as caught:
        one(prompt, tokenizer, **fields)
    assert caught.value.param == param
    for word in words:
        assert word in caught.value.message


@pytest.mark.parametrize(
    "prompt",
    [
        [3, 4, 5],
        (3, 4, 5),
        np.array([3, 4, 5]),
        np.array([3, 4, 5], np.int32),
        np.array([3, 4, 5], np.uint8),
        [np.int64(3), 4, 5],
        {"prompt_token_ids": [3, 4, 5]},
        {"prompt_token_ids": [3, 4, 5], "prompt": "for show"},
        {"prompt": [3, 4, 5]},
    ],
)
def test_token_ids_in_every_form(prompt: Any) -> None:
    request = one(prompt)
    assert request.token_ids.tolist() == [3, 4, 5]
    assert request.token_ids.dtype == np.int32
    if isinstance(prompt, np.ndarray):
        prompt[0] = 9  # it is still its user's
    assert request.token_ids[0] == 3


@pytest.mark.parametrize("prompt", ["Hello world", {"prompt": "Hello world"}])
def test_text_in_every_form(prompt: Any, tokenizer: Tokenizer) -> None:
    assert one(prompt, tokenizer).token_ids.tolist() == tokenizer.encode("Hello world")


def test_text_gets_the_special_tokens_of_the_tokenizer(fallback_tokenizer: Tokenizer) -> None:
    request = build("the end", SamplingParams(), make_info(1000), fallback_tokenizer, request_id="r")[0]
    assert request.token_ids[0] == fallback_tokenizer.bos_token_id


@pytest.mark.parametrize(
    ("prompt", "param", "words"),
    [
        ("", "prompt", ["empty"]),
        ([], "prompt", ["empty"]),
        ({"prompt_token_ids": []}, "prompt", ["empty"]),
        ({}, "prompt", ["prompt_token_ids"]),
        ({"promt": "x"}, "prompt", ["promt"]),
        ({"prompt": 3}, "prompt", ["int"]),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt", ["non-empty"]),
        (3, "prompt", ["int"]),
        (None, "prompt", ["NoneType"]),
        ([1.5], "prompt", ["1.5"]),
        ([True], "prompt", ["True"]),
        (["a", "b"], "prompt", ["'a'"]),
        ({"prompt_token_ids": ["a"]}, "prompt_token_ids", ["'a'"]),
        ([-1], "prompt", ["[0, 400)", "-1"]),
        ([1, 400], "prompt", ["[0, 400)", "400"]),
        ([2**70], "prompt", ["[0, 400)"]),
        ([1] * 32, "prompt", ["32 tokens", "max_model_len"]),
        ([1] * 500, "prompt", ["500 tokens", "32 tokens"]),
        ("\ud83d", "prompt", ["surrogate", "U+D83D"]),
    ],
)
def test_bad_prompts(prompt: Any, param: str, words: list[str], tokenizer: Tokenizer) -> None:
    refused(prompt, tokenizer, param, *words)


def test_nul_and_unpaired_marks_are_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(one("a\x00\u0301b", tokenizer).token_ids) == "a\x00\u0301b"


def test_text_without_a_tokenizer() -> None:
    refused("hello", None, "prompt", "skip_tokenizer_init")
    refused([1], None, "stop", "skip_tokenizer_init", stop="x")
    refused([1], None, "bad_words", "skip_tokenizer_init", bad_words=["x"])


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"logprobs": 21}, "logprobs", ["20", "21", "max_logprobs"]),
        ({"logprobs": -1}, "logprobs", ["20", "-1"]),
        ({"prompt_logprobs": 21}, "prompt_logprobs", ["20", "21"]),
        ({"logit_bias": {400: 1.0}}, "logit_bias", ["[0, 400)", "400"]),
        ({"allowed_token_ids": [1, 999]}, "allowed_token_ids", ["999"]),
        ({"stop_token_ids": [400]}, "stop_token_ids", ["400"]),
        ({"bad_words_token_ids": [[1, 400]]}, "bad_words_token_ids", ["400"]),
        ({"min_tokens": 31, "max_tokens": None}, "min_tokens", ["2 tokens", "got 31", "32"]),
        ({"stop": ["\udc00"]}, "stop", ["surrogate"]),
        ({"bad_words": ["\udc00"]}, "bad_words", ["surrogate"]),
    ],
)
def test_bad_params(fields: dict[str, Any], param: str, words: list[str], tokenizer: Tokenizer) -> None:
    refused([1, 2], tokenizer, param, *words, **fields)


def test_params_of_another_type() -> None:
    with pytest.raises(InputError, match="SamplingParams"):
        build([1], {"temperature": 1}, INFO, None, request_id="r")  # type: ignore[arg-type]


@pytest.mark.parametrize(("asked", "given"), [(None, 30), (16, 16), (30, 30), (31, 30), (10**9, 30)])
def test_max_tokens_ends_with_the_context(asked: int | None, given: int) -> None:
    assert one([1, 2], max_tokens=asked).max_tokens == given


def test_all_log_probabilities_are_counted_out() -> None:
    info = make_info(vocab_size=50, max_logprobs=-1)
    (request,) = build([1], SamplingParams(logprobs=-1, prompt_logprobs=60), info, None, request_id="r")
    assert (request.params.logprobs, request.params.prompt_logprobs) == (50, 50)


def test_prompt_logprobs_do_not_read_the_prefix_cache() -> None:
    assert one([1], prompt_logprobs=0).params.skip_reading_prefix_cache
    assert not one([1], logprobs=0).params.skip_reading_prefix_cache


def test_stop_tokens(tokenizer: Tokenizer) -> None:
    without = one([1], stop_token_ids=[9])
    assert (without.stop_token_ids, without.eos_token_id) == ([7, 5, 9], 7)
    with_tokenizer = one([1], tokenizer, stop_token_ids=[9])
    assert (with_tokenizer.stop_token_ids, with_tokenizer.eos_token_id) == ([0, 7, 5, 9], 0)
    ignoring = one([1], tokenizer, stop_token_ids=[9], ignore_eos=True)
    assert (ignoring.stop_token_ids, ignoring.eos_token_id) == ([9], None)


def test_bad_words_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    found = one([1], tokenizer, bad_words=["world"]).params.bad_words_token_ids
    assert found == [tokenizer.encode("world"), tokenizer.encode(" world")]
    assert found[0] != found[1]


def test_n_answers_are_n_requests() -> None:
    requests = build([1, 2], SamplingParams(n=3, seed=2**63 - 2, prompt_logprobs=1), INFO, None, request_id="r")
    assert len({r.id for r in requests}) == 3
    assert [r.seed for r in requests] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert [r.params.prompt_logprobs for r in requests] == [1, None, None]
    assert [r.params.skip_reading_prefix_cache for r in requests] == [True, False, False]
    assert {r.params.n for r in requests} == {1}
    assert all(r.token_ids.tolist() == [1, 2] for r in requests)


def test_drawn_seeds_depend_on_the_engine_seed_and_the_id_only() -> None:
    def seed(engine_seed: int, request_id: str) -> int:
        return build([1], SamplingParams(), make_info(seed=engine_seed), None, request_id=request_id)[0].seed

    assert seed(0, "a") == seed(0, "a")
    assert len({seed(0, "a"), seed(0, "b"), seed(1, "a")}) == 3
    assert all(0 <= seed(0, str(i)) < 2**63 for i in range(50))


@pytest.mark.parametrize(
    "labels",
    [
        {"request_id": ""},
        {"request_id": 3},
        {"request_id": "\ud800"},
        {"priority": 2**31},
        {"priority": 1.5},
        {"priority": True},
        {"cache_salt": ""},
        {"cache_salt": "\ud800"},
        {"cache_salt": 3},
    ],
)
def test_bad_labels(labels: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        build([1], SamplingParams(), INFO, None, **{"request_id": "r", **labels})
    assert caught.value.param in labels


def test_cache_salt_of_the_call_comes_first() -> None:
    prompt = {"prompt_token_ids": [1], "cache_salt": "mine"}
    salts = [
        build(prompt, SamplingParams(), INFO, None, request_id="r", cache_salt=salt)[0].cache_salt
        for salt in (None, "theirs")
    ]
    assert salts == ["mine", "theirs"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"bad_words": ["a"] * 1025}, "bad_words", ["at most 1024 words", "1025"]),
        ({"bad_words": ["a" * 16_384, "b"]}, "bad_words", ["at most 16384 characters", "16385"]),
        ({"bad_words_token_ids": [[1]] * 4097}, "bad_words_token_ids", ["at most 4096 words", "4097"]),
        ({"bad_words_token_ids": [[1] * 65_537]}, "bad_words_token_ids", ["at most 65536 tokens", "65537"]),
        ({"stop": ["a" * 8192, "b"]}, "stop", ["at most 8192 characters", "8193"]),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids", ["at most 64", "65"]),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias", ["at most 1024", "1025"]),
    ],
)
def test_lists_have_limits(fields: dict[str, Any], param: str, words: list[str]) -> None:
    with pytest.raises(InputError) as error:
        SamplingParams(**fields)
    assert error.value.param == param
    for word in words:
        assert word in error.value.message


def test_bad_words_are_encoded_in_one_go(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """And compared by their hash: as many comparisons as words would be a square."""
    words = [f"w{i}" for i in range(1000)] * 1
    calls: list[int] = []
    encode = tokenizer.encode_batch

    def counted(texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        calls.append(len(texts))
        return encode(texts, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode_batch", counted)
    found = one([1], tokenizer, bad_words=[*words, words[0]]).params.bad_words_token_ids
    assert calls == [2002]
    assert found == list({tuple(ids): ids for w in words for ids in encode([w, " " + w], False)}.values())
