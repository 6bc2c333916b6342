"""How much time the core needs for itself: the loop, the scheduler and the wire, around a worker without a model.

    python -m benchmarks.core_loop [--requests 1024] [--tokens 128] [--prompt 64]

Prints, for each way to run the core, the time a decode step and where it goes. The worker's own share is in "submit"
(in process) or "wait" (in a process of its own).
"""

from __future__ import annotations

import argparse
import time

from quire.engine.client import EngineClient, InProcessClient, ProcessClient
from tests.engine.echo_worker import NAME, make_request, make_resolved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=64)
    args = parser.parse_args()
    print(f"{'core':12} {'worker':6} {'depth':>5} {'steps':>6} {'µs/step':>8} {'tokens/s':>10}  µs a step by phase")
    for client_type, executor, depth in (
        (InProcessClient, "uni", 1),
        (InProcessClient, "uni", 2),
        (InProcessClient, "mp", 2),
        (ProcessClient, "uni", 2),
        (ProcessClient, "mp", 2),
    ):
        length = args.prompt + args.tokens
        resolved = make_resolved(
            depth=depth,
            executor=executor,
            max_num_seqs=args.requests,
            max_tokens=max(8192, args.requests),
            max_model_len=length,
            num_gpu_blocks_override=args.requests * (length // 16 + 2),
            enable_prefix_caching=True,
        )
        client: EngineClient = client_type(resolved, NAME)
        name = "in process" if client_type is InProcessClient else "process"
        print(f"{name:12} {executor:6} {depth:5} {measure(client, args.requests, args.prompt, args.tokens)}")
        client.shutdown()


def measure(client: EngineClient, count: int, prompt: int, tokens: int) -> str:
    for i in range(count):
        client.add(make_request(f"r{i}", [(i * 7 + j * 3) % 900 for j in range(prompt)], tokens))
    running, prefilling = count, {f"r{i}" for i in range(count)}
    while prefilling:
        prefilling.difference_update(output.request_id for output in client.poll(60).special)
    before, began = client.call("stats"), time.perf_counter()
    while running:
        running -= sum(output.finish_reason is not None for output in client.poll(60).special)
    seconds = time.perf_counter() - began
    after = client.call("stats")
    steps = after["num_steps"] - before["num_steps"]
    generated = after["generation_tokens"] - before["generation_tokens"]
    phases = {
        name: (total - before["phase_seconds"].get(name, 0.0)) / steps * 1e6
        for name, total in after["phase_seconds"].items()
    }
    shares = "  ".join(f"{name} {value:.0f}" for name, value in phases.items() if value >= 1)
    return f"{steps:6} {seconds / steps * 1e6:8.0f} {generated / seconds:10.0f}  {shares}"


if __name__ == "__main__":
    main()
