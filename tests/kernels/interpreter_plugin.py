"""A pytest plugin for runs under Triton's interpreter, see `test_interpreted`.

QUIRE_LAUNCHED_KERNELS: a file that gets the names of all kernels that ran, a line each.
QUIRE_INTERPRET_FEW=1: of each test only the first parameters, for each kernel that they choose, and none that is SLOW:
that draws thousands of samples, routes as many tokens, starts processes, or takes a kernel through what another test
has it do as well.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from triton.runtime import interpreter

SLOW = (
    "::test_the_draws_", "::test_draws_", "::test_fewer_finite_logits", "::test_many_rows_find", "::test_a_seed_gives",
    "test_moe_experts.py::test_a_thousand_tokens", "::test_biases_and_another_gate",
    "::test_processes_meet_through_the_kernels", "::test_what_scores_get_besides_in_decode",
    "::test_what_scores_get_besides_in_prefill", "::test_decode_of_several_queries_a_row",
    "::test_sinks_count_once_beside_shared_prefixes", "test_fp8_cache.py::test_decode_with_shared_prefixes",
    "::test_what_is_no_number_still_chooses_experts", "test_moe_routing.py::test_nobody", "::test_a_norm_before",
    "::test_ranks_with_whole_experts_make_the_sum", "::test_no_row_changes_another_one",
    "::test_rows_that_fill_the_programs_stay_whole", "::test_tied_tokens_share_their_fate",
    "::test_a_long_row_of_two_neighbouring_floats",
)  # fmt: skip
_names: set[str] = set()
_run = interpreter.InterpretedFunction.run


def _noted(self: Any, *args: Any, **kwargs: Any) -> Any:
    _names.add(self.fn.__name__)
    return _run(self, *args, **kwargs)


def pytest_configure() -> None:
    interpreter.InterpretedFunction.run = _noted


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("QUIRE_INTERPRET_FEW") != "1":
        return
    few: dict[str, pytest.Item] = {}
    for item in items:
        if item.get_closest_marker("gpu") is None:
            name, _, parameters = item.nodeid.partition("[")
            if any(slow in name for slow in SLOW):
                continue
            kernel = "".join(re.findall(r"[A-Z]\w+(?=\()", parameters))  # the classes of configurations
            other = few.setdefault(name + kernel, item)
            if "interpret" in parameters and "interpret" not in other.nodeid:
                few[name + kernel] = item
    config.hook.pytest_deselected(items=[item for item in items if item not in few.values()])
    items[:] = few.values()


def pytest_sessionfinish() -> None:
    Path(os.environ["QUIRE_LAUNCHED_KERNELS"]).write_text("\n".join(sorted(_names)), encoding="utf-8")
