"""LLM and AsyncLLM on the real engine: text, streams, log-probabilities, beams, aborts, death."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from quire import LLM, AsyncLLM, EngineConfig, RequestOutputKind, SamplingParams
from quire.engine.client import ProcessClient
from quire.foundation.errors import ConfigError, EngineDeadError, InputError
from quire.types.sampling import BeamSearchParams
from tests.frontend.conftest import CHATML
from tests.frontend.tokenizers_for_tests import byte_level, save_folder

OPTIONS: dict[str, Any] = {"device": "cpu", "num_threads": 1, "max_model_len": 256}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PROMPTS = ["Hello world", "你好，世界", "def add(a, b):\n", "👩‍👩‍👧‍👦"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a real byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("tiny_text_model")
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=byte_level().get_vocab_size(),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=0,
        initializer_range=0.4,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return save_folder(
        folder,
        byte_level(),
        eos_token="<|end|>",
        chat_template=CHATML,
        tokenizer_class="PreTrainedTokenizerFast",
    )


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def theirs(folder: Path) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(
        folder
    )


def test_text_equals_transformers(llm: LLM, theirs: tuple[Any, Any]) -> None:
    model, tokenizer = theirs
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False), strict=True):
        ids = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            made = model.generate(
                **ids, max_new_tokens=40, min_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        made = made[0, ids["input_ids"].shape[1] :].tolist()
        assert output.outputs[0].token_ids == made
        assert output.outputs[0].text == tokenizer.decode(made, skip_special_tokens=True)


def test_log_probabilities_equal_transformers(llm: LLM, theirs: tuple[Any, Any]) -> None:
    model, _ = theirs
    params = GREEDY.clone(max_tokens=8, logprobs=3, prompt_logprobs=2)
    (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    answer = output.outputs[0]
    ids = output.prompt_token_ids + answer.token_ids
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    entries = [*(output.prompt_logprobs or [])[1:], *(answer.logprobs or [])]
    assert len(entries) == len(ids) - 1
    for position, entry in enumerate(entries):
        assert ids[position + 1] in entry
        for token, logprob in entry.items():
            assert logprob.logprob == pytest.approx(expected[position, token].item(), abs=1e-3)
    total = sum((answer.logprobs or [])[i][t].logprob for i, t in enumerate(answer.token_ids))
    assert answer.cumulative_logprob == pytest.approx(total)


def test_beams_equal_transformers(llm: LLM, theirs: tuple[Any, Any]) -> None:
    model, _ = theirs
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    for prompt, result in zip(PROMPTS[:2], llm.beam_search(PROMPTS[:2], params), strict=True):
        ids = torch.tensor([llm.get_tokenizer().encode(prompt)])
        with torch.inference_mode():
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_beams=3,
                num_return_sequences=3,
                max_new_tokens=8,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert [s.tokens for s in result.sequences] == found.tolist()


def test_chat_stop_strings_and_n(llm: LLM) -> None:
    (whole,) = llm.chat([{"role": "user", "content": "Hi"}], GREEDY, use_tqdm=False)
    assert whole.prompt == "<|start|>user\nHi<|end|>\n<|start|>assistant\n"
    text = whole.outputs[0].text
    stop = text[5:8]
    (cut,) = llm.generate(whole.prompt or "", GREEDY.clone(stop=[stop]), use_tqdm=False)
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    sampled = SamplingParams(n=3, seed=11, max_tokens=12, ignore_eos=True)
    (many,) = llm.generate("Hello", sampled, use_tqdm=False)
    alone = [llm.generate("Hello", sampled.clone(n=1, seed=11 + i), use_tqdm=False)[0] for i in range(3)]
    assert [a.token_ids for a in many.outputs] == [o.outputs[0].token_ids for o in alone]
    assert llm.call("check") is None


def test_mistakes_leave_nothing_behind(llm: LLM) -> None:
    for prompt, params in (("", GREEDY), ([10**6], GREEDY), ("x" * 5000, GREEDY), ("x", GREEDY.clone(logprobs=21))):
        with pytest.raises(InputError):
            llm.generate(prompt, params, use_tqdm=False)
    assert llm.call("check") is None


def test_ctrl_c_leaves_the_engine_usable(llm: LLM) -> None:
    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    expected = llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    class PressOnce:
        """A progress bar that sends Ctrl-C when the first prompt is done."""

        def __init__(self, **_: Any) -> None: ...
        def update(self, _: int) -> None:
            signal.raise_signal(signal.SIGINT)

        def close(self) -> None: ...

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, [GREEDY.clone(max_tokens=2), *[endless] * 3], use_tqdm=PressOnce)
    again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in expected]
    assert llm.call("check") is None


def test_async_streams_equal_offline_text(folder: Path, llm: LLM) -> None:
    expected = {p: o.outputs[0] for p, o in zip(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False), strict=True)}

    async def read(engine: AsyncLLM, prompt: str, name: str, kind: RequestOutputKind) -> tuple[str, list[int]]:
        text, ids = "", []
        async for output in engine.generate(prompt, GREEDY.clone(output_kind=kind), name):
            answer = output.outputs[0]
            delta = kind == RequestOutputKind.DELTA
            text, ids = (text + answer.text, ids + answer.token_ids) if delta else (answer.text, answer.token_ids)
        return text, ids

    async def main() -> None:
        engine = await AsyncLLM.start(EngineConfig.from_flat(model=str(folder), **OPTIONS), serving=True)
        try:
            wanted = [(prompt, kind) for prompt in PROMPTS for kind in RequestOutputKind]
            found = await asyncio.gather(*(read(engine, p, f"{i}", k) for i, (p, k) in enumerate(wanted)))
            for (prompt, _), (text, ids) in zip(wanted, found, strict=True):
                assert (text, ids) == (expected[prompt].text, expected[prompt].token_ids)
            endless = SamplingParams(max_tokens=None, ignore_eos=True, output_kind=RequestOutputKind.DELTA, n=2)
            for i in range(10):
                stream = engine.generate(PROMPTS[0], endless, f"left {i}")
                await anext(stream)
                await stream.aclose()
            assert await engine.call("check") is None
            assert not engine.errored
        finally:
            engine.shutdown()

    asyncio.run(asyncio.wait_for(main(), 300))


def test_a_killed_core_reaches_the_readers(folder: Path) -> None:
    async def main() -> None:
        options = {**OPTIONS, "max_engine_restarts": 0}
        engine = await AsyncLLM.start(EngineConfig.from_flat(model=str(folder), **options))
        client = engine._client
        assert isinstance(client, ProcessClient)
        endless = SamplingParams(max_tokens=None, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        stream = engine.generate(PROMPTS[0], endless, "r")
        await anext(stream)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            async for _ in stream:
                pass
        assert engine.errored
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        engine.shutdown()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_start_errors_are_one_readable_message(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())

    async def start(**options: Any) -> None:
        await AsyncLLM.start(EngineConfig.from_flat(**{**OPTIONS, **options}))

    with pytest.raises(ConfigError, match=r"tokenizer\.json does not exist"):
        asyncio.run(start(model=str(tmp_path)))
    with pytest.raises(ConfigError, match="max_model_len=9999"):
        asyncio.run(start(model=str(folder), max_model_len=9999))
