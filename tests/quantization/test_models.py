"""Quantized models: loaded, drawn, and run from end to end, beside the same model in floating point."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.config.model_info import read_model_info
from quire.config.quantization import METHODS, OF_CHECKPOINTS
from quire.foundation.errors import ConfigError, WeightsError
from quire.kernels.gemm import fp8_linear
from quire.layers.linear import Linear
from quire.layers.targets import Staging
from quire.layers.unit_rows import UnitRows
from quire.models import catalog, weights
from quire.models.base import DecoderStack
from quire.models.dense import baichuan
from quire.quantization.base import FLOATS, INPUTS, OUTPUTS, MatrixInfo, QuantizationMethod, Scheme, Source
from quire.quantization.fp8 import Fp8Channel
from quire.quantization.grouped import Int8
from quire.quantization.methods.fp8 import Fp8
from quire.quantization.select import make_method
from tests.effort import sampled
from tests.models import checkpoints
from tests.models.cases import CASES, FAMILIES
from tests.models.paged import PagedRows
from tests.pooling import checkpoints as pooling
from tests.quantization.test_formats import Halves
from tests.quantization.test_integers import ct_config

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.save(checkpoints.make("Qwen2"), tmp_path)


def build(folder: Path, method: Any = None, load_format: str = "auto", **options: Any) -> DecoderStack:
    model = catalog.build(read_model_info(folder, {}), options.pop("dtype", torch.float32), checkpoints.CPU, 64, method)
    weights.load(model, folder, load_format, **options)
    return model


def linears(model: DecoderStack) -> dict[str, Linear]:
    return {path: module for path, module in model.named_modules() if isinstance(module, Linear)}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor.float(), other[name].float()) and tensor.dtype == other[name].dtype
        for name, tensor in one.items()
    )


def check_against_plain(fp8: DecoderStack, plain: DecoderStack) -> None:
    """Everything as the plain model has it, but matrices as they are packed, the head as integers of 8 bits."""
    packed = dict(plain.named_parameters())
    for path in linears(plain):
        form = Int8() if path == "lm_head" else Fp8Channel()
        made = form.pack(packed.pop(f"{path}.weight"))
        packed |= {f"{path}.{name}": tensor for name, tensor in made.items()}
    assert equal(dict(fp8.named_parameters()), packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk", [1000, 1 << 24])
def test_a_checkpoint_is_quantized_while_it_loads(
    folder: Path, chunk: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.models.transfer.CHUNK_BYTES", chunk)
    check_against_plain(build(folder, Fp8(), dtype=dtype), build(folder, dtype=dtype))


def test_sharded_files_make_the_same_model(folder: Path, tmp_path: Path) -> None:
    """Parts of one matrix in different files."""
    sharded = checkpoints.save(checkpoints.make("Qwen2"), tmp_path / "sharded", max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 4
    one, other = build(folder, Fp8()), build(sharded, Fp8())
    assert equal(dict(one.named_parameters()), dict(other.named_parameters()))


def test_few_matrices_are_staged_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most one a thread, so that the model never is in memory twice."""
    folder = checkpoints.save(checkpoints.make("Llama", num_hidden_layers=12), tmp_path)
    open_now: set[int] = set()
    most, lock = [0], threading.Lock()
    tensors, finish = Staging.tensors, Staging.finish

    def opened(self: Staging) -> dict[str, torch.Tensor]:
        with lock:
            open_now.add(id(self))
            most[0] = max(most[0], len(open_now))
        return tensors(self)

    def closed(self: Staging) -> None:
        finish(self)
        with lock:
            open_now.discard(id(self))

    monkeypatch.setattr(Staging, "tensors", opened)
    monkeypatch.setattr(Staging, "finish", closed)
    monkeypatch.setattr("quire.models.transfer.MAX_THREADS", 3)
    build(folder, Fp8())
    assert not open_now
    assert 1 <= most[0] <= 3 < 12 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dummy_weights_are_those_of_the_plain_model(folder: Path, dtype: torch.dtype) -> None:
    fp8 = build(folder, Fp8(), "dummy", dtype=dtype, seed=3)
    check_against_plain(fp8, build(folder, load_format="dummy", dtype=dtype, seed=3))


