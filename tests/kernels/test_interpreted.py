"""The Triton kernels themselves on a CPU, by Triton's interpreter: the tests of their rooms once more, in a process of
their own."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
ROOMS = ("tests/kernels", "tests/sampling", "tests/worker/test_step_kernels.py", "tests/attention")
# What the interpreter does not know: Gluon, and kernels that stand beside one in Gluon.
NOT_INTERPRETED = {
    "_register_kernel", "_code_rows_kernel", "_gated_sm90_kernel", "_fp8_ring_kernel", "_code_ring_kernel",
    "_qkv_sm90_kernel", "_prefill_sm90_kernel", "_shrink_registers_kernel", "_expand_registers_kernel",
    "_expand_ring_kernel", "_latent_prompt_sm90_kernel", "_latent_sm90_kernel", "_code_gemm_kernel",
    "_code_direct_kernel", "_code_tiles_kernel", "_down_sm90_kernel", "_ahead_kernel",
}  # fmt: skip


def _launched_by(node: ast.AST) -> ast.expr | None:
    """kernel[grid](…), launch(kernel, grid, …), partial(launch, kernel, grid)."""
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Subscript):
        return node.func.value
    names = [ast.unparse(one) for one in (node.func, *node.args[:1])]
    place = 0 if names[0] == "launch" else 1 if names == ["partial", "launch"] else None
    return None if place is None else node.args[place]


def launched_kernels() -> set[str]:
    """Names of all functions that are launched over a grid somewhere in the kernels' room."""
    found = set()
    for file in (ROOT / "quire" / "kernels").rglob("triton/*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        choices = {
            target.id: (node.value.body, node.value.orelse)
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if (name := _launched_by(node)) is not None:
                launched = choices.get(name.id, (name,)) if isinstance(name, ast.Name) else (name,)
                found |= {ast.unparse(one).rpartition(".")[2] for one in launched}
    return found - {"kernel", "compiled"}  # what is launched by another name, or was compiled before


def run_interpreted(folder: Path, *, few: bool) -> set[str]:
    """Run the rooms' tests; the names of the kernels that ran."""
    names = folder / "kernels"
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "QUIRE_LAUNCHED_KERNELS": str(names)}
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.kernels.interpreter_plugin", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-m", "not gpu", "--ignore", __file__, *ROOMS],
        cwd=ROOT,
        env=inherited | environment | ({"QUIRE_INTERPRET_FEW": "1"} if few else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return set(names.read_text(encoding="utf-8").split())


@pytest.mark.timeout(1800)  # a minute and a half of one processor, of which a loaded machine gives it a tenth
def test_every_kernel_runs_and_does_what_plain_torch_does(tmp_path: Path) -> None:
    kernels = launched_kernels() - NOT_INTERPRETED
    assert len(kernels) > 20
    assert kernels - run_interpreted(tmp_path, few=True) == set()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_with_all_parameters(tmp_path: Path) -> None:
    run_interpreted(tmp_path, few=False)
