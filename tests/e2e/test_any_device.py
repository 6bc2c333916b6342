"""The platform torch: what the others and transformers answer, in plain torch on whatever device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from demo import agreement, chat, corpus
from quire import LLM, SamplingParams
from quire.attention.torch_cpu import TorchCPUAttention
from quire.foundation.errors import ConfigError
from quire.kernels.elementwise import cpu as cpu_elementwise
from quire.kernels.gemm import cpu_linear
from quire.types.structured import StructuredOutputsParams
from quire.worker import batch
from tests.e2e import test_drafts as every_feature
from tests.e2e import test_prompt_embeds as given_embeds
from tests.e2e import test_windows as windows
from tests.e2e.conftest import VOCAB, Reference
from tests.e2e.test_greedy_equals_transformers import prompts, run
from tests.models import checkpoints
from tests.models.test_parity import CASES as FAMILIES
from tests.pooling import checkpoints as poolers
from tests.pooling.test_parity import LENGTHS, POOL, RAW, ids, random_prompts, states

FLOAT32 = {"dtype": "float32"}


@pytest.fixture(params=["torch:cpu", pytest.param("torch:cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if "cuda" in request.param and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return str(request.param)


@pytest.fixture(autouse=True)
def _nothing_made_for_one_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of Triton is launched, and nothing that is made for CPUs is called."""
    if "side_by_side" in request.node.name or "gives_the" in request.node.name:
        yield
        return

    def wrong(*_: Any, **__: Any) -> None:
        raise AssertionError("not plain torch")

    for room, name in (
        (cpu_elementwise, "rms_norm"), (cpu_elementwise, "silu_and_mul"), (cpu_elementwise, "qk_norm_rope_write"),
        (cpu_linear, "linear"), (TorchCPUAttention, "run"),
    ):  # fmt: skip
        monkeypatch.setattr(room, name, wrong)
    if torch.cuda.is_available():
        from triton.runtime.jit import JITFunction

        monkeypatch.setattr(JITFunction, "run", wrong)
    yield


GREEDY: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks of 16, no prefix cache": {"max_prefill_chunk": 16, "enable_prefix_caching": False},
    "a small budget, preemptions": {"max_num_batched_tokens": 48, "max_num_seqs": 16, "num_gpu_blocks_override": 60},
    "depth 2, in a process of its own": {"async_scheduling": True, "distributed_executor_backend": "mp"},
}


@pytest.mark.parametrize("case", GREEDY)
def test_greedy_text_is_that_of_transformers(tiny_qwen3: Path, reference: Reference, case: str, device: str) -> None:
    wanted = prompts(40)
    expected = [reference.greedy(prompt, 32) for prompt in wanted]
    assert run(tiny_qwen3, wanted, 32, device=device, **FLOAT32, **GREEDY[case]) == expected


@pytest.mark.parametrize("case", FAMILIES)
def test_every_family(case: str, device: str, tmp_path: Path) -> None:
    """Log-probabilities of the prompt and of what follows, twice: the second time most of it is in the prefix cache."""
    family, config = FAMILIES[case]
    if "vocab_size_per_layer_input" in config:
        config = {**config, "vocab_size_per_layer_input": VOCAB}  # transformers' class takes no other tokens
    model = windows.Model(tmp_path, family, {"max_position_embeddings": 64, "num_hidden_layers": 3, **config})
    given = [prompt[:40] for prompt in prompts(4, seed=9)]
    options = {"max_model_len": 60, "skip_tokenizer_init": True, "num_threads": 1, "block_size": 4}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=2)
    with LLM(str(model.folder), device=device, **FLOAT32, **options) as llm:
        windows.check(model, llm, given, params)
        windows.check(model, llm, given, params)
        scored = llm.generate(
            [{"prompt_token_ids": given[0]}], SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False),
            use_tqdm=False,
        )[0]  # fmt: skip
    expected = model.logprobs(given[0])
    assert scored.prompt_logprobs is not None
    for place, line in enumerate(scored.prompt_logprobs[1:]):
        assert line is not None
        for token, entry in line.items():
            assert abs(entry.logprob - expected[place, token].item()) <= 1e-4


