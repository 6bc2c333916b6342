"""Every kernel is compiled before an engine says that it is ready, and before anything but the rehearsal needs it: no
request waits for a compiler, and a start only for many kernels at once."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams

DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 2000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
EXPERTS = {
    **DENSE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 16,
    "num_experts_per_tok": 4, "moe_intermediate_size": 512, "decoder_sparse_step": 1, "norm_topk_prob": True,
    "mlp_only_layers": [],
}  # fmt: skip
WINDOWS = {
    **DENSE, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 1024,
}  # fmt: skip
BIASED_EXPERTS = {
    **DENSE, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 16,
    "num_experts_per_tok": 4, "intermediate_size": 576, "attention_bias": True, "sliding_window": 128, "head_dim": 64,
}  # fmt: skip
LATENT = {
    **DENSE, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_hidden_layers": 3,
    "num_key_value_heads": 16, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "q_lora_rank": None, "n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4,
    "moe_intermediate_size": 512, "first_k_dense_replace": 1, "norm_topk_prob": False, "topk_method": "greedy",
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (DENSE, {}),
    "8-bit keys and values": (DENSE, {"kv_cache_dtype": "fp8"}),
    "fp8": (DENSE, {"quantization": "fp8"}),
    "int4": (DENSE, {"quantization": "int4"}),
    "experts": (EXPERTS, {}),
    "experts, fp8": (EXPERTS, {"quantization": "fp8"}),
    "experts, int4": (EXPERTS, {"quantization": "int4"}),
    "experts, fp8_block": (EXPERTS, {"quantization": "fp8_block"}),
    "experts, mxfp4 with biases": (BIASED_EXPERTS, {"quantization": "mxfp4"}),
    "windows": (WINDOWS, {}),
    "latent, experts from the second layer on": (LATENT, {}),
    "drafts": (DENSE, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "policy": "always"}}),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("case", list(CASES))
def test_requests_compile_nothing(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    from quire.kernels.triton.rehearsal import Rehearsal

    config, options = CASES[case]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    always: Any = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 2**30,  # whatever tests beside this one hold
        "device": "cuda",
    }
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **known: compiled.append(known["fn"].name)
    )
    wait = Rehearsal.wait

    def wait_and_forget(rehearsal: Rehearsal) -> int:
        count = wait(rehearsal)
        assert rehearsal._compilers is None or not rehearsal._compilers.failed
        compiled.clear()
        return count

    monkeypatch.setattr(Rehearsal, "wait", wait_and_forget)
    with LLM(str(folder), **always, **options) as llm:
        assert not compiled, compiled
        for lengths, params in requests():
            rng = random.Random(len(lengths))
            prompts = [{"prompt_token_ids": rng.choices(range(2000), k=length)} for length in lengths]
            llm.generate(prompts, params, use_tqdm=False)
            assert not compiled, (lengths[:5], params, compiled)


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Lengths of prompts that come together, and how they are sampled."""
    few = {"max_tokens": 12, "ignore_eos": True, "detokenize": False}
    rng = random.Random(3)
    every = SamplingParams(
        temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, presence_penalty=0.1, frequency_penalty=0.1,
        repetition_penalty=1.1, logit_bias={5: 1.0}, seed=1, **few,  # type: ignore[arg-type]
    )  # fmt: skip
    greedy, drawn = (SamplingParams(temperature=t, **few) for t in (0.0, 0.7))  # type: ignore[arg-type]
    listed = SamplingParams(temperature=0.0, logprobs=5, **few)  # type: ignore[arg-type]
    return [
        ([12], greedy),
        ([300], drawn),
        ([9000], greedy),
        ([rng.randint(100, 1024) for _ in range(60)], drawn),
        ([rng.randint(1, 40) for _ in range(200)], greedy),
        ([1500] * 3, drawn),
        ([700, 5, 90], every),
        ([64], listed),
    ]
