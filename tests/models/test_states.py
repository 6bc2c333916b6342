"""Models whose layers keep a state, as they are served: what is refused, what a preemption does, what is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.attention.recurrent import StateCache, StatePart
from quire.foundation.errors import ConfigError
from quire.types.kv import KVGroupSpec, capacity
from quire.types.plan import NewBlocks, PageCopies, StepPlan
from quire.worker.kv_store import KVStore
from quire.worker.pages import MAX_WASTE, lay_out
from quire.worker.trial_steps import prompt_chunks
from tests.models import checkpoints
from tests.models.cases import CASES
from tests.models.test_families import STEPS, VOCAB, largest_error, prompts

CPU = torch.device("cpu")
USUAL: dict[str, Any] = {
    "device": "cpu", "num_threads": 1, "dtype": "float32", "max_model_len": 128, "skip_tokenizer_init": True,
}  # fmt: skip


@pytest.mark.parametrize("case", ["bamba", "mamba2"])
def test_preempted_requests_begin_anew(case: str, tmp_path: Path) -> None:
    """Each step somebody loses pages and seat; others' states lie in the pages that they get next."""
    made, config = CASES[case]
    reference = checkpoints.make(made, **config)
    checkpoints.save(reference, tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True, detokenize=False, logprobs=VOCAB)
    options = {**USUAL, "max_logprobs": VOCAB, "max_prefill_chunk": 16, "preempt_every_step": True}
    with LLM(str(tmp_path), **options) as llm:
        answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts()], params, use_tqdm=False)
        assert llm.call("check") is None
    assert largest_error(reference, answers) <= 1e-4


@pytest.mark.parametrize("case", ["bamba", "mamba", "qwen3_next"])
def test_states_may_be_of_16_bits(case: str, tmp_path: Path) -> None:
    """Half the memory, and what was computed but for the rounding."""
    made, config = CASES[case]
    reference = checkpoints.make(made, **config)
    checkpoints.save(reference, tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True, detokenize=False, logprobs=VOCAB)
    options = {**USUAL, "max_logprobs": VOCAB, "mamba_ssm_cache_dtype": "bfloat16"}
    with LLM(str(tmp_path), **options) as llm:
        answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts()], params, use_tqdm=False)
    assert 1e-7 < largest_error(reference, answers) <= 0.1


