"""What the KV cache of a model looks like, in numbers that the brain can count with."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

NULL_BLOCK = 0  # never allocated: padding rows read and write here
PAD_SEAT = 0  # never handed out: padding rows of a graph use it
MAX_TOKENS = 2**31 - 1  # where nothing else bounds what a request can hold


class KVGroupSpec(msgspec.Struct, frozen=True):
    """Layers that keep the same kind of thing, and so share one block table a request.

    A layer keeps `planes` rows a token, each of `num_kv_heads * head_dim` numbers: keys and values are two, a latent
    row is one, whose first `value_dim` numbers are the values. All groups take their blocks from one pool of equally
    large pages; how many tokens one holds follows from the bytes.
    """

    # "full", "latent", "window", "chunk" (a window that stands still), "state" (of one size, however long the request),
    # "history" (ids of the tokens, where no layer
    # keeps them all), or "none": nothing is kept, so that a prompt must be computed in one step, and the one block that
    # each request holds is but a number
    kind: str
    block_size: int  # tokens a block
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    window: int = 0  # tokens that a query sees at most, its own included; 0: all
    planes: int = 2
    value_dim: int = 0  # 0: values are a plane of their own
    state_bytes: int = 0  # of a layer that keeps a state
    pages: int = 0  # that a request's state takes; 0: blocks follow from the tokens

    @property
    def keeps_all(self) -> bool:
        """Whether every token's row stays as long as the request."""
        return self.kind in ("full", "latent")

    @property
    def bytes_per_token(self) -> int:
        return self.planes * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def bytes_per_block(self) -> int:
        """That hold something: a page may be larger."""
        return self.block_size * self.bytes_per_token

    def num_blocks(self, num_tokens: int) -> int:
        """Length of the block table of a request whose first `num_tokens` tokens have KV."""
        if self.pages:
            return self.pages if num_tokens else 0
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks that a request on its way to so many tokens must be able to hold at once. A window's are those that
        one token sees; a chunk of a prompt takes more if there are."""
        blocks = self.num_blocks(num_tokens)
        return min(blocks, -(-(self.window - 1) // self.block_size) + 1) if self.window else blocks


def capacity(groups: Sequence[KVGroupSpec], num_blocks: int) -> int:
    """Tokens that one request can hold when it has all blocks but the null block to itself."""
    least, most = 0, MAX_TOKENS
    while least < most:
        middle = (least + most + 1) // 2
        if sum(group.most_blocks(middle) for group in groups) <= num_blocks - 1:
            least = middle
        else:
            most = middle - 1
    return least


def keeps_state(groups: Sequence[KVGroupSpec]) -> bool:
    """Whether some layers do. The prefix cache is on unless they do, where nobody says whether it shall be."""
    return any(group.kind == "state" for group in groups)


def tokens_held(groups: Sequence[KVGroupSpec], num_blocks: int, length: int) -> int:
    """Tokens of requests of so many tokens each that the cache holds at once."""
    needed = sum(group.most_blocks(length) for group in groups)
    if len(groups) == 1 and not groups[0].window and not groups[0].pages:
        return (num_blocks - 1) * groups[0].block_size
    return (num_blocks - 1) * length // needed if needed else 0


class PromptCost(msgspec.Struct, frozen=True):
    """What prompt tokens cost beside each other: attention against all the rest."""

    attention: float = 0.0  # attending to one token, in what else a prompt token costs, in layers that see all …
    wave: int = 0  # tokens of a chunk that fill the device once: attention of fewer takes as long; 0: it does not
    windows: list[tuple[int, float]] = []  # … and in those that see so many at most


class ModelWork(msgspec.Struct, frozen=True):
    """What a step of the model takes, on one device, and what that can do. 0: it is not known."""

    weights: int = 0  # numbers that each token is multiplied by …
    head_weights: int = 0  # … and those that each row which is sampled is multiplied by besides
    dense_bytes: int = 0  # of weights, read in every step
    # Of experts' weights: (tokens of a step, bytes that these hit), rising.
    expert_bytes: list[tuple[int, float]] = []
    copy_rate: float = 0.0  # bytes a second, at best
    product_rate: float = 0.0  # operations a second of matrix products, at best


class DraftCost(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of a decode step of so many rows, without drafts and with, as measured at the start."""

    rows: int
    plain: float
    drafted: float


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says once it is ready: how much fits, and where the start-up time went."""

    device: str  # "NVIDIA H200", "cpu (2 threads)"
    num_blocks: int  # pages of the KV cache, the null block included
    max_model_len: int  # tokens; lowered when the model's own does not fit
    groups: list[KVGroupSpec]
    vocab_size: int
    weight_bytes: int
    kv_bytes: int
    free_bytes: int
    attention_backend: str
    phases: dict[str, float]  # seconds by start-up phase
    # (decode rows, tokens in all) of the steps with prompt chunks that are padded: any smaller one costs as much.
    mixed_sizes: list[tuple[int, int]] = msgspec.field(default_factory=list)
    prompt_cost: PromptCost = PromptCost()
    model_work: ModelWork = ModelWork()
    draft_costs: list[DraftCost] = msgspec.field(default_factory=list)  # rising; empty: nothing is known
    max_drafted_rows: int = 0  # decode rows of a step with drafts
    can_prepare: bool = False  # an idle worker has use for calls of "prepare"
    max_num_batched_tokens: int = 0  # more than was resolved, where a step must hold the longest prompt; 0: as resolved
    notes: list[str] = msgspec.field(default_factory=list)  # every "auto" with its reason
