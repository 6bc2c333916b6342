"""The real worker behind every client and executor: the same tokens, and nothing left after a storm of aborts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quire.config.engine import EngineConfig
from quire.config.resolve import resolve
from quire.engine.client import EngineClient, InProcessClient, ProcessClient
from tests.e2e.conftest import VOCAB, Reference
from tests.engine.echo_worker import make_request


@pytest.mark.parametrize("client_type", [InProcessClient, ProcessClient])
@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_the_real_worker_behind_every_client(
    tiny_qwen3: Path, reference: Reference, client_type: type, executor: str
) -> None:
    options = {"device": "cpu", "num_threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    config = EngineConfig.from_flat(
        model=str(tiny_qwen3), skip_tokenizer_init=True, distributed_executor_backend=executor,
        async_scheduling=True, num_gpu_blocks_override=60, max_model_len=256, **options,
    )  # fmt: skip
    client: EngineClient = client_type(resolve(config))
    rng = random.Random(5)
    prompts = {f"r{i}": [rng.randrange(2, VOCAB) for _ in range(rng.randrange(1, 60))] for i in range(12)}
    try:
        aborted = {request_id for request_id in prompts if rng.random() < 0.5}
        tokens: dict[str, list[int]] = {request_id: [] for request_id in prompts}
        for request_id, prompt in prompts.items():
            client.add(make_request(request_id, prompt, 200 if request_id in aborted else 8))
        unfinished = set(prompts) - aborted
        for request_id in sorted(aborted):
            unfinished -= take(client, tokens)
            client.abort([request_id])
        while unfinished:
            unfinished -= take(client, tokens)
        for request_id in set(prompts) - aborted:
            assert tokens[request_id] == reference.greedy(prompts[request_id], 8)
        client.call("check")
        stats = client.call("stats")
        assert stats["num_free_blocks"] == stats["num_blocks"]
        assert "num_seats_used" not in stats  # zeros are left out
        assert client.call("worker", "memory")["free"] > 0
    finally:
        client.shutdown()


def take(client: EngineClient, tokens: dict[str, list[int]]) -> set[str]:
    """Read once; returns the ids that ended."""
    ended = set()
    for output in client.poll(30).each():
        assert output.error is None, output
        tokens[output.request_id] += output.token_ids
        if output.finish_reason:
            ended.add(output.request_id)
    return ended
