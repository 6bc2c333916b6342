"""The bare model on a CPU, no engine around it: decode and prefill rates of Qwen3-0.6B's shape with random weights.

    python -m benchmarks.cpu_model [--threads N] [--model qwen3-0.6b] [--context 128] [--linear] [--write]

Each figure is the best of many runs, so that other work on the machine counts as little as possible; the median
beside it tells how noisy it was. `--linear` measures the ways to multiply a few rows by a weight instead.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import quire.worker  # noqa: F401 - first, so that OpenMP is set up as the worker has it

# isort: split
import torch

from benchmarks import results_file
from benchmarks.workloads import MODELS
from quire.attention.base import AttentionInputs, AttentionSpec
from quire.attention.context import GroupContext, LayerCache, StepContext
from quire.attention.select import select
from quire.config.hf_config import hf_config
from quire.config.model_info import ModelInfo
from quire.kernels.gemm import cpu_linear
from quire.models import catalog, weights
from quire.models.base import DecoderStack
from quire.platforms import select_platform

BLOCK_SIZE = 16
BATCHES = (1, 8)
PROMPT = 512
SECONDS = 4.0  # of measuring a figure
# The better of transformers 5.17 (torch 2.13) and llama.cpp (bf16) on two cores of a Sapphire Rapids server, tok/s.
PEERS = {"batch=1": 13.2, "batch=8": 41.7, "prompt=512": 719.0}


def measure(run: Callable[[], object], seconds: float = SECONDS) -> tuple[float, float]:
    """(best, median) seconds of a call."""
    run()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < until:
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times), statistics.median(times)


def build(name: str) -> DecoderStack:
    config = MODELS[name]
    info = ModelInfo(
        path="",
        architecture=config["architectures"][0],
        hf_config=hf_config(config, {}).values,
        vocab_size=config["vocab_size"],
        max_position=config["max_position_embeddings"],
        eos_token_ids=[],
        bos_token_id=None,
        dtype="bfloat16",
    )
    model = catalog.build(info, torch.bfloat16, torch.device("cpu"), 4096)
    weights.load(model, Path(), "dummy")
    return model


def step(model: DecoderStack, rows: int, queries: int, context: int) -> Callable[[], torch.Tensor]:
    """One step of `rows` requests that bring `queries` tokens each on top of `context` tokens; logits of the last."""
    (spec,) = model.kv_groups(BLOCK_SIZE)
    blocks = -(-(context + queries) // BLOCK_SIZE)
    shape = (rows * blocks + 1, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
    caches = [LayerCache(*(torch.randn(shape).bfloat16() for _ in "kv")) for _ in range(spec.num_layers)]
    length = context + queries
    backend = select(
        "auto",
        AttentionSpec(
            num_heads=model.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=BLOCK_SIZE,
            dtype=torch.bfloat16,
            kv_dtype=torch.bfloat16,
            device=torch.device("cpu"),
            max_rows=rows,
            max_tokens=rows * queries,
            max_seq_len=length,
        ),
    )
    table = torch.zeros(rows + 1, blocks, dtype=torch.int32)
    table[1:] = torch.randperm(rows * blocks).view(rows, blocks) + 1
    positions = torch.arange(context, length).repeat(rows)
    row_of_token = torch.arange(rows).repeat_interleave(queries)
    slots = table[row_of_token + 1, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    starts, seats, lengths = list(range(0, rows * queries + 1, queries)), list(range(1, rows + 1)), [length] * rows
    inputs = AttentionInputs(
        num_rows=rows,
        num_tokens=rows * queries,
        num_decodes=rows if queries == 1 else 0,
        max_query_len=queries if queries > 1 else 0,
        max_seq_len=length,
        seats=torch.tensor(seats, dtype=torch.int32),
        query_start=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        seats_host=seats,
        query_start_host=starts,
        seq_lens_host=lengths,
    )
    ids = torch.randint(0, 1000, (rows * queries,), dtype=torch.int32)
    last = torch.tensor(starts[1:]) - 1

    def run() -> torch.Tensor:
        group = GroupContext(slots.int(), backend, backend.plan(inputs))
        ctx = StepContext(positions.int(), caches, [group])
        return model.logits(model(ids, ctx).index_select(0, last))

    return run


def read_bandwidth() -> float:
    """Bytes/s of summing an array far larger than the caches."""
    data = torch.zeros(1 << 28, dtype=torch.float32)
    return data.numel() * 4 / measure(data.sum)[0]


def model_rows(name: str, context: int) -> list[results_file.Row]:
    model = build(name)
    bandwidth = read_bandwidth()
    read = model.num_bytes() / bandwidth  # the least a decode step can take
    rows = []
    for batch in BATCHES:
        best, median = measure(step(model, batch, 1, context))
        print(f"decode  batch {batch}: {1e3 * best:.1f} ms a step (median {1e3 * median:.1f})", flush=True)
        rows.append(row(name, f"batch={batch}", "decode_tok_s", batch / best, batch / read))
    best, median = measure(step(model, 1, PROMPT, 0))
    print(f"prefill {PROMPT} tokens: {1e3 * best:.0f} ms (median {1e3 * median:.0f})")
    rows.append(row(name, f"prompt={PROMPT}", "prefill_tok_s", PROMPT / best, None))
    return rows


def row(name: str, case: str, metric: str, value: float, floor: float | None) -> results_file.Row:
    peer = PEERS.get(case) if name == "qwen3-0.6b" else None
    return results_file.Row("CPU", name, case, metric, value, "tok/s", floor, peer)


def linear_table() -> None:
    """GB/s of weights read by each way to multiply, on matrices far larger than the caches."""
    ways: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "linear": torch.nn.functional.linear,
        "weight left": lambda x, w: torch.mm(w, x.t()).t().contiguous(),
        "vector": lambda x, w: torch.mv(w, x[0]).unsqueeze(0),
        "ours": cpu_linear.linear,
    }
    print(f"{'weight':>14} {'rows':>5}" + "".join(f"{way:>13}" for way in ways) + "   GB/s")
    for n, k in ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)):
        copies = [torch.randn(n, k).bfloat16() for _ in range(max(1, int(3e8 / (2 * n * k))))]
        for rows in (1, 2, 4, 8, 16, 32, 48, 64, 128):
            x = torch.randn(rows, k).bfloat16()
            cells = []
            for way, multiply in ways.items():
                if way == "vector" and rows > 1:
                    cells.append(" " * 13)
                    continue
                best, _ = measure(lambda x=x, f=multiply, ws=copies: [f(x, w) for w in ws], 0.3)  # type: ignore[misc]
                cells.append(f"{len(copies) * 2 * n * k / best / 1e9:13.1f}")
            print(f"{f'{n}x{k}':>14} {rows:>5}" + "".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--model", choices=list(MODELS), default="qwen3-0.6b")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--linear", action="store_true")
    parser.add_argument("--write", action="store_true", help="also write a results file")
    arguments = parser.parse_args()
    platform = select_platform("cpu")
    platform.set_up(arguments.threads)
    with torch.inference_mode():
        if arguments.linear:
            linear_table()
            return
        rows = model_rows(arguments.model, arguments.context)
    print(results_file.table(rows))
    if arguments.write:
        settings = {"threads": torch.get_num_threads(), "context": arguments.context}
        print(results_file.write(rows, platform.device_name(), "python -m benchmarks.cpu_model", settings))


if __name__ == "__main__":
    main()
