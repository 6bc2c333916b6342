"""A model family of the user's own, by name or as an object, in the engine's process and in another."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

import quire
from quire.config import own_families
from quire.foundation.errors import ConfigError
from quire.frontend.llm_engine import LLMEngine
from quire.models import qwen3
from quire.models.base import DecoderStack
from quire.types.sampling import SamplingParams
from tests.foundation.packages import install

ARCHITECTURE = "OwnForCausalLM"
PROMPT, GREEDY = [1, 2, 3], SamplingParams(max_tokens=4, temperature=0.0)


class Family:
    """The demo model's family under another name."""

    defaults = qwen3.defaults
    built: ClassVar[list[int]] = []

    @classmethod
    def build(cls, config: Mapping[str, Any], max_positions: int) -> DecoderStack:
        cls.built.append(max_positions)
        return qwen3.build(config, max_positions)


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(own_families, "_names", {})
    monkeypatch.setattr(own_families, "_given", {})
    Family.built.clear()
    return


def args(architecture: str = ARCHITECTURE) -> quire.EngineArgs:
    overrides = {"architectures": [architecture]}
    return quire.EngineArgs(max_model_len=96, use_tqdm_on_load=False, hf_overrides=overrides)


def answer(engine: LLMEngine) -> list[int]:
    try:
        engine.add_request("a", PROMPT, GREEDY)
        outputs: list[Any] = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        return outputs[-1].outputs[0].token_ids
    finally:
        engine.shutdown()


def test_a_class_and_a_name_build_the_same_model() -> None:
    wanted = answer(LLMEngine.from_engine_args(args("Qwen3ForCausalLM")))
    assert ARCHITECTURE not in quire.ModelRegistry.get_supported_archs()
    quire.ModelRegistry.register_model(ARCHITECTURE, Family)
    assert {ARCHITECTURE, "Qwen3ForCausalLM"} <= set(quire.ModelRegistry.get_supported_archs())
    assert answer(LLMEngine.from_engine_args(args())) == wanted
    assert Family.built == [96]
    # Another process imports it by its name.
    assert answer(LLMEngine.from_engine_args(args(), enable_multiprocessing=True)) == wanted
    assert Family.built == [96]


def test_a_module_is_a_family() -> None:
    quire.ModelRegistry.register_model(ARCHITECTURE, qwen3)
    assert own_families.family_name(ARCHITECTURE) == "quire.models.qwen3"
    quire.ModelRegistry.register_model(ARCHITECTURE, "tests.models.test_own_family:Family")
    assert len(answer(LLMEngine.from_engine_args(args()))) == 4, "the latest counts"
    assert Family.built == [96]


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (object(), "must have build"),
        ("no_such_package.family", "no module 'no_such_package'"),
        ("tests.models.test_own_family:Nothing", "has no 'Nothing'"),
        ("quire.types.kv", "has no build"),
    ],
)
def test_what_is_no_family_is_refused_by_name(family: Any, message: str) -> None:
    def start() -> None:
        quire.ModelRegistry.register_model(ARCHITECTURE, family)
        LLMEngine.from_engine_args(args())

    with pytest.raises(ConfigError, match=message):
        start()


def test_installed_packages_add_families_and_take_none_over(tmp_path: Path) -> None:
    points = {ARCHITECTURE: "own.family", "Qwen3ForCausalLM": "own.family"}
    install(tmp_path, "own", {"quire.model_family": points})
    code = f"import sys; sys.path.append({str(tmp_path)!r}); from quire.config.families import family_of; "
    code += f"print(*(family_of(name).name for name in {[*points]}), 'torch' in sys.modules, 'own' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.split() == [ARCHITECTURE, "qwen3", "False", "False"]
    assert "own.family of the package own" in done.stderr
    assert "is not used: Quire has a model family of that name" in done.stderr
