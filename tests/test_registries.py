"""Everything that has a name: what each registry asks for is what its contract says, and what is there has it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire.config.attention import ATTENTION_BACKENDS, PROMPT_ATTENTION_BACKENDS
from quire.config.devices import PLATFORMS
from quire.config.families import model_families
from quire.config.logits_processors import LOGITS_PROCESSORS
from quire.config.quantization import METHODS
from quire.config.runtime import EXECUTORS, STAT_LOGGERS
from quire.config.speculative import DRAFTERS
from quire.foundation.registry import Registry, load
from quire.parsers.base import REASONING_FORMATS, TOOL_FORMATS
from quire.quantization.base import FORMATS
from quire.types.structured import GRAMMAR_BACKENDS
from quire.worker.features.base import STEP_FEATURES

REGISTRIES = [
    ATTENTION_BACKENDS,
    DRAFTERS,
    EXECUTORS,
    FORMATS,
    GRAMMAR_BACKENDS,
    LOGITS_PROCESSORS,
    METHODS,
    PLATFORMS,
    PROMPT_ATTENTION_BACKENDS,
    REASONING_FORMATS,
    STAT_LOGGERS,
    STEP_FEATURES,
    TOOL_FORMATS,
    model_families(),
]
every = pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.kind)


@every
def test_the_contract_has_what_is_asked_for(registry: Registry) -> None:
    contract = load(registry.contract)
    assert registry.needs
    if isinstance(contract, type):
        assert [name for name in registry.needs if not hasattr(contract, name)] == []


@every
def test_all_that_is_built_in_has_it(registry: Registry) -> None:
    for name in registry._targets:
        found = registry.get(name)
        assert [need for need in registry.needs if not hasattr(found, need)] == [], name
        assert callable(found) or not registry.is_class


def test_the_page_of_plugins_has_them_all() -> None:
    page = (Path(__file__).parents[1] / "docs" / "plugins.md").read_text(encoding="utf-8")
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `quire.")]
    told = {group for row in rows for group in re.findall(r"`(quire\.\w+)`", row)}
    assert told >= {registry.group for registry in REGISTRIES} - {STEP_FEATURES.group}
