"""What the KV cache of a model looks like, in numbers that the brain can count with."""

from __future__ import annotations

import msgspec

NULL_BLOCK = 0  # never allocated: padding rows read and write here
PAD_SEAT = 0  # never handed out: padding rows of a graph use it


class KVGroupSpec(msgspec.Struct, frozen=True):
    """Layers that share one block table: same kind of attention, same bytes a token."""

    # "full", or "none": nothing is kept, so that a prompt must be computed in one step, and the one block that each
    # request holds is but a number (window, mamba: later kinds register in kv/)
    kind: str
    block_size: int  # tokens a block
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int

    @property
    def bytes_per_block(self) -> int:
        return 2 * self.block_size * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes


class PromptCost(msgspec.Struct, frozen=True):
    """What prompt tokens cost beside each other: attention against all the rest."""

    attention: float = 0.0  # attending to one token, in what else a prompt token costs
    wave: int = 0  # tokens of a chunk that fill the device once: attention of fewer takes as long; 0: it does not
    window: int = 0  # tokens that a token attends to at most; 0: all


class DraftCost(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of a decode step of so many rows, without drafts and with, as measured at the start."""

    rows: int
    plain: float
    drafted: float


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says once it is ready: how much fits, and where the start-up time went."""

    device: str  # "NVIDIA H200", "cpu (2 threads)"
    num_blocks: int  # KV blocks, the null block included
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
    draft_costs: list[DraftCost] = msgspec.field(default_factory=list)  # rising; empty: nothing is known
    max_drafted_rows: int = 0  # decode rows of a step with drafts
    can_prepare: bool = False  # an idle worker has use for calls of "prepare"
    max_num_batched_tokens: int = 0  # more than was resolved, where a step must hold the longest prompt; 0: as resolved
    notes: list[str] = msgspec.field(default_factory=list)  # every "auto" with its reason
