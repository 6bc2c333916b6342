"""What a step costs on a device, and what the host does beside it, from what was measured there."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from quire.foundation.errors import ConfigError
from quire.types.kv import PromptCost
from quire.types.plan import StepPlan

FOLDER = Path(__file__).parent / "measured"
_MAX_CHUNKS = 16  # prompt chunks of a padded step, see worker/mixed_graphs.py
_EAGER_SIZE = 64  # tokens that larger steps are rounded up to, see worker/batch.py


class HostCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of the CPU. Zeros: it takes no time."""

    request_us: float = 0.0  # a request takes from its caller to the core …
    prompt_token_us: float = 0.0  # … and each token of its prompt
    admit_us: float = 0.0  # a plan takes for a request that it begins …
    admit_token_us: float = 0.0  # … each token of its prompt that is computed …
    found_token_us: float = 0.0  # … and each that is found in the cache
    step_us: float = 0.0  # a step is planned and settled in …
    row_us: float = 0.0  # … and each row of it
    eager_ms: float = 0.0  # a step that no graph holds is launched in, at least


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    """What ranks that share the model divide among them, and where they meet."""

    sums: int  # over ranks, in a step
    token_bytes: int  # of a sum, a token
    kv_heads: int
    weight_bytes: int
    block_bytes: int  # of a block of the KV cache
    sum_us: dict[int, list[tuple[int, float]]]  # by ranks: (bytes, microseconds of a sum), rising
    whole_us: list[tuple[int, float]] = []  # (rows, microseconds of a step that no rank is spared), rising

    def sum_of(self, size: int, ranks: int) -> float:
        """Microseconds; of ranks that were not measured those of the next more, or of the most. Beyond the largest sum
        measured by its bytes."""
        known = min((each for each in self.sum_us if each >= ranks), default=max(self.sum_us))
        sizes, times = zip(*self.sum_us[known], strict=True)
        return float(np.interp(size, sizes, times) * max(1.0, size / sizes[-1]))

    def share_of(self, ms: float, rows: int, ranks: int) -> float:
        """Milliseconds that a step of one rank takes each of some, but for sums."""
        known, times = zip(*self.whole_us or [(1, 0.0)], strict=True)
        whole = float(np.interp(rows, known, times)) / 1e3
        return min(ms, whole + (ms - whole) / ranks)


