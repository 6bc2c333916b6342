"""How groups of layers share pages: block sizes from bytes, views that do not overlap, and what long contexts hold."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from quire.scheduling.scheduler import Scheduler
from quire.types.kv import KVGroupSpec, capacity, tokens_held
from quire.types.plan import Admit, NewBlocks
from quire.types.sampling import SamplingParams
from quire.worker.kv_store import KVStore
from quire.worker.pages import MAX_WASTE, Pages, lay_out
from quire.worker.seats import DeviceSeats
from quire.worker.staging import Staging
from quire.worker.trial_steps import prompt_chunks
from tests.scheduling.simulator import make_request
from tests.scheduling.traces import answer_all

CPU = torch.device("cpu")


def full(layers: int, **shape: int) -> KVGroupSpec:
    return KVGroupSpec("full", 16, layers, shape.get("heads", 2), shape.get("dim", 8), 2)


def window(layers: int, tokens: int = 100, **shape: int) -> KVGroupSpec:
    return KVGroupSpec("window", 16, layers, shape.get("heads", 2), shape.get("dim", 8), 2, window=tokens)


def layers_of(pages: Pages) -> list[int]:
    """The group of each layer, groups in turn."""
    rows = [[number] * spec.num_layers for number, spec in enumerate(pages.groups) if spec.kind != "history"]
    return [group for column in itertools.zip_longest(*rows) for group in column if group is not None]


def test_one_group_has_a_slab_for_every_plane() -> None:
    pages = lay_out([full(7)], 16)
    assert (pages.slabs, pages.keeper) == (14, 0)
    assert pages.groups == [full(7)]
    assert pages.page_bytes == full(7).bytes_per_block
    store = KVStore(pages, [0] * 7, 5, torch.bfloat16, CPU)
    assert all(layer.k.is_contiguous() and layer.v.is_contiguous() for layer in store.layers)
    assert store.layers[0].k.shape == (5, 2, 16, 8)
    assert store.token_of_slot.shape == (5 * 16,)


@pytest.mark.parametrize(
    ("groups", "sizes"),
    [
        ([full(8), window(40)], [80, 16]),  # Gemma 3 12B
        ([full(4), window(22)], [80, 16]),  # Gemma 3 1B: slabs have room for a plane more
        ([full(9), window(27)], [48, 16]),  # Ministral 8B
        ([full(12), window(12)], [16, 16]),  # gpt-oss
        ([full(15), window(13)], [16, 16]),
        ([full(21), window(7)], [16, 48]),
        ([full(1), window(5, 64), window(5, 32)], [80, 16, 16]),
        ([full(2, heads=4), window(4, heads=2)], [16, 16]),
    ],
)
def test_block_sizes_follow_from_bytes(groups: list[KVGroupSpec], sizes: list[int]) -> None:
    pages = lay_out(groups, 16)
    assert [spec.block_size for spec in pages.groups] == sizes
    assert [pages.kernel_block(i) for i in range(len(groups))] == [16] * len(groups)
    for spec in pages.groups:
        assert spec.bytes_per_block <= pages.page_bytes <= (1 + MAX_WASTE) * spec.bytes_per_block


@pytest.mark.parametrize(
    "groups", [[full(2), window(10)], [full(4), window(22)], [full(2, heads=4), window(3)], [window(3)]]
)
def test_blocks_of_one_page_and_of_others_do_not_overlap(groups: list[KVGroupSpec]) -> None:
    """Every number of a page belongs to one layer's keys or values, in whichever group the page is used."""
    pages = lay_out(groups, 16)
    layers, num_blocks = layers_of(pages), 4
    store = KVStore(pages, layers, num_blocks, torch.bfloat16, CPU)
    for number in range(len(groups)):
        split = pages.splits[number]
        for page in range(num_blocks):
            store.data.zero_()
            own = [cache for cache, group in zip(store.layers, layers, strict=True) if group == number]
            for value, plane in enumerate((plane for cache in own for plane in (cache.k, cache.v)), start=1):
                blocks = plane[page * split : (page + 1) * split]
                assert (blocks == 0).all(), "another layer's plane lies here"
                blocks.fill_(value)
            others = [i for i in range(num_blocks) if i != page]
            assert not store.data[:, others].any(), "another page was written to"
            written = (store.data[:, page].view(torch.bfloat16) != 0).sum().item()
            assert written * 2 == pages.groups[number].bytes_per_block


def latent(layers: int) -> KVGroupSpec:
    return KVGroupSpec("latent", 16, layers, 1, 24, 2, planes=1, value_dim=16)


def test_latent_rows_are_one_plane_whose_first_columns_are_the_values() -> None:
    pages = lay_out([latent(5)], 16)
    assert (pages.slabs, pages.keeper, pages.page_bytes) == (5, 0, 5 * 16 * 24 * 2)
    store = KVStore(pages, [0] * 5, 4, torch.bfloat16, CPU)
    keys, values = store.layers[3].k, store.layers[3].v
    keys[2, 0, 7] = torch.arange(24)
    assert values.shape == (4, 1, 16, 16)
    assert values[2, 0, 7].tolist() == list(range(16))
    assert sum(bool(layer.k.any()) for layer in store.layers) == 1


