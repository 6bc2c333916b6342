"""What a step costs on a device, from what was measured there."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from quire.foundation.errors import ConfigError
from quire.types.plan import StepPlan

FOLDER = Path(__file__).parent / "measured"


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Of one model on one kind of device, shared by so many ranks.

    A step multiplies its tokens by the weights, which takes what a batch of so many decode rows takes, or, where it has
    many prompt tokens, their number times `prompt_us`; whichever is longer. Beside that each decode row reads its
    context, and each prompt token attends to what is before it.
    """

    device: str
    model: str
    tensor_parallel_size: int
    source: str  # where the numbers are from
    decode_ms: list[tuple[int, float]]  # (rows, milliseconds of a step), rising; each row has `context` tokens
    context: int
    context_ns: float  # that a row's step takes longer for a token more of context
    prompt_us: float  # a prompt token
    pair_ns: float  # a prompt token and one that it attends to
    num_blocks: int
    max_model_len: int
    block_size: int = 16
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 16384
    depth: int = 2

    def seconds(self, plan: StepPlan, lengths: np.ndarray, shared: int = 0) -> float:
        """Of a step; lengths: tokens that each of its rows has in the end [rows]; shared: tokens of context that decode
        rows attend to, but need not read, as another does for them."""
        rows = plan.num_decodes
        prompts, ends = plan.num_tokens[rows:].astype(np.float64), lengths[rows:].astype(np.float64)
        far = float(lengths[:rows].sum()) - rows * self.context - shared
        pairs = float((prompts * (ends - prompts / 2)).sum()) + shared
        weights = max(self._decode(max(1, rows)), (float(prompts.sum()) + rows) * self.prompt_us / 1e3)
        return weights / 1e3 + far * self.context_ns / 1e9 + pairs * self.pair_ns / 1e9

    def _decode(self, rows: int) -> float:
        """Milliseconds; beyond the largest batch measured as the last two go on."""
        known, times = zip(*self.decode_ms, strict=True)
        if rows <= known[-1] or len(known) == 1:
            return float(np.interp(rows, known, times))
        slope = (times[-1] - times[-2]) / (known[-1] - known[-2])
        return float(times[-1] + slope * (rows - known[-1]))


def known_costs() -> list[str]:
    """Names of those that come along."""
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def load_costs(name: str) -> StepCosts:
    """By the name of one that comes along, or a file. Raises ConfigError."""
    path = FOLDER / f"{name}.json" if name in known_costs() else Path(name)
    try:
        costs = msgspec.json.decode(path.read_bytes(), type=StepCosts)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"costs must be one of {', '.join(known_costs())}, or a file of step costs; {name!r} is none: {error}",
            "costs",
        ) from None
    if not costs.decode_ms:
        raise ConfigError(f"costs: {path} has no decode_ms", "costs")
    return costs
