"""Adapters that were trained on models that see: the names are those of the whole model, whose decoder is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")

from quire import LLM, LoRARequest
from quire.foundation.errors import InputError
from tests.lora import adapters
from tests.lora.adapters import PROMPT, write
from tests.lora.test_parity import ASK, OPTIONS, scores
from tests.models import test_wrappers

# As Unsloth writes them.
_PATTERN = r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp).*?(?:k_proj|v_proj|q_proj|o_proj|gate_proj).*?)"


@pytest.mark.parametrize("targets", [["q_proj", "v_proj", "o_proj"], _PATTERN], ids=["ends", "pattern"])
@pytest.mark.parametrize("name", test_wrappers.CASES)
def test_an_adapter_of_the_whole_model(name: str, targets: Any, tmp_path: Path) -> None:
    """Ends of names are of the part that sees, too: what is added there is left out."""
    model = test_wrappers.make(name, tmp_path / "base")
    adapter = adapters.make(model, tmp_path / "adapter", r=3, lora_alpha=5, target_modules=targets)
    with LLM(str(tmp_path / "base"), **OPTIONS) as llm:
        [adapted] = llm.generate(PROMPT, ASK, lora_request=LoRARequest("a", 1, str(adapter)), use_tqdm=False)
    wanted = adapters.logprobs(model, adapter, [*PROMPT, *adapted.outputs[0].token_ids])
    torch.testing.assert_close(scores(adapted), wanted, atol=1e-4, rtol=0)


def test_other_spellings_and_what_does_not_hear_text(tmp_path: Path) -> None:
    model = test_wrappers.make("Mistral3", tmp_path / "base")
    made = torch.Generator().manual_seed(1)
    hidden = model.config.text_config.hidden_size
    down, up = torch.randn(2, hidden, generator=made), torch.randn(hidden, 2, generator=made)
    places = ("model.language_model.layers.0", "language_model.model.layers.0", "model.layers.0")
    folders = [
        write(
            tmp_path / str(number),
            {f"{place}.self_attn.o_proj.lora_A": down, f"{place}.self_attn.o_proj.lora_B": up},
            target_modules=[f"{place}.self_attn.o_proj"],
        )
        for number, place in enumerate(places)
    ]
    blind = write(
        tmp_path / "blind",
        {"model.vision_tower.q_proj.lora_A": down, "model.vision_tower.q_proj.lora_B": up},
        target_modules=["q_proj"],
    )
    with LLM(str(tmp_path / "base"), **OPTIONS, max_loras=3) as llm:
        requests = [LoRARequest(f"a{number}", number + 1, str(folder)) for number, folder in enumerate(folders)]
        first, *others = llm.generate([PROMPT] * 3, ASK, lora_request=requests, use_tqdm=False)
        for other in others:
            assert other.outputs[0].token_ids == first.outputs[0].token_ids
            torch.testing.assert_close(scores(other), scores(first), atol=1e-5, rtol=0)
        [plain] = llm.generate(PROMPT, ASK, use_tqdm=False)
        assert (scores(plain)[:5] - scores(first)[:5]).abs().max() > 0.01
        with pytest.raises(InputError, match="nothing but parts that see or hear"):
            llm.generate(PROMPT, ASK, lora_request=LoRARequest("blind", 9, str(blind)), use_tqdm=False)
