"""AsyncLLM on an engine that keeps the client protocol: streams, aborts, death, slow readers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from quire.foundation.errors import EngineDeadError, InputError
from quire.frontend import async_engine
from quire.frontend.async_engine import AsyncLLM
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.types.output import RequestOutput
from quire.types.sampling import RequestOutputKind, SamplingParams
from tests.frontend.echo_engine import EchoClient, make_info, says
from tests.server.process import PATIENCE

DELTA = RequestOutputKind.DELTA
LONG = SamplingParams(max_tokens=100, ignore_eos=True, output_kind=DELTA, temperature=0)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, PATIENCE))


async def collect(llm: AsyncLLM, prompt: Any, params: SamplingParams, request_id: str) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, request_id)]


def test_many_streams_at_once(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        texts = {f"r{i}": f"Answer number {i} 你好 {'x' * i}" for i in range(30)}
        ids = {name: tokenizer.encode(text) for name, text in texts.items()}
        client = EchoClient(make_info(), lambda r, made: (ids[r.id] + [0])[made])
        llm = AsyncLLM(client, tokenizer)
        params = SamplingParams(max_tokens=None, output_kind=DELTA)
        results = await asyncio.gather(*(collect(llm, "Hello", params, name) for name in texts))
        for (name, text), outputs in zip(texts.items(), results, strict=True):
            assert "".join(o.outputs[0].text for o in outputs) == text
            assert outputs[-1].finished
            assert {o.request_id for o in outputs} == {name}
            assert outputs[0].prompt == "Hello"
        assert client.aborted == []
        assert llm.stats().num_steps > 0
        llm.shutdown()
        assert client.is_shut_down

    run(main())


@pytest.mark.parametrize("how", ["close", "cancel", "break"])
def test_a_reader_that_leaves_aborts(tokenizer: Tokenizer, how: str) -> None:
    async def main() -> None:
        client = EchoClient(make_info())
        llm = AsyncLLM(client, tokenizer)
        params = SamplingParams(n=2, max_tokens=200, ignore_eos=True, output_kind=DELTA)
        if how == "cancel":
            task = asyncio.create_task(collect(llm, [1], params, "r"))
            while not client.running:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            stream = llm.generate([1], params, "r")
            async with aclosing(stream):
                async for _ in stream:
                    break
        assert sorted(client.aborted) == ["r#0", "r#1"]
        assert not client.running
        again = await collect(llm, [1], SamplingParams(max_tokens=1), "r")
        assert again[-1].finished
        llm.shutdown()

    run(main())


def test_abort_by_id_gives_the_reader_an_end(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        client = EchoClient(make_info())
        llm = AsyncLLM(client, tokenizer)
        outputs = []
        async for output in llm.generate([1], LONG, "r"):
            outputs.append(output)
            if len(outputs) == 3:
                await llm.abort(["r", "unknown"])
        assert outputs[-1].outputs[0].finish_reason == "abort"
        assert outputs[-1].finished
        assert client.aborted == ["r"]
        llm.shutdown()

    run(main())


def test_a_slow_reader_gets_fewer_larger_outputs(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        client = EchoClient(make_info())
        llm = AsyncLLM(client, tokenizer)
        slow, tokens, count = llm.generate([1], LONG, "slow"), [], 0
        async for output in slow:
            count += 1
            tokens += output.outputs[0].token_ids
            for _ in range(30):
                await asyncio.sleep(0)
        fast = await collect(llm, [1], LONG, "fast")
        assert tokens == [t for o in fast for t in o.outputs[0].token_ids]
        assert len(tokens) == 100
        assert count < len(fast) == 100
        llm.shutdown()

    run(main())


def test_stream_interval(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        llm = AsyncLLM(EchoClient(make_info(stream_interval=8)), tokenizer)
        outputs = await collect(llm, [1], LONG, "r")
        sizes = [len(o.outputs[0].token_ids) for o in outputs]
        assert sizes == [1, *[8] * 12, 3]
        llm.shutdown()

    run(main())


def test_stop_strings_abort_at_the_engine(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        client = EchoClient(make_info(), says(tokenizer.encode("one two three four five")))
        llm = AsyncLLM(client, tokenizer)
        outputs = await collect(llm, [1], SamplingParams(max_tokens=None, stop=" three"), "r")
        assert outputs[-1].outputs[0].text == "one two"
        assert client.aborted == ["r"]
        llm.shutdown()

    run(main())


def test_bad_input_harms_nobody(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        client = EchoClient(make_info())
        llm = AsyncLLM(client, tokenizer)
        neighbour = asyncio.create_task(collect(llm, [1], LONG, "neighbour"))
        await asyncio.sleep(0)
        for prompt, params, request_id in (
            ("", SamplingParams(), "a"),
            ([10**9], SamplingParams(), "b"),
            ("x", SamplingParams(logprobs=999), "c"),
            ("x", SamplingParams(), "neighbour"),
            ("y" * 100_000, SamplingParams(), "too long"),
        ):
            with pytest.raises(InputError):
                await collect(llm, prompt, params, request_id)
        assert len(await neighbour) == 100
        assert [r.id for r in client.added] == ["neighbour"]
        llm.shutdown()

    run(main())


def test_long_prompts_are_tokenized_on_a_thread(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []
    original = async_engine.build

    def spy(*args: Any, **kwargs: Any) -> Any:
        try:
            asyncio.get_running_loop()
            threads.append(False)
        except RuntimeError:
            threads.append(True)
        return original(*args, **kwargs)

    monkeypatch.setattr(async_engine, "build", spy)

    async def main() -> None:
        llm = AsyncLLM(EchoClient(make_info(max_model_len=100_000)), tokenizer)
        for i, prompt in enumerate(["short", "long " * 10_000, [5] * 20_000]):
            await collect(llm, prompt, SamplingParams(max_tokens=1), str(i))
        assert threads == [False, True, True]
        llm.shutdown()

    run(main())


def test_a_refused_request_ends_with_an_error(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        client = EchoClient(make_info())
        client.refuse = "needs 9 blocks, the cache has 4"
        llm = AsyncLLM(client, tokenizer)
        (output,) = await collect(llm, [1], SamplingParams(), "r")
        assert output.error == client.refuse
        assert output.outputs[0].finish_reason == "error"
        assert not llm.errored
        llm.shutdown()

    run(main())


def test_death_reaches_everybody(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        client = EchoClient(make_info())
        llm = AsyncLLM(client, tokenizer)
        await llm.check_health()
        readers = [asyncio.create_task(collect(llm, [1], LONG, f"r{i}")) for i in range(3)]
        while len(client.running) < 3:
            await asyncio.sleep(0)
        client.die("the core was killed")
        for result in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
            assert "the core was killed" in str(result)
        assert llm.errored
        assert "killed" in str(llm.dead_error)
        with pytest.raises(EngineDeadError):
            await llm.check_health()
        with pytest.raises(EngineDeadError):
            await collect(llm, [1], LONG, "late")
        llm.shutdown()

    run(main())


def test_shutdown_ends_running_requests(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        client = EchoClient(make_info())
        llm = AsyncLLM(client, tokenizer)
        reader = asyncio.create_task(collect(llm, [1], LONG, "r"))
        while not client.running:
            await asyncio.sleep(0)
        llm.shutdown()
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await reader

    run(main())


def test_the_rest_of_the_door(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        info = make_info(generation_defaults={"temperature": 0.5, "top_k": 7})
        llm = AsyncLLM(EchoClient(info), tokenizer)
        assert llm.info is info
        assert llm.get_tokenizer() is tokenizer
        assert llm.chat_template is tokenizer.template
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=7)
        assert await llm.call("stats", 1) == {"method": "stats", "args": [1]}
        llm.shutdown()
        without = AsyncLLM(EchoClient(make_info()), None)
        assert without.chat_template is None
        assert without.get_tokenizer() is None
        with pytest.raises(InputError, match="skip_tokenizer_init"):
            await collect(without, "text", SamplingParams(), "r")
        without.shutdown()

    run(main())