def test_broken_weights_are_named_though_they_are_gone(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][7, 5] = torch.nan
    save_file(state, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN or infinity"):
        build(folder, Fp8())


def test_what_is_missing_is_said_as_ever(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    del state["model.layers.0.self_attn.k_proj.weight"]
    state["model.layers.0.self_attn.q_proj.weight"] = torch.ones(48, 47)
    save_file(state, folder / "model.safetensors")
    with pytest.raises(WeightsError) as caught:
        build(folder, Fp8())
    assert "model.layers.0.self_attn.k_proj.weight [24, 48]" in str(caught.value)
    assert "q_proj.weight is [48, 47], the model needs [48, 48]" in str(caught.value)


WIDENED = [
    *(
        (family, {"tie_word_embeddings": tied})
        for family in ("Llama", "Qwen2", "Qwen3", "Mistral")
        for tied in (False, True)
    ),
    *(CASES[name] for name in FAMILIES if "num_experts_per_tok" not in CASES[name][1]),  # experts are no `Linear`
]
USUAL = ("Llama", "Qwen3", "Gemma2", "Phi3", "GPT2", "Falcon")


@pytest.mark.parametrize(("family", "config"), sampled(WIDENED, lambda case: case[0] in USUAL))
def test_logits_are_those_of_the_widened_model(family: str, config: dict[str, Any], tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make(family, **config), tmp_path)
    fp8, plain = build(folder, Fp8()), build(folder)
    for path, linear in linears(plain).items():
        linear.set_dense(linears(fp8)[path].matrix.dense(torch.float32))
    ids = [list(range(30)), list(range(40, 60))]
    for ours, theirs in zip(PagedRows(fp8).step([1, 2], ids), PagedRows(plain).step([1, 2], ids), strict=True):
        assert (ours - theirs).abs().max() <= 1e-4


def logprobs(model: DecoderStack) -> torch.Tensor:
    return torch.cat([*PagedRows(model).step([1, 2], [list(range(30)), list(range(40, 60))])]).log_softmax(-1)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in OF_CHECKPOINTS])
