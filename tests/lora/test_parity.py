"""Adapters that peft has made compute what peft computes with them, each alone and many in one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")

from quire import LLM, LoRARequest, SamplingParams
from quire.types.output import RequestOutput
from tests.lora import adapters
from tests.lora.adapters import PROMPT
from tests.models import checkpoints
from tests.models.cases import CASES as MIXED
from tests.models.sparse_checkpoints import CASES as SPARSE

OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "num_threads": 1, "max_model_len": 64, "skip_tokenizer_init": True,
    "enable_lora": True, "block_size": 4,
}  # fmt: skip
ASK = SamplingParams(max_tokens=6, temperature=0.0, prompt_logprobs=0, logprobs=0, ignore_eos=True)
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
# What peft makes of which model.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("Llama", {}, {"r": 4, "lora_alpha": 7}),
    "rslora": ("Llama", {}, {"r": 8, "use_rslora": True}),
    "dora": ("Llama", {"attention_bias": True}, {"r": 4, "use_dora": True}),
    "patterns": (
        "Llama",
        {},
        {
            "r": 2,
            "rank_pattern": {"q_proj": 5, "layers.1.mlp.up_proj": 9},
            "alpha_pattern": {"down_proj": 3, r"o_.*": 11},
            "layers_to_transform": [1, 2],
            "layers_pattern": "layers",
            "exclude_modules": ["layers.2.self_attn.v_proj"],
        },
    ),
    "regex": ("Qwen3", {"head_dim": 16}, {"r": 3, "target_modules": r".*\.(q|v|gate)_proj"}),
    "all-linear": ("Qwen3", {"head_dim": 16}, {"r": 3, "target_modules": "all-linear"}),
    "ends": ("Llama", {}, {"r": 4, "target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    "ends-dora": ("Llama", {}, {"r": 4, "target_modules": ["embed_tokens", "lm_head", "v_proj"], "use_dora": True}),
    "tied": ("Llama", {"tie_word_embeddings": True}, {"r": 4, "target_modules": ["embed_tokens", "q_proj"]}),
    "biased-head": ("Phi", {}, {"r": 4, "target_modules": ["dense", "lm_head"]}),
    "fused": ("Phi3", {}, {"r": 4, "target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}),
    "transposed": (
        "GPT2",
        {"intermediate_size": ...},
        {"r": 4, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
    ),
    "transposed-dora": (
        "GPT2",
        {"intermediate_size": ...},
        {"r": 4, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True},
    ),
    "experts": (
        "Qwen3Moe",
        MOE,
        {
            "r": 3,
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "experts-down": (
        "Qwen3Moe",
        MOE,
        {"r": 3, "target_modules": ["o_proj"], "target_parameters": ["experts.down_proj"]},
    ),
    "experts-interleaved": (
        *SPARSE["gpt_oss"],
        {
            "r": 3,
            "target_modules": ["v_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "all-of-latent": (*SPARSE["deepseek3"], {"r": 3, "target_modules": "all-linear"}),
    "latent-dora": (*SPARSE["deepseek2-groups"], {"r": 3, "target_modules": ["kv_b_proj"], "use_dora": True}),
    "latent": (*SPARSE["deepseek3"], {"r": 3, "target_modules": ["q_b_proj", "kv_a_proj_with_mqa", "o_proj"]}),
    "shared-expert": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
        {"r": 3, "target_modules": ["shared_expert.up_proj", "shared_expert.down_proj", "k_proj"]},
    ),
    "shared-gate": (*SPARSE["qwen2"], {"r": 3, "target_modules": "all-linear", "exclude_modules": ["q_proj"]}),
    "router-parameter": (
        *SPARSE["qwen3"],
        {"r": 3, "target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]},
    ),
    "other-names": (*MIXED["nemotron_h"], {"r": 3, "target_modules": ["in_proj", "q_proj", "o_proj", "down_proj"]}),
}


def scores(output: RequestOutput) -> torch.Tensor:
    """Of the prompt's tokens but the first, and of the answer's."""
    assert output.prompt_logprobs is not None
    assert output.outputs[0].logprobs is not None
    ids = [*output.prompt_token_ids[1:], *output.outputs[0].token_ids]
    lines = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return torch.tensor([line[token].logprob for line, token in zip(lines, ids, strict=True) if line])


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_computes_what_peft_computes(case: str, tmp_path: Path) -> None:
    family, sizes, config = CASES[case]
    model = checkpoints.make(family, **sizes)
    base = checkpoints.save(model, tmp_path / "base")
    adapter = adapters.make(model, tmp_path / "adapter", **config)
    with LLM(str(base), **OPTIONS) as llm:
        plain, adapted = llm.generate(
            [PROMPT] * 2, ASK, lora_request=[None, LoRARequest("a", 1, str(adapter))], use_tqdm=False
        )
    for output, folder in ((plain, None), (adapted, adapter)):
        wanted = adapters.logprobs(model, folder, [*PROMPT, *output.outputs[0].token_ids])
        torch.testing.assert_close(scores(output), wanted, atol=1e-4, rtol=0)
    assert (scores(plain)[: len(PROMPT) - 1] - scores(adapted)[: len(PROMPT) - 1]).abs().max() > 0.01


def test_adapters_of_one_batch_leave_each_other_alone(tmp_path: Path) -> None:
    """Four with different ranks and targets, and none, in few slots and with chunked prompts."""
    model = checkpoints.make("Llama")
    base = checkpoints.save(model, tmp_path / "base")
    configs: list[dict[str, Any]] = [
        {"r": 1, "target_modules": ["q_proj"]}, {"r": 8, "use_dora": True}, {"r": 16, "use_rslora": True},
        {"r": 3, "target_modules": ["embed_tokens", "lm_head", "down_proj"]},
    ]  # fmt: skip
    requests: list[LoRARequest | None] = [
        LoRARequest(f"a{i}", i, str(adapters.make(model, tmp_path / f"a{i}", seed=i, **config)))
        for i, config in enumerate(configs, 1)
    ]
    requests = [None, *requests, *reversed(requests)]
    prompts = [[*PROMPT[i:], *PROMPT[:i]] for i in range(len(requests))]
    with LLM(str(base), **OPTIONS, max_loras=4) as llm:
        alone = [
            llm.generate(p, ASK, lora_request=r, use_tqdm=False)[0] for p, r in zip(prompts, requests, strict=True)
        ]
    for options in ({"max_loras": 4, "max_prefill_chunk": 5}, {"max_loras": 2, "debug": True}):
        with LLM(str(base), **OPTIONS, **options) as llm:
            together = llm.generate(prompts, ASK, lora_request=requests, use_tqdm=False)
        for one, other in zip(alone, together, strict=True):
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
            torch.testing.assert_close(scores(one), scores(other), atol=1e-4, rtol=0)


def test_thirty_two_adapters_of_one_batch_are_each_as_alone(tmp_path: Path) -> None:
    """Of six ranks and four sets of targets, all in one step, with a row without any among them."""
    model = checkpoints.make("Llama")
    base = checkpoints.save(model, tmp_path / "base")
    ranks, targets = (1, 2, 3, 4, 8, 16), ("all-linear", ["q_proj"], ["down_proj", "o_proj"], ["v_proj", "gate_proj"])
    requests: list[LoRARequest | None] = [
        LoRARequest(
            f"a{i}", i,
            str(adapters.make(model, tmp_path / f"a{i}", seed=i, r=ranks[i % 6], target_modules=targets[i % 4])),
        )
        for i in range(1, 33)
    ]  # fmt: skip
    requests.insert(7, None)
    prompts = [[*PROMPT[i % 5 :], *PROMPT[: i % 5]] for i in range(len(requests))]
    with LLM(str(base), **OPTIONS, max_loras=32, max_num_seqs=40, max_num_batched_tokens=1024) as llm:
        together = llm.generate(prompts, ASK, lora_request=requests, use_tqdm=False)
        llm.reset_prefix_cache()
        alone = [
            llm.generate(p, ASK, lora_request=r, use_tqdm=False)[0] for p, r in zip(prompts, requests, strict=True)
        ]
    for one, other in zip(alone, together, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        torch.testing.assert_close(scores(one), scores(other), atol=1e-4, rtol=0)
    assert len({tuple(scores(output).tolist()) for output in alone}) == len(alone)
