"""`quire serve` over two ranks: it answers, and the death of one of them is its end."""

from __future__ import annotations

import httpx
import openai
import psutil
import pytest

from tests.server.process import server_process, wait_until

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.long  # as `tests/e2e/test_ranks.py` kills one behind the same engine
def test_a_chat_and_the_death_of_a_rank() -> None:
    options = ["--port", "0", "--device", "cpu", "-tp", "2", "--max-model-len", "512", "--num-threads", "1"]
    options += ["--max-engine-restarts", "0"]
    with server_process("quire.cli.main", "serve", *options) as server:
        url = server.url
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            model = client.models.list().data[0].id
            answer = client.chat.completions.create(
                model=model,
                messages=MESSAGES,
                max_tokens=12,
                temperature=0,
                logprobs=True,  # type: ignore[arg-type]
            )
            assert answer.choices[0].message.content
            assert answer.usage is not None
            assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.content)  # type: ignore[union-attr]
        family = psutil.Process(server.process.pid).children(recursive=True)
        ranks = [one for one in family if "quire.executor.worker_process" in one.cmdline()]
        assert len(ranks) == 2
        assert any("tensor_parallel_size=2: rank 0 on cpu" in line for line in server.err + server.out)
        assert httpx.get(f"{url}/health").status_code == 200
        ranks[1].kill()  # an idle engine: nobody waits for it
        assert server.exit_code() == 4
        assert "the worker process of rank 1" in "".join(server.err)
        assert wait_until(lambda: not any(map(is_alive, family)))