def test_drafts_are_refused_by_name(tmp_path: Path) -> None:
    made, config = CASES["mamba2"]
    checkpoints.save(checkpoints.make(made, **config), tmp_path)
    wanted = {"method": "ngram", "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match="Mamba2ForCausalLM keeps a state, which cannot go back behind a draft"):
        LLM(str(tmp_path), **USUAL, speculative_config=wanted)


def full(layers: int, heads: int = 8, dim: int = 128) -> KVGroupSpec:
    return KVGroupSpec("full", 16, layers, heads, dim, 2)


def states(layers: int, size: int) -> KVGroupSpec:
    return KVGroupSpec("state", 16, layers, 1, 1, 2, state_bytes=size)


@pytest.mark.parametrize(
    ("groups", "pages"),
    [
        ([full(4), states(24, 4_255_744)], 24),  # Nemotron-H 8B
        ([full(12, 2, 256), states(36, 2_146_304)], 36),  # Qwen3-Next 80B
        ([full(6, 8, 64), states(10, 8192)], 1),  # LFM2 1.2B, whose states are small
    ],
)
def test_pages_are_as_large_as_makes_states_fit(groups: list[KVGroupSpec], pages: int) -> None:
    made = lay_out(groups, 16)
    keys, state = made.groups
    assert made.slabs == 1
    assert state.pages == state.num_blocks(1) == state.num_blocks(100_000) == pages
    assert state.num_blocks(0) == 0
    assert keys.block_size == 16 * made.splits[0]
    assert keys.bytes_per_block == made.page_bytes
    wasted = state.pages * made.page_bytes / (state.num_layers * state.state_bytes) - 1
    assert wasted <= MAX_WASTE or state.pages == 1
    assert capacity(made.groups, 1 + pages + 2) == 2 * keys.block_size


def test_a_model_of_states_alone_keeps_the_ids_of_tokens() -> None:
    made = lay_out([states(64, 4_255_744)], 16)
    state, history = made.groups
    assert (made.keeper, history.kind, state.pages) == (1, "history", 64)
    assert made.page_bytes == 4_255_744
    parts = (StatePart((128, 64, 130)),)
    store = KVStore(lay_out([states(2, 4_259_840)], 16), [0, 0], 4, torch.bfloat16, CPU, [parts, parts])
    assert store.token_of_slot.shape == (4 * history.block_size,)
    assert [cache.entry for cache in store.layers if isinstance(cache, StateCache)] == [0, 1]


def test_states_of_layers_do_not_overlap() -> None:
    """A page of three layers' states, and one of the fourth's."""
    parts = (StatePart((2, 5)), StatePart((3, 2), torch.bfloat16))
    size = sum(part.num_bytes for part in parts)
    made = lay_out([full(1, 1, 24), states(4, size)], 16)
    assert made.states_a_page == 3
    store = KVStore(made, [1, 0, 1, 1, 1], 9, torch.bfloat16, CPU, [parts] * 4)
    caches = [cache for cache in store.layers if isinstance(cache, StateCache)]
    assert [cache.entry for cache in caches] == [0, 0, 0, 1]
    tensors = [part for cache in caches[:3] for part in cache.parts]
    for number, part in enumerate(tensors, start=1):
        part[5] = number
    assert all((part[5] == number).all() for number, part in enumerate(tensors, start=1))
    assert not store.data[0, :5].any()
    assert not store.data[0, 6:].any()


def blocks(*numbers: int) -> NewBlocks:
    """The first entries of the table of seat 1."""
    index = np.arange(len(numbers), dtype=np.int32)
    return NewBlocks(np.ones(len(numbers), np.int32), index, np.array(numbers, np.int32))


def plan(keys: NewBlocks, states: NewBlocks, **copies: PageCopies) -> StepPlan:
    made = prompt_chunks(np.array([1], np.int32))
    made.blocks.extend([keys, states])
    return msgspec.structs.replace(made, **copies)


def test_pages_of_states_are_copied_and_cleared_before_others_get_them() -> None:
    made = lay_out([full(1, 1, 24), states(4, 512)], 16)
    store = KVStore(made, [0], 9, torch.bfloat16, CPU)
    assert store.states is not None
    data = store.data[0]
    data.copy_(torch.arange(9)[:, None].expand_as(data))
    kept = PageCopies(np.array([[7, 8]], np.int32), np.array([[1, 2]], np.int32))
    first = plan(blocks(3), blocks(7, 8), snapshots=kept)
    store.states.before(first)
    assert data[:, 0].tolist() == list(range(9)), "keys and values of others stay what they are"
    store.states.after(first)
    assert data[:, 0].tolist() == [0, 7, 8, 3, 4, 5, 6, 7, 8]
    # Two that go on from it: the first gets its very pages turned round, the second what the first has read by then.
    again = PageCopies(np.array([[1, 2], [4, 5]], np.int32), np.array([[2, 1], [6, 4]], np.int32))
    store.states.before(plan(blocks(), blocks(2, 1, 6, 4), restores=again))
    assert data[:, 0].tolist() == [0, 8, 7, 3, 5, 5, 4, 7, 8]
    store.states.before(plan(blocks(5, 8, 1), blocks()))
    assert data[:, 0].tolist() == [0, 0, 7, 3, 5, 5, 4, 7, 0], "a copy, and a state"
    assert all((page == page[0]).all() for page in data)
    store.states.before(plan(blocks(8), blocks()))
    data[8] = 9
    store.states.before(plan(blocks(8), blocks()))
    assert data[8, 0] == 9, "what has been cleared holds keys now"
