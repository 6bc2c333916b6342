"""Every family as it is served: what the engine says of each token is what transformers says, whatever config.json
holds; and what a checkpoint lacks is said."""

from __future__ import annotations

import importlib
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.config.families import families
from quire.foundation.errors import ConfigError, WeightsError
from tests.effort import WHOLE, sampled
from tests.models import checkpoints, sparse_checkpoints
from tests.models import table as table_of_models
from tests.models.cases import CASES, FAMILIES, HYBRIDS, TWINS, USUAL
from tests.models.fallback_cases import FALLBACK
from tests.models.paged import PagedRows
from tests.models.test_parity import random_tokens

VOCAB = checkpoints.TINY["vocab_size"]
STEPS = 33  # the prompt's last token and 32 decode steps


def prompts() -> list[list[int]]:
    """Of 1 to 54 tokens, two of them with the first 24 in common."""
    common, *rest = random_tokens(7, [24, 30, 1, 5, 40])
    return [common + rest[0], rest[1], common + rest[2], rest[3]]


def table(logprobs: list[Any]) -> torch.Tensor:
    return torch.tensor([[row[token].logprob for token in range(VOCAB)] for row in logprobs])


def largest_error(reference: Any, answers: list[Any]) -> float:
    """Of the log-probabilities of all tokens, behind every prompt token that was asked for and each that was made."""
    worst = 0.0
    for answer in answers:
        prompt, made = answer.prompt_token_ids, answer.outputs[0]
        with torch.inference_mode():
            theirs = reference(torch.tensor([prompt + made.token_ids])).logits[0].float().log_softmax(-1)
        ours, begin = table(made.logprobs), len(prompt) - 1
        if answer.prompt_logprobs is not None and len(prompt) > 1:
            ours, begin = torch.cat([table(answer.prompt_logprobs[1:]), ours]), 0
        assert len(made.token_ids) == STEPS
        worst = max(worst, (ours - theirs[begin : begin + len(ours)]).abs().max().item())
    return worst


def check_engine(case: str, folder: Path, limit: float, **options: Any) -> None:
    """Rows of unlike length together, and once more out of the prefix cache."""
    made, config = CASES[case]
    reference = checkpoints.make(made, **config)
    checkpoints.save(reference, folder)
    usual = {"temperature": 0.0, "max_tokens": STEPS, "ignore_eos": True, "detokenize": False, "logprobs": VOCAB}
    wanted = [{"prompt_token_ids": prompt} for prompt in prompts()]
    with LLM(
        str(folder), num_threads=1, dtype="float32", max_model_len=128, skip_tokenizer_init=True, max_logprobs=VOCAB,
        enable_prefix_caching=True, **options,
    ) as llm:  # fmt: skip
        first = llm.generate(wanted, SamplingParams(**usual, prompt_logprobs=VOCAB), use_tqdm=False)
        again = llm.generate(wanted, SamplingParams(**usual), use_tqdm=False)
        assert llm.call("check") is None
    assert largest_error(reference, first) <= limit
    assert largest_error(reference, again) <= limit
    is_long = config.get("sliding_window") or case == "kimi_linear-groups"  # blocks may be longer than the prompt
    assert again[0].num_cached_tokens > 0 or is_long


@pytest.mark.parametrize("case", sampled(list(CASES), lambda case: case in FAMILIES))
def test_the_engine_says_what_transformers_says(case: str, tmp_path: Path) -> None:
    """Whole prompts and chunks of 16."""
    check_engine(case, tmp_path / "chunks", 1e-4, device="cpu", max_prefill_chunk=16)
    if WHOLE:
        check_engine(case, tmp_path / "whole", 1e-4, device="cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("case", sampled(list(CASES), lambda case: case in USUAL))
def test_the_engine_says_so_on_a_gpu(case: str, tmp_path: Path) -> None:
    """Decode steps and small chunks are graphs there: what a layer does step by step is captured too."""
    check_engine(case, tmp_path, 1e-3, device="cuda", max_num_seqs=8, max_prefill_chunk=16)


# -- keys of config.json ----------------------------------------------------------------------------------------

SPARSE = sparse_checkpoints.FAMILIES
# Of every family that has a case: its first one.
FIRST = {**{family: family for family in FAMILIES}, **{family: cases[0] for family, cases in SPARSE.items()}}
for one in HYBRIDS:
    FIRST.setdefault(one.partition("-")[0], one)
ALL_TWINS = {*TWINS, *sparse_checkpoints.TWINS}


def made_of(family: str) -> tuple[str, dict[str, Any]]:
    """transformers' class, and the config of the family's first case."""
    return sparse_checkpoints.CASES[FIRST[family]] if family in SPARSE else CASES[FIRST[family]]


def make(family: str, **more: Any) -> Any:
    if family in SPARSE:
        return sparse_checkpoints.make(FIRST[family], **more)
    made, config = CASES[FIRST[family]]
    return checkpoints.make(made, **{**config, **more})


def test_every_decoder_has_a_case() -> None:
    encoders = {name for name, family in families().items() if ".encoders." in family.module}
    assert set(FIRST) == set(families()) - encoders


COUNTED = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
           "max_position_embeddings"}  # fmt: skip
