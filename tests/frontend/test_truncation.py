"""truncate_prompt_tokens: the tokens that transformers keeps, precise limits, offline and over HTTP."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from quire.foundation.errors import InputError
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.frontend.tokenization.truncation import TokenizationOptions, Truncation, encode_texts
from quire.llm import LLM
from quire.types.sampling import SamplingParams
from tests.frontend.echo_engine import EchoClient, make_info
from tests.server.conftest import Served, echo_server

TEXTS = ["Hello", "The quick brown fox jumps over the lazy dog. " * 3, "Grüße 世界 🙂 " * 9]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("special", [True, False])
def test_equals_transformers(fallback_tokenizer: Tokenizer, side: Any, special: bool) -> None:
    """Of a tokenizer that puts <s> in front: it stays, whichever side is cut."""
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(fallback_tokenizer.folder / "tokenizer.json"), truncation_side=side
    )
    for limit in (2, 3, 7, 20, 10_000):
        cut = Truncation(limit, side)
        ours = encode_texts(fallback_tokenizer, TEXTS, cut, add_special_tokens=special)
        expected = theirs(TEXTS, truncation=True, max_length=limit, add_special_tokens=special)["input_ids"]
        assert ours == expected
        assert max(map(len, ours)) <= limit


@pytest.mark.parametrize(
    ("wanted", "max_tokens", "min_tokens", "limit"),
    [(None, 5, 0, None), (-1, None, 0, 255), (-1, 16, 0, 240), (-1, None, 9, 247), (1, 16, 0, 1), (256, None, 0, 256)],
)
def test_limits(wanted: Any, max_tokens: Any, min_tokens: int, limit: int | None) -> None:
    found = Truncation.of_answered(wanted, None, make_info(max_model_len=256), max_tokens, min_tokens)
    assert found == Truncation(limit, "left")


@pytest.mark.parametrize(
    ("param", "wanted", "side", "max_tokens"),
    [
        ("truncate_prompt_tokens", 0, None, None),
        ("truncate_prompt_tokens", -2, None, None),
        ("truncate_prompt_tokens", 257, None, None),
        ("truncate_prompt_tokens", True, None, None),
        ("truncate_prompt_tokens", 1.5, None, None),
        ("truncation_side", 5, "middle", None),
        ("max_tokens", -1, None, 256),
    ],
)
def test_refusals(param: str, wanted: Any, side: Any, max_tokens: int | None) -> None:
    with pytest.raises(InputError) as error:
        Truncation.of_answered(wanted, side, make_info(max_model_len=256), max_tokens, 0)
    assert error.value.param == param


@pytest.mark.parametrize("kwargs", [{"max_length": 3}, {"truncation_side": "left"}, {"add_special_tokens": 1}])
def test_tokenization_kwargs_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(kwargs))):
        TokenizationOptions.of(kwargs, 3, "right")


def test_offline(tokenizer: Tokenizer) -> None:
    client = EchoClient(make_info(max_model_len=64), None)
    llm = LLM.from_client(client, tokenizer)
    text, params = " ".join(["Hello"] * 200), SamplingParams(max_tokens=10, ignore_eos=True)
    ids = tokenizer.encode(text)
    with pytest.raises(InputError, match="context"):
        llm.generate(text, params, use_tqdm=False)
    given: list[tuple[dict[str, Any], list[int]]] = [
        ({"truncate_prompt_tokens": 5}, ids[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, ids[:5]),
        ({"truncate_prompt_tokens": -1}, ids[-54:]),
        ({"tokenization_kwargs": {"truncate_prompt_tokens": 5, "truncation_side": "right"}}, ids[:5]),
    ]
    for options, kept in given:
        for prompt in (text, ids):
            (output,) = llm.generate(prompt, params, use_tqdm=False, **options)
            assert output.prompt_token_ids == kept
            assert len(output.outputs[0].token_ids) == 10
    messages = [{"role": "user", "content": text}]
    (whole,) = llm.chat([{"role": "user", "content": "Hi"}], params, use_tqdm=False)
    (cut,) = llm.chat(messages, params, use_tqdm=False, truncate_prompt_tokens=12)
    assert len(cut.prompt_token_ids) == 12
    assert cut.prompt_token_ids[-3:] == whole.prompt_token_ids[-3:]  # the turn that is to be answered


@pytest.mark.parametrize("is_chat", [False, True])
def test_over_http(is_chat: bool) -> None:
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    text = "abcdefgh" * 1000  # bytes are tokens: longer than the context of 4096
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    body |= {"max_tokens": 6, "return_token_ids": True}
    with echo_server() as served:
        assert ask(served, path, body)["error"]["code"] == 400
        for wanted, length in ((-1, 4090), (7, 7)):
            left = ask(served, path, body | {"truncate_prompt_tokens": wanted})
            right = ask(served, path, body | {"truncate_prompt_tokens": wanted, "truncation_side": "right"})
            kept = [(reply if is_chat else reply["choices"][0])["prompt_token_ids"] for reply in (left, right)]
            assert [len(ids) for ids in kept] == [length, length]
            assert bytes(kept[0]).endswith(b"assistant: "[-7:] if is_chat else b"fgh")
            assert bytes(kept[1]).startswith(b"user: a" if is_chat else b"abc")
            assert left["usage"]["prompt_tokens"] == length
        for param, fields in (
            ("truncate_prompt_tokens", {"truncate_prompt_tokens": 4097}),
            ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
            ("max_tokens", {"truncate_prompt_tokens": -1, "max_tokens": 5000}),
        ):
            assert ask(served, path, body | fields)["error"]["param"] == param


def ask(served: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply: dict[str, Any] = served.client.post(path, json=body).json()
    return reply
