"""What only a GPU can show: graphs, and that nothing waits for the device."""

from __future__ import annotations

import pytest
import torch

from quire.worker.sampling.sampler import History
from tests.sampling.bench import VOCAB, Bench

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def test_plain_sampling_replays_in_a_graph_and_sees_new_requests() -> None:
    device = torch.device("cuda")
    bench = Bench(device, *([({"temperature": 0.0}, [1])] * 3), vocab=10000)
    logits, out = torch.randn(4, 10000, device=device), torch.zeros(4, dtype=torch.int32, device=device)
    seats = torch.tensor([1, 2, 3, 0], dtype=torch.int32, device=device)
    lengths = torch.ones(4, dtype=torch.int32, device=device)
    bench.sampler.sample_plain(logits, seats, lengths, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bench.sampler.sample_plain(logits, seats, lengths, out)
    for _ in range(3):
        logits.normal_()
        graph.replay()
        assert out.tolist() == [*logits[:3].argmax(-1).tolist(), 0]
    bench.sampler.admit([bench.seated(2, {"temperature": 1.0, "seed_value": 5})])
    drawn = set()
    for length in range(20):
        lengths.fill_(length)
        graph.replay()
        drawn.add(out[1].item())
    assert len(drawn) > 10


def test_nothing_waits_for_the_device() -> None:
    device = torch.device("cuda")
    everything = {
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "logit_bias": {3: 1.0},
        "allowed_token_ids": list(range(50)),
        "bad_words_token_ids": [[1, 2], [3]],
        "min_tokens": 5,
        "stop_ids": [9],
        "logprobs": 4,
    }
    bench = Bench(device, (everything, [1, 2, 3]), (everything, [4, 5]))
    logits = torch.randn(2, VOCAB, device=device)
    features = bench.sampler.features(bench.seats.numpy())
    past = History(bench.past.token_of_slot.to(device), bench.past.block_table.to(device), bench.past.block_size)
    seats, lengths = bench.seats.to(device), bench.lengths.to(device)
    for sync in ("default", "error"):  # the first round compiles
        torch.cuda.set_sync_debug_mode(sync)
        try:
            bench.sampler.admit([bench.seated(2, everything)])
            bench.sampler.sample(logits.clone(), seats, lengths, past, features, bench.seats.numpy())
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_graph_of_the_filtered_kernels_gives_the_same_tokens() -> None:
    """They depend on data only inside the kernels: a worker may capture them as well."""
    device = torch.device("cuda")
    requests = [({"temperature": 1.0, "top_p": 0.9}, [1]), ({"temperature": 0.5, "top_k": 7}, [1])]
    bench = Bench(device, *requests, vocab=50000)
    logits = torch.randn(2, 50000, device=device) * 3
    seats, lengths, out = (
        bench.seats.to(device),
        bench.lengths.to(device),
        torch.zeros(2, dtype=torch.int32, device=device),
    )
    bench.sampler.sample_plain(logits, seats, lengths, out, filtered=True)
    eager = out.tolist()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bench.sampler.sample_plain(logits, seats, lengths, out, filtered=True)
    out.zero_()
    graph.replay()
    assert out.tolist() == eager == bench.tokens(logits)