OTHERS: dict[str, list[Any]] = {  # values that a test of every key would not think of
    "head_dim": [20],
    "num_key_value_heads": [1, 4],
    "num_kv_heads": [1, 4],
    "sliding_window": [5, None],
    "sliding_window_pattern": [2],
    "query_pre_attn_scalar": [5],
    "num_experts": [5, 4],
    "n_routed_experts": [4],
    "num_experts_per_tok": [1],
    "moe_intermediate_size": [16],
    "shared_expert_intermediate_size": [16],
    "n_shared_experts": [2],
    "n_group": [2],
    "topk_group": [1],
    "first_k_dense_replace": [0, 2],
    "mlp_only_layers": [[1]],
    "decoder_sparse_step": [2],
    "moe_k": [1],
    "moe_num_experts": [4],
    "moe_topk": [1],
    "kv_lora_rank": [12],
    "q_lora_rank": [None, 16],
    "qk_nope_head_dim": [8],
    "qk_rope_head_dim": [4],
    "v_head_dim": [6],
    "linear_conv_kernel_dim": [2],
    "linear_num_key_heads": [1],
    "linear_key_head_dim": [8],
    "linear_head_dim": [8],
    "linear_num_heads": [2],
    "conv_L_cache": [4],
    "block_size": [8],
    "attention_chunk_size": [9],
    "altup_num_inputs": [2],
    "altup_active_idx": [1],
    "num_kv_shared_layers": [0, 3],
    "laurel_rank": [5],
    "hidden_size_per_layer_input": [8],
    "num_mem_blocks": [2],
    "adapter_rank": [4],
    "n_mamba_heads": [12],
    "mamba_ngroups": [1],
    "dual_chunk_attention_config": [{"chunk_size": 512, "local_size": 16}],
    "num_ln_in_parallel_attn": [1, 2],
    "no_rope_layer_interval": [2],
    "rotary_dim": [4, 12],
    "clip_qkv": [0.2, None],
    "attn_logit_softcapping": [0.5, None],
    "final_logit_softcapping": [2.0, None],
    "attention_multiplier": [0.3],
    "word_embed_proj_dim": [48, 24],
    "state_size": [4],
    "ssm_state_size": [4],
    "n_groups": [1, 6],
    "conv_kernel": [2],
    "time_step_limit": [(0.5, 0.8), None],
    "mamba_n_groups": [1, 6],
    "mamba_n_heads": [12],
    "mamba_d_head": [16, 8],
    "mamba_d_state": [4],
    "mamba_d_conv": [2],
    "mamba_expand": [1],
    "attn_layer_indices": [[0], [0, 1, 2]],
    "position_embedding_type": ["rope", "nope"],
    "shared_intermediate_size": [24],
    "num_local_experts": [3],
    "ssm_multipliers": [[0.5, 1.0, 2.0, 1.0, 0.3]],
    "mlp_multipliers": [[0.5, 2.0]],
    "mamba_d_ssm": [48, None],
    "layers_block_type": [["mlp", "attention", "mamba", "mamba"]],
    "partial_rotary_factor": [0.5],
    "rope_theta": [77.0],
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 50.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ],
}


def flipped(family: str, key: str, value: Any) -> list[Any]:
    """Other values that a key may have."""
    layers = made_of(family)[1].get("num_hidden_layers", checkpoints.TINY["num_hidden_layers"])
    if key == "mlp_layer_types":
        return [[("sparse", "dense")[layer % 2] for layer in range(layers)]]
    if key == "layer_types":
        return [[("full_attention", "sliding_attention")[layer % 2] for layer in range(layers)]]
    if key == "no_rope_layers":
        return [[layer % 2 for layer in range(layers)]]
    if key == "rope_parameters" and "full_attention" in families()[family].rotary:
        return [
            {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 90.0}}
            for full in OTHERS[key][:3]
        ]
    if key in OTHERS:
        return OTHERS[key]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float):
        return [value * 1.5 + 0.01]
    return ["relu", "gelu"] if isinstance(value, str) else []


