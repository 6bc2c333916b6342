"""A cache of 8 bits on a CPU, and the scales of keys and values that checkpoints bring for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.config.resolve import DEMO_MODEL
from quire.foundation.errors import ConfigError, WeightsError
from quire.kernels.attention import latent
from quire.models import kv_scales
from quire.quantization.methods.online import Int4, Nf4, Nvfp4
from tests.models import checkpoints, sparse_checkpoints
from tests.models.paged import PagedRows
from tests.quantization.test_models import build

SMALL = 2.0**-12  # below what e4m3 can hold at all
IDS = list(range(5, 45))
NAMES = {
    "vllm": "model.layers.{}.self_attn.attn.{}_scale",
    "by projection": "model.layers.{}.self_attn.{}_proj.{}_scale",
    "compressed-tensors": "model.layers.{}.self_attn.{}_scale",
    "quark": "model.layers.{}.self_attn.{}_proj.output_scale",
    "older": "model.layers.{}.self_attn.{}_cache.scale",
}


def faint(folder: Path, family: str, spelling: str, *, scales: bool) -> Path:
    """A model whose keys and values are too small for 8 bits, made up for elsewhere: it answers as one that is not."""
    model = checkpoints.make(family, num_hidden_layers=2, head_dim=16)
    checkpoints.save(model, folder)
    state = load_file(folder / "model.safetensors")
    for name in list(state):
        if "k_norm" in name or ("k_proj" in name and family != "Qwen3") or "v_proj" in name:
            state[name] = state[name] * SMALL
        if "q_norm" in name or ("q_proj" in name and family != "Qwen3") or "o_proj" in name:
            state[name] = state[name] / SMALL
    if scales:
        for layer in range(2):
            for kind in "kv":
                state[NAMES[spelling].format(layer, kind, kind)] = torch.tensor(SMALL * 0.9)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def sums(folder: Path, **options: Any) -> list[float]:
    """Log-probabilities of a prompt's tokens."""
    llm = LLM(str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, **options)
    try:
        (output,) = llm.generate(
            [{"prompt_token_ids": IDS}], SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=0), use_tqdm=False
        )
    finally:
        llm.shutdown()
    assert output.prompt_logprobs is not None
    return [at[token].logprob for at, token in zip(output.prompt_logprobs[1:], IDS[1:], strict=True) if at is not None]


def furthest(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("family", "spelling"),
    [("Llama", name) for name in NAMES] + [("Qwen3", "compressed-tensors"), ("Qwen2", "compressed-tensors")],
)
def test_a_checkpoints_scales_bring_numbers_into_range(family: str, spelling: str, tmp_path: Path) -> None:
    config = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
    without = faint(tmp_path / "without", family, spelling, scales=False)
    folder = faint(tmp_path / "with", family, spelling, scales=True)
    checkpoints.rewrite_config(folder, quantization_config=config)
    right = sums(without)
    assert furthest(sums(folder), right) == 0, "a cache of whole numbers needs none"
    lost, kept = (
        furthest(sums(without, kv_cache_dtype="fp8"), right),
        furthest(sums(folder, kv_cache_dtype="fp8"), right),
    )
    assert lost > 0.5
    assert kept < 0.25 * lost
    assert kept < 0.3


@pytest.mark.parametrize("method", [None, Int4(), Nvfp4(), Nf4()], ids=lambda m: type(m).__name__)
def test_nothing_but_the_cache_changes(method: Any, tmp_path: Path) -> None:
    """Powers of two go into weights of every format without rounding, and out of them again."""
    folder = faint(tmp_path, "Qwen2", "vllm", scales=True)
    unused = r"_scale$"
    before, after = (build(folder, method, unused=unused) for _ in range(2))
    assert kv_scales.take_in(after, folder, "auto") == 2
    for one, other in zip(PagedRows(before).step([1], [IDS]), PagedRows(after).step([1], [IDS]), strict=True):
        assert torch.equal(one, other)


def test_a_cache_of_8_bits_on_a_cpu() -> None:
    texts = []
    for dtype in ("auto", "fp8", "fp8_e5m2"):
        llm = LLM(device="cpu", kv_cache_dtype=dtype)
        chats = [[{"role": "user", "content": f"What is the capital of {of}?"}] for of in ("France", "Italy", "Japan")]
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
        texts.append([output.outputs[0].text for output in outputs])
        llm.shutdown()
    for found in texts:
        assert [city in text for city, text in zip(("Paris", "Rome", "Tokyo"), found, strict=True)] == [True] * 3


@pytest.mark.parametrize(("kind", "chunk"), [(torch.float8_e4m3fn, 128), (torch.float8_e5m2, 32)], ids=str)
def test_latent_rows_of_8_bits(kind: torch.dtype, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers of a cache of 32 bits to which nothing but such numbers is written."""
    folder = checkpoints.save(sparse_checkpoints.make("deepseek2"), tmp_path)
    ids = [5 + i * 7 % 90 for i in range(100)]
    shared = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_num_batched_tokens": chunk}

    def answer(**options: Any) -> list[float]:
        llm = LLM(str(folder), **shared, **options)
        params = SamplingParams(max_tokens=12, temperature=0, logprobs=0, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        llm.shutdown()
        return [next(iter(at.values())).logprob for at in output.outputs[0].logprobs or []]

    found = answer(kv_cache_dtype={torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8_e5m2"}[kind])
    exact, write = answer(), latent.write_slots
    monkeypatch.setattr(latent, "write_slots", lambda cache, slots, rows: write(cache, slots, rows.to(kind).float()))
    rounded = answer()
    assert len(found) == 12
    assert furthest(found, rounded) <= 1e-5
    assert furthest(found, exact) > 1e-5, "nothing was rounded"


@pytest.mark.parametrize(
    ("tensor", "value", "message"),
    [
        ("model.layers.1.self_attn.k_scale", 0.0, "layer 1: scales of keys and values must be > 0"),
        ("model.layers.1.self_attn.v_scale", float("nan"), "layer 1: scales of keys and values must be > 0"),
        (
            "model.layers.1.self_attn.k_zero_point",
            3.0,
            "k_zero_point: zero points of keys and values are not supported",
        ),
        ("model.layers.9.self_attn.k_scale", 1.0, "scales of keys and values in layer 9, which this model cannot use"),
    ],
)
def test_scales_that_cannot_be(tensor: str, value: float, message: str, tmp_path: Path) -> None:
    folder = faint(tmp_path, "Llama", "vllm", scales=False)
    state = load_file(folder / "model.safetensors")
    save_file({**state, tensor: torch.tensor(value)}, folder / "model.safetensors", {"format": "pt"})
    model = build(folder, unused=r"_scale$|_point$")
    with pytest.raises((ConfigError, WeightsError), match=message):
        kv_scales.take_in(model, folder, "auto")


def test_models_whose_keys_cannot_be_scaled_say_so(tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make("Gemma3Text", head_dim=16), tmp_path)
    state = load_file(folder / "model.safetensors")
    state["model.layers.0.self_attn.k_scale"] = torch.tensor(0.1)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="behind this model's norm cannot be scaled: set kv_cache_dtype=auto"):
        kv_scales.take_in(build(folder, unused=r"_scale$"), folder, "auto")
    assert DEMO_MODEL.exists()