def test_latent_rows_beside_windows_keep_the_history() -> None:
    pages = lay_out([latent(2), window(4)], 16)
    assert [spec.kind for spec in pages.groups] == ["latent", "window"]
    assert pages.keeper == 0
    assert capacity(pages.groups, 1 + 40) > 0


def test_where_no_layer_keeps_every_token_ids_have_pages_of_their_own() -> None:
    pages = lay_out([window(3)], 16)
    assert [spec.kind for spec in pages.groups] == ["window", "history"]
    assert pages.groups[1].bytes_per_block == pages.slab_bytes
    store = KVStore(pages, [0] * 3, 6, torch.bfloat16, CPU)
    assert store.token_of_slot.shape == (6 * pages.groups[1].block_size,)
    store.token_of_slot[2 * pages.groups[1].block_size :][: pages.groups[1].block_size] = 7
    assert [bool(store.data[:, page].any()) for page in range(6)] == [False, False, True, False, False, False]


def test_tables_and_histories_are_sent_in_pieces() -> None:
    """A page is several blocks to kernels; what a hit has skipped is written to the history."""
    pages = lay_out([window(2, 80), window(4, 40)], 16)
    assert pages.splits == [2, 1, 1]
    size = pages.groups[2].block_size
    store = KVStore(pages, layers_of(pages), 300, torch.bfloat16, CPU)
    seats = DeviceSeats(3, pages.groups[2].num_blocks(4096), store.token_of_slot, size, CPU)
    seats.add_groups(pages, 4096)
    staging = Staging(300, CPU)
    ids = np.arange(100, 400, dtype=np.int32)
    columns = [np.arange(n, m, dtype=np.int32) for n, m in ((0, 128), (100, 256), (0, 4096 // size))]
    blocks = [NewBlocks(np.full(len(at), 2, np.int32), at, at + 1) for at in columns]
    plan = prompt_chunks(np.array([1], np.int32), [Admit(2, 300, 310, SamplingParams(), [], 0, ids)])
    plan.blocks.extend(blocks)
    writes = seats.stage(plan, staging)
    staging.send()
    seats.apply(writes, staging)
    assert seats.tables[0].blocks[2].tolist() == list(range(2, 258))
    assert seats.tables[1].blocks[2, 100:].tolist() == list(range(101, 257))
    assert not seats.tables[1].blocks[2, :100].any()
    assert size < 300, "the history takes several pages"
    assert store.token_of_slot[size : size + 300].tolist() == ids.tolist()


def held(groups: list[KVGroupSpec], prompt: int, tokens: int, chunk: int) -> tuple[Pages, int, int]:
    """Pages a request holds at most while its prompt is computed, and at its last token."""
    pages = lay_out(groups, 16)
    scheduler = Scheduler(
        max_num_seqs=4, max_num_batched_tokens=chunk, max_model_len=prompt + tokens, num_blocks=20_000,
        groups=pages.groups,
    )  # fmt: skip
    scheduler.add(make_request("a", list(range(prompt)), tokens, stops=()))
    most = last = 0
    while (plan := scheduler.plan()) is not None:
        stats = scheduler.stats()
        last = stats.num_blocks - stats.num_free_blocks
        assert stats.kv_usage == pytest.approx(last / stats.num_blocks)
        most = max(most, last)
        scheduler.settle(plan, answer_all(plan))
        scheduler.check()
    assert scheduler.stats().num_free_blocks == scheduler.stats().num_blocks
    return pages, most, last


GEMMA_12B = {"heads": 8, "dim": 256}


def test_five_windows_to_one_at_32k_take_a_quarter_of_the_bytes() -> None:
    """48 layers like Gemma 3 12B's, 40 of them with windows of 1,024, against 48 that see everything."""
    groups = [full(8, **GEMMA_12B), window(40, 1024, **GEMMA_12B)]
    pages, most, last = held(groups, 32_768 - 40, 40, 2048)
    _, of_all, _ = held([full(48, **GEMMA_12B)], 32_768 - 40, 40, 2048)
    bytes_of_all = of_all * full(48, **GEMMA_12B).bytes_per_block
    assert last * pages.page_bytes <= 0.2 * bytes_of_all
    assert most * pages.page_bytes <= 0.25 * bytes_of_all


@pytest.mark.parametrize("chunk", [512, 2048])
def test_a_chunked_prompt_holds_a_window_and_a_chunk(chunk: int) -> None:
    pages, most, last = held([window(4, 1024)], 32_768 - 20, 20, chunk)
    history = pages.groups[1].num_blocks(32_768)
    assert most - history <= (1024 + chunk) // 16 + 1
    assert last - history <= 1024 // 16 + 1


def test_tokens_that_the_cache_holds() -> None:
    assert tokens_held([full(1)], 1 + 10, 50) == 160
    pages = lay_out([full(1), window(5, 64)], 16)
    assert tokens_held(pages.groups, 1 + 30, 800) == 30 * 800 // (10 + 5)


def test_what_fits_counts_windows_once() -> None:
    pages = lay_out([full(1), window(5, 64)], 16)
    assert [spec.block_size for spec in pages.groups] == [80, 16]
    assert capacity(pages.groups, 1 + 5 + 10) == 800  # ten pages that see everything, five for the window
    assert capacity([full(1)], 1 + 10) == 160