def theirs_of(family: str, key: str) -> str:
    fields = checkpoints.config_class(made_of(family)[0]).__dataclass_fields__
    aliases = families()[family].aliases
    return next((alias for alias, name in aliases.items() if name == key and alias in fields), key)


def outcome(family: str, key: str, value: Any, tokens: list[int], folder: Path) -> tuple[str, torch.Tensor | None]:
    """What becomes of a config with this key: "theirs" cannot be made, is "refused" here, or is "followed"."""
    try:
        how = {"_attn_implementation": "sdpa"} if key == "alibi" else {}  # see `CASES`
        reference = make(family, **{theirs_of(family, key): value, **how})
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    except Exception:
        return "theirs", None
    checkpoints.save(reference, folder)
    try:
        model = checkpoints.load(folder)
    except ConfigError as error:
        return ("refused" if len(str(error)) < 400 else str(error)), expected
    ours = PagedRows(model).step([1], [tokens])[0].log_softmax(-1)
    assert (ours - expected).abs().max() <= 1e-4, (key, value)
    return "followed", expected


@pytest.mark.parametrize(
    "family", sampled([family for family in FIRST if family not in ALL_TWINS], lambda family: family in USUAL)
)
def test_each_key_is_followed_or_refused(family: str, tmp_path: Path) -> None:
    declared = families()[family]
    tokens = random_tokens(11, [40])[0]
    usual = outcome(family, "vocab_size", VOCAB, tokens, tmp_path / "usual")[1]
    assert usual is not None
    seen, moved = [], []
    for key in [*declared.defaults, *declared.fixed]:
        if (family, key) == ("minimax_m2", "rotary_dim"):
            continue  # MiniMax's own code turns so many columns; transformers' looks for a share of the head alone
        for number, value in enumerate(flipped(family, key, declared.defaults.get(key)) if key not in COUNTED else ()):
            told, expected = outcome(family, key, value, tokens, tmp_path / f"{key}{number}")
            seen.append(told)
            if told == "followed" and expected is not None and (expected - usual).abs().max() > 1e-3:
                moved.append(key)
    assert set(seen) <= {"theirs", "refused", "followed"}
    least = 4 if family not in ("bloom", "mpt") else 1  # who have few
    assert seen.count("followed") > least
    assert len(set(moved)) > least // 2


# -- checkpoints that do not fit --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FIRST)
def test_what_a_checkpoint_lacks_is_said_once(family: str, tmp_path: Path) -> None:
    """By the names that the file has, of tensors that are not called otherwise on the way in."""
    folder = checkpoints.save(make(family), tmp_path)
    known = checkpoints.load(folder).known_name
    state = load_file(folder / "model.safetensors")
    names = sorted(name for name, tensor in state.items() if ".0." in name and tensor.dim() and known(name) == name)
    gone, bent = random.Random(family).sample(names, 2)
    del state[gone]
    shape = list(state[bent].shape)
    state[bent] = torch.zeros([*shape[:-1], shape[-1] + 3])
    state["model.odd.weight"] = torch.zeros(3)
    save_file(state, folder / "model.safetensors")
    with pytest.raises(WeightsError) as caught:
        checkpoints.load(folder)
    text = str(caught.value)
    assert f"{gone} [" in text
    assert f"{bent} is {[*shape[:-1], shape[-1] + 3]}, the model needs {shape}" in text
    assert "model.odd.weight [3]" in text
    assert len(text.splitlines()) == 7


# -- the page of models -----------------------------------------------------------------------------------------


def test_the_page_of_models_is_up_to_date() -> None:
    page = table_of_models.PAGE.read_text(encoding="utf-8")
    told = table_of_models.differences_of(page)
    assert page == table_of_models.render(told), "run `make docs`"
    classes = [checkpoints.class_name(made) for made, _ in FALLBACK.values()]
    assert all(float(told[name]) <= 1e-4 for name in (*FAMILIES, *classes))


@pytest.mark.parametrize("family", families().values(), ids=lambda family: family.name)
def test_a_family_is_a_declaration(family: Any) -> None:
    """Short, and without a word of kernels, ranks, formats or graphs."""
    source = Path(importlib.import_module(family.module).__file__ or "").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 250
    imported = re.findall(r"^(?:from|import) (quire[\w.]*)", source, re.MULTILINE)
    assert {name.split(".")[1] for name in imported} <= {"config", "foundation", "layers", "models"}