@pytest.mark.parametrize("case", [
    "plain", "drafts", "chunks of 16, depth 2", pytest.param("a preemption at every step", marks=pytest.mark.long),
])  # fmt: skip
@pytest.mark.parametrize("name", ["qwen3: five to one", "mistral: all"])
def test_layers_with_windows(name: str, case: str, device: str, tmp_path: Path) -> None:
    model = windows.Model(tmp_path, *windows.MODELS[name])
    with windows.engine(model, device=device, **FLOAT32, **windows.CASES[case]) as llm:
        windows.check(model, llm, windows.prompts())
        cached = windows.check(model, llm, windows.prompts())
    assert min(cached[2:5]) >= 80


@pytest.fixture(scope="module")
def expected(tiny_qwen3: Path) -> list[Any]:
    return every_feature.run(tiny_qwen3)[0]


@pytest.mark.parametrize("drafts", [False, True], ids=["plain steps", "drafts"])
def test_every_feature_gives_the_cpus_answer(tiny_qwen3: Path, expected: list[Any], drafts: bool, device: str) -> None:
    """Seeds, filters, penalties, lists, log-probabilities, logits processors. A draw may fall on a rounding border."""
    options = every_feature.ALWAYS if drafts else {}
    answers, counted = every_feature.run(tiny_qwen3, device=device, **FLOAT32, **options)
    different = [
        params for (_, params), answer, wanted in zip(every_feature.requests(), answers, expected, strict=True)
        if not every_feature.same(answer, wanted)
    ]  # fmt: skip
    assert len(different) <= 1, different
    if drafts:
        assert counted["vllm:spec_decode_num_accepted_tokens"] > 100


def test_grammars_and_embeddings(tiny_qwen3: Path, device: str) -> None:
    given = given_embeds.Model(tiny_qwen3)
    wanted = prompts(3, seed=4)
    with LLM(str(tiny_qwen3), **{**given_embeds.ENGINE, "device": device}, **FLOAT32, enable_prompt_embeds=True) as llm:
        found = given_embeds.tokens(llm, [{"prompt_embeds": given.embeds(prompt)} for prompt in wanted])
        assert found == [given.greedy(given.embeds(prompt)) for prompt in wanted]
    choice = SamplingParams(
        temperature=0.8, seed=1, max_tokens=20, structured_outputs=StructuredOutputsParams(choice=["red", "blue"])
    )
    with LLM(device=device, num_threads=1, num_gpu_blocks_override=200) as llm:
        (output,) = llm.generate(["A colour:"], choice, use_tqdm=False)
    assert output.outputs[0].text in ("red", "blue")


@pytest.mark.parametrize("architecture", ["BertModel", "XLMRobertaModel"])
def test_encoders(architecture: str, device: str, tmp_path: Path) -> None:
    model = poolers.make(architecture, tmp_path)
    poolers.sentence_transformers(tmp_path, "Pooling", pooling_mode_mean_tokens=True)
    wanted = random_prompts(0, LENGTHS)
    with LLM(str(tmp_path), device=device, **FLOAT32, max_num_seqs=5, max_num_batched_tokens=80) as llm:
        found = [torch.tensor(output.outputs.data) for output in llm.encode(ids(wanted), RAW, use_tqdm=False)]
    for ours, prompt in zip(found, wanted, strict=True):
        assert (ours - POOL["mean_tokens"](states(model, prompt))).abs().max() < 1e-4


