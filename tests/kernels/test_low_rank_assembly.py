"""The low-rank kernels that keep everything in registers: compiled anywhere, run where there is a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.kernels.gluon import TESTED, assert_assembles_well

CASES = [(2, (14336, 28672), True, False), (3, (4096, 5120), False, False), (1, (4096, 4096), False, True)]
EXPAND = {"SPLITS": 8, "HAS_BIAS": False, "LOG2_E": 1.44, "PDL": True}
TILES = dict.fromkeys(("tile_slots", "tile_rows", "ranks"), "*i32")


@TESTED
@pytest.mark.parametrize(("lines", "room", "steps", "blocks"), [(48, 16, 1, 1), (16, 16, 4, 1), (192, 64, 1, 4)])
def test_shrink_reads_what_it_multiplies(lines: int, room: int, steps: int, blocks: int, tmp_path: Path) -> None:
    """8 numbers a load, and from there into the matrix units."""
    from quire.kernels.low_rank.triton.shrink_registers import DEPTH, WIDTH, _shrink_registers_kernel

    constants = {
        "LINES": lines, "ROOM": room, "HEIGHT": 8, "WIDTH": WIDTH, "STEPS": steps, "BLOCKS": blocks,
        "DEPTH": min(DEPTH, steps * blocks), "EVEN": True, "BESIDE": False, "PDL": True,
    }  # fmt: skip
    types = TILES | {"x": "*bf16", "down": "*bf16", "inner": "*fp32", "num_rows": "i32", "k": "i32", "stride": "i32"}
    aligned = ("x", "down", "inner", "k", "stride")
    code = assert_assembles_well(_shrink_registers_kernel, types, constants, aligned, tmp_path)
    assert code.count("mma.sync") == blocks * steps * WIDTH // 16
    assert "ldmatrix" not in code
    wide = 2 * WIDTH // 32  # of 16 lines, and half as many of 8 rows
    assert code.count("ld.global.v4") == steps * blocks * wide + steps * wide // 2


@TESTED
@pytest.mark.parametrize(("parts", "ends", "gated", "residual"), CASES)
@pytest.mark.parametrize("room", [16, 64])
def test_expand_needs_no_shared_memory(
    parts: int, ends: tuple[int, int], gated: bool, residual: bool, room: int, tmp_path: Path
) -> None:
    from quire.kernels.low_rank.triton.expand_registers import _expand_registers_kernel

    constants = EXPAND | {
        "LINES": room * parts, "ROOM": room, "FIRST_END": ends[0], "SECOND_END": ends[1], "GATED": gated,
        "RESIDUAL": residual,
    }  # fmt: skip
    types = TILES | {"inner": "*fp32", "gains": "*fp32"} | dict.fromkeys(("y", "out", "up", "bias"), "*bf16")
    types |= dict.fromkeys(("num_rows", "n", "stride", "out_stride"), "i32")
    aligned = ("y", "inner", "out", "up", "gains", "bias", "n", "stride", "out_stride")
    code = assert_assembles_well(_expand_registers_kernel, types, constants, aligned, tmp_path)
    assert ".shared" not in code.replace(".extern .shared .align 16 .b8 global_smem[];", "")
    assert "bar.sync" not in code


@TESTED
@pytest.mark.parametrize("outputs", [1, 60])
def test_expand_makes_few_wide_outputs(outputs: int, tmp_path: Path) -> None:
    """One is a constant to the compiler, its strides too."""
    from quire.kernels.low_rank.triton.expand_registers import _expand_registers_kernel

    constants = EXPAND | {
        "LINES": 16, "ROOM": 16, "FIRST_END": outputs, "SECOND_END": outputs, "GATED": False, "RESIDUAL": False,
    }  # fmt: skip
    types = TILES | {"up": "*bf16", "num_rows": "i32"}
    types |= dict.fromkeys(("inner", "gains", "y", "out", "bias"), "*fp32")
    sizes = ("n", "stride", "out_stride")
    if outputs == 1:
        constants |= dict.fromkeys(sizes, 1)
    else:
        types |= dict.fromkeys(sizes, "i32")
    aligned = ("y", "inner", "out", "up", "gains", "bias")
    code = assert_assembles_well(_expand_registers_kernel, types, constants, aligned, tmp_path)
    assert "mma.sync" in code


@TESTED
@pytest.mark.parametrize(("parts", "ends", "gated", "residual"), CASES)
def test_blocks_come_by_copies_of_16_bytes(
    parts: int, ends: tuple[int, int], gated: bool, residual: bool, tmp_path: Path
) -> None:
    """Two blocks of a program, of which four or six fit a processor; the gate's with what follows it."""
    from quire.kernels.low_rank.triton.expand_ring import STAGES, _expand_ring_kernel

    constants = EXPAND | {
        "LINES": 16 * parts, "FIRST_END": ends[0], "SECOND_END": ends[1], "GATED": gated, "RESIDUAL": residual,
        "READ": gated, "STAGES": STAGES,
    }  # fmt: skip
    types = TILES | {"next_ranks": "*i32"} | dict.fromkeys(("inner", "gains", "next_inner"), "*fp32")
    types |= dict.fromkeys(("y", "out", "up", "bias", "next_down"), "*bf16")
    types |= dict.fromkeys(("num_rows", "n", "stride", "out_stride", "next_k", "blocks"), "i32")
    aligned = ("y", "inner", "out", "up", "gains", "bias", "n", "stride", "out_stride", "next_down", "next_k")
    code = assert_assembles_well(_expand_ring_kernel, types, constants, aligned, tmp_path)
    copies = [line for line in code.splitlines() if "cp.async.cg" in line]
    assert copies
    assert all("0x10" in line for line in copies)
