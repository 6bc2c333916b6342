"""A GGUF file as the model: text, tokenizer and template from the file alone; its parts; what is wrong with one."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file

from quire import LLM, SamplingParams
from quire.config.gguf.folder import gguf_folder
from quire.config.model import ModelConfig
from quire.config.resolve import DEMO_MODEL, locate_model
from quire.foundation.errors import ConfigError, QuireError
from tests.effort import sampled
from tests.gguf import writer

GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=0)
CHATS = [
    [{"role": "user", "content": text}]
    for text in ("What is the capital of France?", "What is 17 + 25?", "Tell me a story about a fox.")
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))


def tokenizer_metadata() -> dict[str, Any]:
    tokenizer = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.huggingface.json": json.dumps(tokenizer),
        "tokenizer.chat_template": json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())["chat_template"],
    }


def write_demo(file: Path, kind: Callable[[str], Type], **options: Any) -> dict[str, torch.Tensor]:
    return writer.write(DEMO_MODEL, file, "qwen3", kind, tokenizer=tokenizer_metadata(), **options)


def answers(model: Path | str, **options: Any) -> tuple[list[str], list[float], LLM]:
    llm = LLM(str(model), device="cpu", **options)
    try:
        outputs = [output.outputs[0] for output in llm.chat(CHATS, GREEDY, use_tqdm=False)]
    finally:
        llm.shutdown()
    return [output.text for output in outputs], [output.cumulative_logprob or 0.0 for output in outputs], llm


KINDS = [Type.Q8_0, Type.BF16, Type.Q4_0, Type.Q5_1, Type.F16]


@pytest.mark.parametrize("kind", sampled(KINDS, lambda kind: kind == Type.Q4_0), ids=str)
def test_the_text_is_that_of_the_dequantised_model(kind: Type, tmp_path: Path) -> None:
    """The same numbers by another road: what a file stands for, as a plain checkpoint."""
    state = write_demo(tmp_path / "demo.gguf", lambda _: kind)
    plain = shutil.copytree(DEMO_MODEL, tmp_path / "plain")
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, plain / "model.safetensors")
    ours, our_sums, llm = answers(tmp_path / "demo.gguf", dtype="float32")
    theirs, their_sums, _ = answers(plain, dtype="float32")
    assert ours == theirs
    assert our_sums == pytest.approx(their_sums, abs=1e-3)
    assert "Paris" in ours[0]
    blocks = 8 * (4 * 256 * 256 * (1 + 0.5) + 3 * 768 * 256)  # numbers of the matrices
    if kind in (Type.Q8_0, Type.Q4_0):
        assert llm.info.report.weight_bytes < blocks * 1.1 + 4 * 4096 * 256 + 100_000


def test_parts_of_a_file_are_one_model(tmp_path: Path) -> None:
    whole, split = tmp_path / "whole.gguf", tmp_path / "split"
    split.mkdir()
    write_demo(whole, lambda _: Type.Q8_0)
    write_demo(split / "demo-q8_0.gguf", lambda _: Type.Q8_0, split_max_tensors=30)
    parts = sorted(split.iterdir())
    assert len(parts) > 2
    one, _, _ = answers(whole)
    for named in (split, parts[0], parts[1], f"{split}:Q8_0"):
        assert locate_model(ModelConfig(model=str(named))) == locate_model(ModelConfig(model=str(split)))
    assert answers(split)[0] == one
    parts[1].unlink()
    with pytest.raises(ConfigError, match=f"of its {len(parts)} parts {parts[1].name} are not there"):
        LLM(str(parts[0]), device="cpu")


def test_a_folder_of_several_says_which(tmp_path: Path) -> None:
    for kind in ("Q8_0", "Q4_0"):
        write_demo(tmp_path / f"demo-{kind}.gguf", lambda _, kind=kind: Type[kind])  # type: ignore[misc]
    (tmp_path / "mmproj-demo.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"several GGUF files \(demo-Q4_0\.gguf, demo-Q8_0\.gguf\): name one"):
        LLM(str(tmp_path), device="cpu")
    assert (locate_model(ModelConfig(model=f"{tmp_path}:q4_0")) / "demo-Q4_0.gguf").exists()
    with pytest.raises(ConfigError, match="no GGUF file with 'Q6_K' in its name"):
        locate_model(ModelConfig(model=f"{tmp_path}:Q6_K"))


def test_the_same_file_is_looked_at_once(tmp_path: Path) -> None:
    write_demo(tmp_path / "demo.gguf", lambda _: Type.F16)
    folder = gguf_folder(tmp_path / "demo.gguf")
    before = (folder / "config.json").stat().st_mtime_ns
    assert gguf_folder(tmp_path / "demo.gguf") == folder
    assert (folder / "config.json").stat().st_mtime_ns == before


# -- what is wrong ----------------------------------------------------------------------------------------------


def broken(change: Callable[[bytes], bytes], file: Path) -> Path:
    file.write_bytes(change(file.read_bytes()))
    return file


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"GGML" + data[4:], "does not begin with GGUF"),
        (lambda data: data[:4] + struct.pack("<I", 9) + data[8:], "version 9 of its format; 2 and 3 are known"),
        (lambda data: data[: len(data) - 5000], "is it cut off"),
        (lambda data: data[:900], r"array of 4096 entries at byte \d+ \(is it cut off\?\)"),
        (lambda data: data[:10], "too short for a GGUF file"),
        (lambda data: data[:8] + struct.pack("<Q", 1 << 60) + data[16:], "claims 1152921504606846976 tensors"),
        (
            lambda data: data.replace(b"qwen3.block_count", b"qwen3.block_mount"),
            r"qwen3\.block_count must be a number > 0, got None",
        ),
        (lambda data: data.replace(b"blk.0.attn_q.weight", b"blk.0.attn_z.weight"), r"tensor blk\.0\.attn_z\.weight"),
        (lambda data: data.replace(b"qwen3.vocab_size", b"qwen3.vocab_flip"), r"not supported: qwen3\.vocab_flip=4096"),
    ],
    ids=["magic", "version", "cut", "header", "short", "counts", "missing", "tensor", "key"],
)
def test_a_file_that_is_damaged_or_unknown_is_refused_by_name(
    change: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    write_demo(tmp_path / "demo.gguf", lambda _: Type.Q8_0)
    with pytest.raises(QuireError, match=message):
        LLM(str(broken(change, tmp_path / "demo.gguf")), device="cpu")


def test_a_family_that_is_not_known_is_named(tmp_path: Path) -> None:
    made = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba9")
    made.add_tensor("token_embd.weight", torch.zeros(4, 32).numpy())
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
    with pytest.raises(
        ConfigError, match=r"general\.architecture='mamba9' are not supported \(known: arcee, bert, cohere2"
    ):
        LLM(str(tmp_path / "x.gguf"), device="cpu")
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"x\.bin' is a file, and no \.gguf file"):
        LLM(str(tmp_path / "x.bin"), device="cpu")