def test_8_bit_weights_are_widened(tiny_qwen3: Path, device: str) -> None:
    """However the work is cut: rows stay as they are, and only weights have 8 bits."""
    wanted = prompts(6, seed=2)
    found = run(tiny_qwen3, wanted, 16, device=device, **FLOAT32, quantization="fp8")
    assert found == run(tiny_qwen3, wanted, 16, device=device, **FLOAT32, quantization="fp8", max_prefill_chunk=16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_an_8_bit_cache(tiny_qwen3: Path) -> None:
    wanted = prompts(6, seed=2)
    options = {**FLOAT32, "device": "torch:cuda", "kv_cache_dtype": "fp8"}
    found = [run(tiny_qwen3, wanted, 16, **options, max_prefill_chunk=chunk) for chunk in (0, 16)]
    # Where a number lies between two of 8 bits, the order of a sum may decide.
    assert sum(whole == cut for whole, cut in zip(*found, strict=True)) >= 4


@pytest.mark.parametrize(
    "options", [{}, {"async_scheduling": True}, {"max_prefill_chunk": 16}, every_feature.ALWAYS], ids=str
)
@pytest.mark.parametrize("other", ["cpu", "cpu, in round sizes", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sdpa_gives_the_same_text_on_other_platforms(
    tiny_qwen3: Path, reference: Reference, other: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if other == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    if "round" in other:
        monkeypatch.setattr(batch, "_EXACT_SIZES", 3)
        monkeypatch.setattr(batch, "SIZE_STEP", 8)
        build = batch.BatchBuilder.__init__
        padding = torch.inference_mode()(lambda self, *args, **named: build(self, *args, **{**named, "pads": True}))
        monkeypatch.setattr(batch.BatchBuilder, "__init__", padding)
    wanted = prompts(20)
    options = {"device": other[:4].rstrip(","), "attention_backend": "sdpa", "max_num_seqs": 13, **FLOAT32, **options}
    assert run(tiny_qwen3, wanted, 24, **options) == [reference.greedy(prompt, 24) for prompt in wanted]


def test_the_demo_model_gives_the_other_platforms_answers(device: str) -> None:
    """In bfloat16, which rounds differently wherever sums are ordered otherwise; it is sure of what it says."""
    tokenizer = Tokenizer.from_file(str(agreement.MODEL / "tokenizer.json"))
    tasks = [task for skill in corpus.SKILLS for task in corpus.heldout(skill, 20 if "cuda" in device else 1, 0)]
    wanted = [tokenizer.encode(chat.prompt_text(t.messages, t.tools, t.thinking)).ids for t in tasks]
    found, others = (
        agreement.answers(wanted, {"device": name, "dtype": "bfloat16"})
        for name in (device, device.removeprefix("torch:"))
    )
    assert sum(a == b for a, b in zip(found, others, strict=True)) >= 0.9 * len(wanted)


def test_two_platforms_side_by_side(tiny_qwen3: Path, reference: Reference, device: str) -> None:
    """On one device of one process: which kernels run is the engine's, not the process's."""
    wanted = prompts(4, seed=8)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    options = {"max_model_len": 200, "num_threads": 1, "skip_tokenizer_init": True, "num_gpu_blocks_override": 80}
    other = device.removeprefix("torch:")
    with (
        LLM(str(tiny_qwen3), device=device, **FLOAT32, **options) as one,
        LLM(str(tiny_qwen3), device=other, **FLOAT32, **options) as two,
    ):
        for prompt in wanted:
            for llm in (one, two):
                (output,) = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
                assert output.outputs[0].token_ids == reference.greedy(prompt, 12)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"device": "torch:npu"}, "device=torch:npu, but torch .* has"),
        ({"device": "torch:cuda:1"}, "expected torch:TYPE"),
        ({"device": "cpu:0"}, "cpu has no kinds"),
        ({"device": "tpu"}, "unknown platform 'tpu'.*cuda, cpu, torch"),
        ({"device": "torch:cpu", "attention_backend": "triton"}, r"triton \(needs a CUDA device, not cpu\)"),
        ({"device": "torch:cpu", "attention_backend": "magic"}, "'magic' is unknown; there are: auto, triton"),
        ({"device": "torch:cpu", "kv_cache_dtype": "fp8"}, "needs a GPU"),
        ({"device": "torch:mps", "tensor_parallel_size": 2}, "ranks cannot meet on torch:mps"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(tiny_qwen3: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM(str(tiny_qwen3), skip_tokenizer_init=True, max_model_len=64, **given)


@pytest.mark.long
def test_two_ranks(tmp_path: Path, device: str) -> None:
    if "cuda" in device and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    reference = checkpoints.make("Llama", vocab_size=VOCAB, max_position_embeddings=256)
    folder = checkpoints.save(reference, tmp_path)
    wanted = prompts(5, seed=6)
    alone, shared = (
        run(folder, wanted, 16, device=device, **FLOAT32, max_model_len=160, tensor_parallel_size=ranks)
        for ranks in (1, 2)
    )
    assert shared == alone
