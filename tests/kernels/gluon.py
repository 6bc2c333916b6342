"""Compiles kernels in Gluon for compute capability 9.0, where there need not be such a device."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from quire.kernels.dispatch import INTERPRETED
from quire.kernels.triton.launch import GLUON_TESTED

TESTED = pytest.mark.skipif(
    INTERPRETED or not triton.__version__.startswith(GLUON_TESTED), reason="Gluon: only versions it was tested with"
)
ON_DEVICE = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no such GPU"
    ),
    TESTED,
]


def assert_assembles_well(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    aligned: Iterable[str],
    tmp_path: Path,
    most_spilled: int = 0,
    num_warps: int = 4,
    **options: int,
) -> str:
    """It fits in shared memory, and the assembler neither serialises matrix products nor spills registers: of a
    thread's no more bytes than `most_spilled`. options: more of Triton's.

    Returns the PTX. types: of the arguments that are not constants. aligned: those that are multiples of 16.
    """
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    source = GluonASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": num_warps, "launch_pdl": True, **options}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert built.metadata.shared <= 227 * 1024
    code = tmp_path / "kernel.ptx"
    code.write_text(built.asm["ptx"])
    assembled = subprocess.run(
        [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(code), "-o", str(tmp_path / "kernel.cubin")],
        check=True, capture_output=True, text=True,
    ).stderr  # fmt: skip
    assert "serialized" not in assembled
    spilled = re.search(r"(\d+) bytes spill stores", assembled)
    assert spilled is not None
    assert int(spilled[1]) <= most_spilled, assembled
    return str(built.asm["ptx"])