class StepCosts(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Of one model on one kind of device, shared by so many ranks.

    A step multiplies its tokens by the weights. That takes what a decode step of as many rows was measured to take;
    beyond the largest batch measured, the time to read the weights and the time to multiply, of which the shorter
    partly hides in the longer. Beside that each decode row reads its context, each prompt token attends to what is
    before it, and each row that is sampled is multiplied by the head.
    """

    device: str
    model: str
    tensor_parallel_size: int
    source: str  # where the numbers are from
    decode_ms: list[tuple[int, float]]  # (rows, milliseconds of a step), rising; each row has `context` tokens
    context: int
    context_ns: float  # that a row's step takes longer for a token more of context
    prompt_us: float  # a token of a large step, without the head
    pair_ns: float  # a prompt token and one that it attends to
    num_blocks: int
    max_model_len: int
    block_size: int = 16
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 16384
    depth: int = 2
    overlap: float = 1.5  # reading r and multiplying m take (r^overlap + m^overlap)^(1/overlap): 1 nothing is hidden
    head_us: float = 0.0  # a row that is sampled
    experts: tuple[int, int] | None = None  # of a layer, and those that a token goes to
    shared_ms: float = 0.0  # a step takes longer in which rows share a beginning, read once by a kernel of its own …
    shared_ns: float = 0.0  # … and a row and a token of its shared beginning
    sizes: list[int] = []  # rows that decode steps are padded to, rising; none: they are not padded
    mixed_sizes: list[tuple[int, int]] = []  # see WorkerReport
    prompt_cost: PromptCost = PromptCost()
    host: HostCosts = HostCosts()
    sharing: Sharing | None = None

    def seconds(self, plan: StepPlan, lengths: np.ndarray, shared: int = 0) -> float:
        """Of a step; lengths: tokens that each of its rows has in the end [rows]; shared: tokens of context that decode
        rows attend to, but need not read, as another does for them."""
        rows, sampled = plan.num_decodes, int(np.count_nonzero(plan.samples))
        prompts, ends = plan.num_tokens[rows:].astype(np.float64), lengths[rows:].astype(np.float64)
        tokens = self.padded(plan) or rows + int(prompts.sum())
        pairs = float((prompts * (ends - prompts / 2)).sum())
        nanoseconds = (float(lengths[:rows].sum()) - shared) * self.context_ns + pairs * self.pair_ns
        ms = self._weights(tokens) - self.head_us * max(0, tokens - max(1, sampled)) / 1e3
        if shared:
            ms += self.shared_ms
            nanoseconds += shared * self.shared_ns
        return (ms + self._sums(tokens)) / 1e3 + nanoseconds / 1e9

    def padded(self, plan: StepPlan) -> int:
        """Tokens of the graph that holds a step; 0 if none does, where there are graphs."""
        rows, tokens = plan.num_decodes, int(plan.num_tokens.sum())
        if tokens == rows:
            return min((size for size in self.sizes if size >= rows), default=0)
        if len(plan.num_tokens) - rows > _MAX_CHUNKS:
            return 0
        return min((most for decodes, most in self.mixed_sizes if decodes >= rows and most >= tokens), default=0)

    @cached_property
    def _points(self) -> list[tuple[int, float]]:
        """`decode_ms` without the contexts, and never falling."""
        bare = [ms - rows * self.context * self.context_ns / 1e6 for rows, ms in self.decode_ms]
        return list(zip([rows for rows, _ in self.decode_ms], np.maximum.accumulate(bare).tolist(), strict=True))

    def _weights(self, tokens: int) -> float:
        """Milliseconds of a step of so many tokens, all of them sampled, without attention."""
        (most, last), *_ = self._points[::-1]
        if tokens <= most:
            known, times = zip(*self._points, strict=True)
            return float(np.interp(self._hit(tokens), [self._hit(rows) for rows in known], times))
        tokens = tokens if self._is_padded(tokens) else -(-tokens // _EAGER_SIZE) * _EAGER_SIZE
        return self._formula(tokens) + last - self._formula(most)

    def _is_padded(self, tokens: int) -> bool:
        return not self.sizes or tokens in self.sizes or any(tokens == size for _, size in self.mixed_sizes)

    def _formula(self, tokens: int) -> float:
        reading, multiplying = self._reading(tokens), tokens * self.prompt_us / 1e3
        power = self.overlap
        both: float = (reading**power + multiplying**power) ** (1 / power)
        return both + tokens * self.head_us / 1e3

    def _reading(self, tokens: int) -> float:
        """Milliseconds in which the weights that so many tokens meet are read: a line through what few rows and the
        most rows measured took, by the experts they hit."""
        (fewest, first), (most, last) = self._points[0], self._points[-1]
        if self.experts is None or most == fewest:
            return first
        slope = (last - first) / (self._hit(most) - self._hit(fewest))
        return first + slope * (self._hit(tokens) - self._hit(fewest))

    def _hit(self, tokens: int) -> float:
        """Experts that so many tokens hit which choose evenly and each by itself; the tokens, if there are none."""
        if self.experts is None:
            return tokens
        experts, chosen = self.experts
        return float(experts * (1 - (1 - chosen / experts) ** tokens))

    def _sums(self, tokens: int) -> float:
        """Milliseconds in which ranks meet."""
        if self.sharing is None or self.tensor_parallel_size == 1:
            return 0.0
        size = tokens * self.sharing.token_bytes
        return self.sharing.sums * self.sharing.sum_of(size, self.tensor_parallel_size) / 1e3

    def shared_by(self, ranks: int) -> StepCosts:
        """Of so many ranks, from these of one: each reads and multiplies its share, and all meet in sums. Raises
        ConfigError if it is not known where."""
        if ranks == self.tensor_parallel_size:
            return self
        if self.sharing is None or self.tensor_parallel_size != 1:
            raise ConfigError(
                f"tp={ranks}: the costs are of tp={self.tensor_parallel_size}, and do not say how ranks would share "
                "the model: measure with as many (see costs)",
                "tp",
            )
        of_cache, share_of = 1 / min(ranks, self.sharing.kv_heads), self.sharing.share_of
        room = ranks * self.num_blocks * self.sharing.block_bytes + (ranks - 1) * self.sharing.weight_bytes
        return msgspec.structs.replace(
            self, tensor_parallel_size=ranks,
            decode_ms=[(rows, share_of(ms, rows, ranks)) for rows, ms in self.decode_ms],
            context_ns=self.context_ns * of_cache, prompt_us=self.prompt_us / ranks, pair_ns=self.pair_ns / ranks,
            head_us=self.head_us / ranks, shared_ns=self.shared_ns / ranks,
            num_blocks=int(room / (ranks * self.sharing.block_bytes * of_cache)),
        )  # fmt: skip


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
