"""Adapters beside the engine's other features: drafts, weights of 8 bits, several ranks, vectors, searches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from quire import LLM, BeamSearchParams, LoRARequest, SamplingParams
from quire.foundation.errors import InputError
from tests.lora.adapters import simple, write
from tests.models import checkpoints, sparse_checkpoints
from tests.pooling import encoders

TEXT = [5, 17, 3, 44, 8, 5, 17, 3, 44, 8, 5, 17, 3]
PROMPTS = [TEXT, TEXT[2:], TEXT[:5], [*TEXT, *TEXT]]
OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "num_threads": 1, "max_model_len": 96, "skip_tokenizer_init": True,
    "enable_lora": True, "max_loras": 2, "num_gpu_blocks_override": 60, "max_num_seqs": 4,
}  # fmt: skip
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "policy": "always"}
ASK = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(checkpoints.make("Llama"), tmp_path_factory.mktemp("base"))


def everywhere(folder: Path, seed: int = 3) -> Path:
    """DoRA on every matrix of a layer and on both ends of the model."""
    made, layer = torch.Generator().manual_seed(seed), "model.layers.1"
    sizes = {
        f"{layer}.self_attn.q_proj": (48, 48), f"{layer}.self_attn.k_proj": (24, 48),
        f"{layer}.self_attn.o_proj": (48, 48), f"{layer}.mlp.gate_proj": (80, 48), f"{layer}.mlp.down_proj": (48, 80),
        "lm_head": (97, 48),
    }  # fmt: skip
    tensors = {}
    for name, (outputs, inputs) in sizes.items():
        tensors[f"{name}.lora_A"] = torch.randn(2, inputs, generator=made) * 0.3
        tensors[f"{name}.lora_B"] = torch.randn(outputs, 2, generator=made) * 0.3
        tensors[f"{name}.lora_magnitude_vector"] = torch.rand(outputs, generator=made) + 0.8
    return write(folder, tensors, target_modules="all-linear", use_dora=True)


def answers(llm: LLM, requests: list[LoRARequest | None]) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, ASK, lora_request=requests, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def requests(tmp_path: Path) -> list[LoRARequest | None]:
    one = LoRARequest("one", 1, str(simple(tmp_path / "one", seed=1)))
    return [None, one, LoRARequest("all", 2, str(everywhere(tmp_path / "all"))), one]


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": DRAFTS},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param({"tensor_parallel_size": 2, "speculative_config": DRAFTS}, marks=pytest.mark.long),
        pytest.param({"pipeline_parallel_size": 3}, marks=pytest.mark.long),
        pytest.param({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param({"preempt_every_step": True, "debug": True}, marks=pytest.mark.long),
        pytest.param({"device": "torch:cpu"}, marks=pytest.mark.long),
    ],
)
def test_the_same_answers_however_they_are_made(
    options: dict[str, Any], base: Path, requests: list[LoRARequest | None]
) -> None:
    with LLM(str(base), **OPTIONS) as llm:
        wanted = answers(llm, requests)
    assert len({tuple(ids) for ids in wanted}) == len(wanted)
    with LLM(str(base), **{**OPTIONS, **options}) as llm:
        assert answers(llm, requests) == wanted


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"enable_expert_parallel": True}, marks=pytest.mark.long),
        pytest.param(
            {"enable_expert_parallel": True, "enable_eplb": True,
             "eplb_config": {"step_interval": 3, "num_redundant_experts": 2}},
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_norms_of_experts_that_ranks_share(options: dict[str, Any], tmp_path: Path) -> None:
    """DoRA divides by norms of lines, of which ranks have but a part, or one rank all."""
    model = sparse_checkpoints.make("qwen3")
    folder = checkpoints.save(model, tmp_path / "base")
    made, tensors = torch.Generator().manual_seed(2), {}
    shapes = {"gate_proj": (24, 48), "up_proj": (24, 48), "down_proj": (48, 24)}
    for expert in range(model.config.num_experts):
        for part, (outputs, inputs) in shapes.items():
            name = f"model.layers.1.mlp.experts.{expert}.{part}"
            tensors[f"{name}.lora_A"] = torch.randn(2, inputs, generator=made) * 0.3
            tensors[f"{name}.lora_B"] = torch.randn(outputs, 2, generator=made) * 0.3
            tensors[f"{name}.lora_magnitude_vector"] = torch.rand(outputs, generator=made) * 3 + 0.8
    adapter = write(tmp_path / "adapter", tensors, target_modules=list(shapes), use_dora=True)
    wanted: list[LoRARequest | None] = [None, LoRARequest("one", 1, str(adapter))] * 2
    found = []
    for ranks in ({}, {"tensor_parallel_size": 2, **options}):
        with LLM(str(folder), **OPTIONS, **ranks) as llm:
            found.append(answers(llm, wanted))
            plain = answers(llm, [None] * 4)
    assert found[0] == found[1]
    assert [ids != other for ids, other in zip(found[0], plain, strict=True)] == [False, True, False, True]


def test_over_weights_of_8_bits(base: Path, requests: list[LoRARequest | None]) -> None:
    """What an adapter adds is as exact as ever, and DoRA's norms are those of the weights as they are kept."""
    with LLM(str(base), **OPTIONS, quantization="fp8") as llm:
        plain, *adapted = answers(llm, requests)
        assert answers(llm, [None] * 4)[0] == plain
        assert all(ids != plain for ids in adapted)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_head_that_comes_with_its_adapter(base: Path, quantization: str | None, tmp_path: Path) -> None:
    """It must be the model's own, as that keeps it."""
    made = torch.Generator().manual_seed(4)
    own = load_file(base / "model.safetensors")["lm_head.weight"]
    pair = {"lm_head.lora_A": torch.randn(2, 48, generator=made), "lm_head.lora_B": torch.randn(97, 2, generator=made)}
    folders = [
        write(tmp_path / name, {**pair, "lm_head.base_layer": head}, target_modules=["lm_head"])
        for name, head in {"own": own, "other": own.flip(0)}.items()
    ]
    own_request, other = (LoRARequest(str(i), 1 + i, str(folder)) for i, folder in enumerate(folders))
    with LLM(str(base), **OPTIONS, quantization=quantization) as llm:
        assert len({tuple(ids) for ids in answers(llm, [None, own_request] * 2)[:2]}) == 2
        with pytest.raises(InputError, match="lm_head comes with a base layer that is not this model's"):
            answers(llm, [None, other] * 2)


