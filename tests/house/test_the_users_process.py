"""A user's own process is not ours: an LLM in it leaves everything as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# What a process has that a library could change for all of it. torch is the user's as well: what its import does counts
# as having been there before.
LIFE = """
import gc, json, locale, logging, os, resource, signal, sys, threading, warnings
import numpy, torch

def state():
    return {
        "sys.pycache_prefix": sys.pycache_prefix,
        "sys.dont_write_bytecode": sys.dont_write_bytecode,
        "sys.getswitchinterval": sys.getswitchinterval(),
        "sys.getrecursionlimit": sys.getrecursionlimit(),
        "sys.get_int_max_str_digits": sys.get_int_max_str_digits(),
        "sys.path": sys.path,
        "sys.stdout": [repr(sys.stdout), repr(sys.stderr)],
        "hooks": [repr(h) for h in (sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook)],
        "gc.get_threshold": gc.get_threshold(),
        "gc.isenabled": gc.isenabled(),
        "gc.get_freeze_count": gc.get_freeze_count(),
        "signal.getsignal": {str(n): repr(signal.getsignal(n)) for n in signal.valid_signals()},
        "signal.pthread_sigmask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "locale": locale.setlocale(locale.LC_ALL),
        "logging.root": [logging.root.level, *map(repr, logging.root.handlers)],
        "warnings.filters": [repr(f) for f in warnings.filters],
        "os.environ": dict(os.environ),
        "os.getcwd": os.getcwd(),
        "limits": [resource.getrlimit(i) for i in range(10)],
        "niceness": [os.nice(0), sorted(os.sched_getaffinity(0))],
        "threads": sorted(t.name for t in threading.enumerate()),
        "torch.get_default_dtype": str(torch.get_default_dtype()),
        "torch.get_default_device": str(torch.get_default_device()),
        "torch.get_num_threads": torch.get_num_threads(),
        "torch.is_grad_enabled": [torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
        "torch.get_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled(),
        "torch.get_rng_state": int(torch.get_rng_state().long().sum()),
        "numpy.random": int(numpy.random.get_state()[1].sum()),
        "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
        "open files": len(os.listdir("/proc/self/fd")),
    }

torch.manual_seed(7)
before = state()
from quire import LLM, SamplingParams, StructuredOutputsParams
with LLM(max_model_len=256, use_tqdm_on_load=False) as llm:
    bound = StructuredOutputsParams(choice=["yes", "no"])
    for params in (SamplingParams(max_tokens=4, seed=1), SamplingParams(max_tokens=4, structured_outputs=bound)):
        assert llm.generate("Hello", params, use_tqdm=False)[0].finished
print(json.dumps([before, state()]))
"""


@pytest.fixture(scope="module")
def life() -> list[dict[str, Any]]:
    """The process before and after an engine ran in it."""
    done = subprocess.run(
        [sys.executable, "-c", LIFE],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_an_engine_in_the_users_process_leaves_it_as_it_was(life: list[dict[str, Any]]) -> None:
    before, after = life
    changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert changed == {}


# Stands for a torch that was installed without byte code into a place that nobody may write to.
WITHOUT_BYTE_CODE = """
import sys
try:
    import quire.worker
except ImportError as error:
    assert "stands for torch" in str(error), error
print(sys.pycache_prefix, sys.dont_write_bytecode)
"""


def test_importing_the_worker_does_not_move_the_users_byte_code(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('stands for torch')\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{WITHOUT_BYTE_CODE}"
    done = subprocess.run(
        [sys.executable, "-B", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.split() == ["None", "True"]
