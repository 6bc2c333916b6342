"""quire simulate TRACE"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.cli import options
from quire.config.simulate import SimulateConfig
from quire.foundation.errors import ConfigError


def run(arguments: Sequence[str]) -> int:
    values = options.parse(
        "simulate",
        "Predict throughput and latency of a trace of requests from measured step costs, without a GPU.",
        arguments,
        (SimulateConfig,),
        positional=("trace",),
    )
    config = options.section_of(SimulateConfig, values)
    if not config.trace:
        raise ConfigError("trace: give a file with a request a line", "trace")
    from quire.simulation.costs import load_costs
    from quire.simulation.run import Prediction, Quantiles, simulate
    from quire.simulation.trace import read_trace

    costs = load_costs(config.costs)
    costs = costs.shared_by(config.tp or costs.tensor_parallel_size)
    replicas = config.num_replicas(costs.tensor_parallel_size)
    wanted = {"max_num_seqs": config.max_num_seqs, "max_num_batched_tokens": config.max_num_batched_tokens}
    wanted["num_blocks"] = config.kv_cache_blocks
    costs = msgspec.structs.replace(costs, **{name: value for name, value in wanted.items() if value is not None})
    requests = [
        msgspec.structs.replace(request, arrival=request.arrival / config.speed)
        for request in read_trace(config.trace, offline=config.offline)
    ]
    found: Prediction = simulate(requests, costs, replicas, config.policy, together=config.offline)
    if config.json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return 0
    print(f"{costs.model} on {replicas} × {costs.tensor_parallel_size} {costs.device} ({costs.source})")
    for name in Prediction.__struct_fields__:
        value = getattr(found, name)
        if isinstance(value, Quantiles):
            each = f"mean {value.mean:.1f}, p50 {value.p50:.1f}, p90 {value.p90:.1f}, p99 {value.p99:.1f} ms"
        elif isinstance(value, list):
            each = ", ".join(f"{share:.0%}" for share in value)
        else:
            each = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
        print(f"{name.replace('_', ' '):26s} {each}")
    return 0
