"""Products with experts, compiled for compute capability 9.0 where there need not be such a device."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from quire.kernels.dispatch import INTERPRETED  # noqa: E402
from quire.kernels.moe.triton.plan import HEIGHTS, of_rows  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="of compiled kernels")
ALIGNED = (
    "x_ptr", "x_scale_ptr", "weight_ptr", "scale_ptr", "share_ptr", "out_ptr", "out_scale_ptr", "order_ptr",
    "tiles_ptr", "num_lines", "x_stride",
)  # fmt: skip


@pytest.mark.parametrize("width", [2, 1])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rows", HEIGHTS)
def test_weights_stream_through_shared_memory_to_the_matrix_units(
    rows: int, gated: bool, width: int, tmp_path: Path
) -> None:
    """By the bulk copy engine, without spills, and with room for as many programs on a processor as planned."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    from quire.kernels.moe.triton.grouped import _grouped_kernel

    plan, narrow = of_rows(rows, width), width == 1
    how, hidden, inner = plan.gate_up if gated else plan.down, 2048, 768
    kind, unit = "fp8e4nv" if narrow else "bf16", plan.gate_up.block_n if narrow and not gated else how.block_k
    types: dict[str, str] = {
        "x_ptr": f"*{kind}", "x_desc": f"*{kind}" if gated else f"tensordesc<{kind}[{rows}, {unit}]>",
        "x_scale_ptr": "*fp32", "weight_ptr": f"*{kind}", "weight_desc": f"tensordesc<{kind}[{how.block_n}, {unit}]>",
        "scale_ptr": "*fp32", "bias_ptr": "*bf16", "share_ptr": "*fp32", "out_ptr": f"*{kind}" if gated else "*bf16",
        "out_scale_ptr": "*fp32", "order_ptr": "*i32", "tiles_ptr": "*i32", "num_choices": "i32", "most": "i32",
        "num_lines": "i32", "x_stride": "i32",
    }  # fmt: skip
    constants: dict[str, Any] = {
        "N": inner if gated else hidden, "K": hidden if gated else inner, "TOP_K": 8, "ROWS": rows,
        "BLOCK_N": how.block_n, "BLOCK_K": how.block_k, "STAGES": how.stages, "TALL": how.tall, "GATED": gated,
        "SCALED": narrow, "BIAS": False, "ALPHA": 1.0, "LIMIT": 0.0, "SHIFT": 0.0, "BULK": True, "PRECISION": "tf32",
        "PDL": True, "SQUARED": False, "NARROW": narrow, "LARGEST": 448.0, "LEAST": 1e-30, "UNIT": unit,
    }  # fmt: skip
    names = _grouped_kernel.arg_names
    source = ASTSource(
        _grouped_kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in (*ALIGNED, *(["x_desc"] if gated else []))},
    )
    options = {"num_warps": how.warps, "launch_pdl": True}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert built.metadata.shared <= (113 if how.warps == 4 else 227) * 1024
    code = built.asm["ptx"]
    assert "wgmma.mma_async" in code
    assert "cp.async.bulk.tensor" in code
    file = tmp_path / "kernel.ptx"
    file.write_text(code)
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(file), "-o", str(tmp_path / "kernel.cubin")]
    assembled = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert "serialized" not in assembled
    assert " 0 bytes spill stores" in assembled, assembled