def test_a_search_with_an_adapter(base: Path, requests: list[LoRARequest | None]) -> None:
    with LLM(str(base), **OPTIONS) as llm:
        params = BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True)
        plain, adapted = llm.beam_search([{"prompt_token_ids": TEXT}] * 2, params, lora_request=[None, requests[2]])
        assert plain.sequences[0].tokens != adapted.sequences[0].tokens


@pytest.mark.parametrize(("case", "module"), [("deberta_v2", "query_proj"), ("deberta_v2-own", "pos_key_proj")])
def test_what_distances_go_through_takes_no_adapters(case: str, module: str, tmp_path: Path) -> None:
    """Their rows are those of no request."""
    encoders.make(case, tmp_path / "base")
    name = f"encoder.layer.0.attention.self.{module}"
    tensors = {f"{name}.lora_A": torch.randn(2, 48), f"{name}.lora_B": torch.randn(48, 2)}
    folder = write(tmp_path / "adapter", tensors, target_modules=[module], layers_to_transform=[0])
    options = {key: OPTIONS[key] for key in ("device", "dtype", "num_threads", "skip_tokenizer_init", "enable_lora")}
    with LLM(str(tmp_path / "base"), runner="pooling", **options) as llm:
        with pytest.raises(InputError, match=f"{name} is no module of this model that takes adapters"):
            llm.encode([TEXT], pooling_task="token_embed", lora_request=LoRARequest("one", 1, str(folder)))
        assert llm.encode([TEXT], pooling_task="token_embed", use_tqdm=False)


def test_vectors_with_an_adapter(base: Path, tmp_path: Path) -> None:
    request = LoRARequest("one", 1, str(simple(tmp_path, seed=1)))
    with LLM(str(base), **OPTIONS, runner="pooling", convert="embed") as llm:
        plain, adapted, again = llm.embed([TEXT] * 3, lora_request=[None, request, None], use_tqdm=False)
    assert plain.outputs.embedding == again.outputs.embedding
    assert not np.allclose(plain.outputs.embedding, adapted.outputs.embedding, atol=1e-3)