def test_the_head_has_integers_of_8_bits(name: str, tmp_path: Path) -> None:
    """In every format, and hardly tells: beside a head in floating point over the same matrices."""
    folder = checkpoints.save(checkpoints.make("Llama", tie_word_embeddings=False), tmp_path)
    model, plain = build(folder, make_method(name, {})), build(folder)
    assert model.lm_head is not None
    assert plain.lm_head is not None
    assert equal(dict(model.lm_head.named_parameters()), Int8().pack(plain.lm_head.get_parameter("weight")))
    for path, linear in linears(plain).items():
        if path != "lm_head":
            linear.set_dense(linears(model)[path].matrix.dense(torch.float32))
    ours, theirs = logprobs(model), logprobs(plain)
    assert not torch.equal(ours, theirs)
    assert (ours - theirs).std() <= 0.015 * theirs.std()


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_a_head_that_is_the_embedding_stays(name: str, tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make("Llama", tie_word_embeddings=True), tmp_path)
    model, plain = build(folder, make_method(name, {})), build(folder)
    assert model.lm_head is None
    assert torch.equal(model.embed_tokens.weight, plain.embed_tokens.weight)


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_a_head_whose_rows_are_divided(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their length, before they are packed."""
    family, config = CASES["baichuan"]
    model = checkpoints.make(family, **config)
    monkeypatch.setattr(baichuan, "SECOND_VOCAB", model.config.vocab_size)
    folder = checkpoints.save(model, tmp_path)
    found, plain = build(folder, make_method(name, {})), build(folder)
    assert found.lm_head is not None
    assert plain.lm_head is not None
    rows = plain.lm_head.get_parameter("weight")
    assert torch.allclose(rows.norm(dim=1), torch.ones(len(rows)))
    assert equal(dict(found.lm_head.named_parameters()), Int8().pack(rows))


def test_rows_that_are_stored_quantized_are_not_divided() -> None:
    head = UnitRows(64, 96, bias=False, role="vocabulary")
    with pytest.raises(ConfigError, match="head is quantized, which is not supported where its rows are normed"):
        head.allocate(make_method("compressed-tensors", ct_config(4, 32)), ("head",))


def test_an_encoder_is_quantized_too(tmp_path: Path) -> None:
    pooling.make("BertModel", tmp_path)
    texts = [{"prompt_token_ids": list(range(5, 25))}, {"prompt_token_ids": list(range(30, 90))}]
    vectors = []
    for quantization in (None, "fp8"):
        llm = LLM(str(tmp_path), device="cpu", dtype="float32", skip_tokenizer_init=True, quantization=quantization)
        vectors.append([torch.tensor(output.outputs.embedding) for output in llm.embed(texts, use_tqdm=False)])
        llm.shutdown()
    for plain, fp8 in zip(*vectors, strict=True):
        assert torch.cosine_similarity(plain, fp8, dim=0) > 0.99
        assert not torch.equal(plain, fp8)


# -- the option -------------------------------------------------------------------------------------------------


def test_the_demo_model_answers_in_8_bits() -> None:
    sizes, texts = [], []
    for quantization in (None, "fp8"):
        llm = LLM(device="cpu", quantization=quantization)
        (output,) = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
        texts.append(output.outputs[0].text)
        sizes.append(llm.info.report.weight_bytes)
        llm.shutdown()
    assert "Paris" in texts[0]
    assert "Paris" in texts[1]
    assert sizes[1] < 0.65 * sizes[0], "embeddings and norms stay"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    "options", [{}, {"enforce_eager": True}, {"kv_cache_dtype": "fp8"}, {"dtype": "float16"}], ids=str
)
def test_the_demo_model_answers_in_8_bits_on_a_gpu(options: dict[str, Any]) -> None:
    llm = LLM(device="cuda", quantization="fp8", gpu_memory_utilization=0.2, **options)
    try:
        many = llm.chat([QUESTION] * 40, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
        (one,) = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
        assert all("Paris" in output.outputs[0].text for output in [*many, one])
    finally:
        llm.shutdown()


def test_a_method_that_nobody_knows_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"unknown quantization method 'fp9'; did you mean 'fp8'\? \(known: fp8"):
        LLM(device="cpu", quantization="fp9")


def test_a_device_that_cannot_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_linear, "has_matrix_units", lambda _: False)
    why = Fp8().refuses(torch.device("cuda"), torch.bfloat16)
    assert why is not None
    assert "compute capability 8.9" in why
    assert Fp8().refuses(torch.device("cpu"), torch.bfloat16) is None


class Rough(QuantizationMethod):
    """One of somebody's own, in a format of their own."""

    def scheme(self, info: MatrixInfo) -> Scheme:
        own = Halves()
        source = Source("weight", (OUTPUTS, INPUTS), FLOATS, info.dtype)
        return Scheme(own, (source,), lambda read: own.pack(read["weight"] * 0 + 1))

    def refuses(self, device: torch.device, dtype: torch.dtype) -> str | None:  # noqa: ARG002 (as it is called)
        return "needs bfloat16" if dtype != torch.bfloat16 else None


def test_a_method_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METHODS, "_targets", dict(METHODS._targets))
    METHODS.register("rough", Rough)
    llm = LLM(device="cpu", quantization="rough", dtype="bfloat16")
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(temperature=0, max_tokens=3))
    assert len(output.outputs[0].token_ids) == 3
    llm.shutdown()
    with pytest.raises(ConfigError, match="quantization=rough: needs bfloat16"):
        LLM(device="cpu", quantization="rough", dtype="float32")
