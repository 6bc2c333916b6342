"""The loader: what it reads, and how clearly it refuses."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire.config.model_info import read_model_info
from quire.foundation.errors import ConfigError, WeightsError
from quire.models import catalog, weights
from quire.models.base import DecoderStack
from tests.models import checkpoints

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.save(checkpoints.make("Llama"), tmp_path)


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors of the checkpoint; a dot is written as two underscores."""
    state = load_file(folder / FILE)
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        if tensor is None:
            del state[name]
        else:
            state[name] = tensor
    save_file(state, folder / FILE)


def error_of(folder: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        checkpoints.load(folder)
    return str(caught.value)


def parameters(model: DecoderStack) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def equal(a: DecoderStack, b: DecoderStack) -> bool:
    mine, other = parameters(a), parameters(b)
    return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


# -- what it reads ----------------------------------------------------------------------------------------------


def test_every_tensor_lands_where_it_belongs(folder: Path) -> None:
    state, model = load_file(folder / FILE), parameters(checkpoints.load(folder))
    at = "model.layers.1.self_attn"
    stacked = torch.cat([state[f"{at}.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(model["layers.1.self_attn.qkv_proj.weight"], stacked)
    both = torch.cat([state[f"model.layers.2.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(model["layers.2.mlp.gate_up_proj.weight"], both)
    assert torch.equal(model["lm_head.weight"], state["lm_head.weight"])


def test_shards_make_the_same_model(folder: Path, tmp_path: Path) -> None:
    sharded = checkpoints.save(checkpoints.make("Llama"), tmp_path / "sharded", max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert equal(checkpoints.load(folder), checkpoints.load(sharded))


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16])
def test_other_number_types_are_converted(folder: Path, stored: torch.dtype) -> None:
    state = {name: tensor.to(stored) for name, tensor in load_file(folder / FILE).items()}
    save_file(state, folder / FILE)
    model = parameters(checkpoints.load(folder, torch.bfloat16))
    assert torch.equal(model["norm.weight"], state["model.norm.weight"].bfloat16())
    assert torch.equal(model["embed_tokens.weight"], state["model.embed_tokens.weight"].bfloat16())


def test_conversion_of_a_tensor_larger_than_the_staging_buffer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.models.transfer.CHUNK_BYTES", 1000)
    model = parameters(checkpoints.load(folder, torch.bfloat16))
    wanted = load_file(folder / FILE)["model.embed_tokens.weight"].bfloat16()
    assert torch.equal(model["embed_tokens.weight"], wanted)


def test_rotary_tables_of_old_checkpoints_are_skipped(folder: Path) -> None:
    before = checkpoints.load(folder)
    change(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(6))
    assert equal(before, checkpoints.load(folder))


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return checkpoints.save(checkpoints.make("Llama", tie_word_embeddings=True), tmp_path)


def test_a_stored_head_that_equals_the_embeddings_is_tied(tied: Path) -> None:
    before = checkpoints.load(tied)
    change(tied, lm_head__weight=load_file(tied / FILE)["model.embed_tokens.weight"].clone())
    assert equal(before, checkpoints.load(tied))


@pytest.mark.parametrize("stages", [1, 3])
def test_tied_embeddings_stored_under_the_heads_name_alone(tied: Path, stages: int) -> None:
    """As safetensors' `save_model` writes them; every stage of several finds what it needs."""

    def loaded() -> list[DecoderStack]:
        info = read_model_info(tied, {})
        models = [
            catalog.build(info, torch.float32, checkpoints.CPU, 64, place=catalog.Place(number, stages))
            for number in range(stages)
        ]
        for model in models:
            weights.load(model, tied, "auto")
        return models

    before = loaded()
    embeddings = load_file(tied / FILE)["model.embed_tokens.weight"]
    change(tied, lm_head__weight=embeddings, model__embed_tokens__weight=None)
    assert all(equal(one, other) for one, other in zip(before, loaded(), strict=True))


def test_a_stored_head_that_differs_is_not_dropped(tied: Path) -> None:
    """transformers takes the stored one, with a warning; here the user says which."""
    from tests.models.paged import PagedRows

    change(tied, lm_head__weight=torch.randn(97, 48))
    message = error_of(tied)
    assert "tie_word_embeddings" in message
    assert "lm_head.weight" in message
    ids = list(range(20))
    (ours,) = PagedRows(checkpoints.load(tied, tie_word_embeddings=False)).step([1], [ids])
    with torch.inference_mode():
        theirs = transformers.LlamaForCausalLM.from_pretrained(tied)(torch.tensor([ids])).logits[0]
    assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite(folder: Path, value: float) -> None:
    broken = load_file(folder / FILE)["model.layers.1.mlp.up_proj.weight"]
    broken[7, 5] = value
    change(folder, model__layers__1__mlp__up_proj__weight=broken)
    assert "model.layers.1.mlp.up_proj.weight holds NaN or infinity as torch.float32" in error_of(folder)


def test_weights_that_the_wanted_type_cannot_hold(folder: Path) -> None:
    change(folder, model__norm__weight=torch.full((48,), 1e5))
    with pytest.raises(WeightsError, match=r"model\.norm\.weight holds NaN or infinity as torch\.float16"):
        checkpoints.load(folder, torch.float16)


def test_finite_weights_with_an_infinite_sum_are_read(folder: Path) -> None:
    change(
        folder,
        model__norm__weight=torch.full((48,), 3e38),
        model__layers__0__mlp__up_proj__weight=torch.full((80, 48), 6e4),
    )
    checkpoints.load(folder)
    change(folder, model__norm__weight=torch.ones(48))
    checkpoints.load(folder, torch.float16)


@pytest.mark.parametrize("name", [FILE, "config.json"])
def test_a_pointer_of_git_lfs_is_called_that(folder: Path, name: str) -> None:
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n")
    with pytest.raises(ConfigError, match=rf"(?s){name}.*Git LFS pointer.*git lfs pull"):
        checkpoints.load(folder)


def test_without_a_terminal_nothing_is_printed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = catalog.build(read_model_info(folder, {}), torch.float32, checkpoints.CPU, 64)
    weights.load(model, folder, "auto", show_progress=True)
    assert capfd.readouterr() == ("", "")


def test_the_bar_on_a_terminal_counts_every_byte(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    model = catalog.build(read_model_info(folder, {}), torch.float32, checkpoints.CPU, 64)
    weights.load(model, folder, "auto", show_progress=True)
    kib = sum(p.numel() * p.element_size() for p in model.parameters()) / 1024
    assert "loading weights" in terminal.getvalue()
    assert f"{kib:.1f}/{kib:.1f} KiB" in terminal.getvalue()


# -- what it refuses --------------------------------------------------------------------------------------------


def test_one_error_lists_everything(folder: Path) -> None:
    change(
        folder,
        model__norm__weight=None,
        model__layers__0__self_attn__k_proj__weight=None,
        model__layers__0__self_attn__k_proj__scales=torch.ones(3),
        model__layers__1__mlp__up_proj__weight=torch.ones(80, 47),
        model__embed_tokens__weight=torch.ones(97, 48, dtype=torch.int8),
    )
    message = error_of(folder)
    assert str(folder) in message
    assert "2 missing tensors" in message
    assert "model.norm.weight [48]" in message
    assert "model.layers.0.self_attn.k_proj.weight [24, 48]" in message
    assert "1 tensors that the model has no place for" in message
    assert "k_proj.scales [3]" in message
    assert "model.layers.1.mlp.up_proj.weight is [80, 47], the model needs [80, 48]" in message
    assert "model.embed_tokens.weight is torch.int8" in message


def test_what_repeats_in_all_layers_is_one_line(folder: Path) -> None:
    change(folder, **{f"model__layers__{i}__self_attn__q_norm__weight": torch.ones(12) for i in range(3)})
    message = error_of(folder)
    assert "model.layers.*.self_attn.q_norm.weight [12] (3 layers)" in message
    assert message.count("q_norm") == 1


def test_a_long_list_is_cut(folder: Path) -> None:
    change(folder, **{f"odd__{i}x": torch.ones(1) for i in range(50)})
    message = error_of(folder)
    assert "50 tensors" in message
    assert "… and 30 more" in message


def test_an_untied_model_needs_its_head(folder: Path) -> None:
    change(folder, lm_head__weight=None)
    assert "lm_head.weight [97, 48]" in error_of(folder)


def test_absent_shard(tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make("Llama"), tmp_path, max_shard_size="60KB")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    message = error_of(folder)
    assert "absent files" in message
    assert gone.name in message
    assert "missing tensors" not in message


@pytest.mark.parametrize("weight_map", [{"a": "../model.safetensors"}, {"a": "/etc/passwd"}, {"a": 3}, [], None])
def test_an_index_points_to_its_own_folder_only(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert INDEX in error_of(folder)


def test_folder_without_weights(folder: Path) -> None:
    (folder / FILE).rename(folder / "pytorch_model.bin")
    message = error_of(folder)
    assert "no .safetensors file" in message
    assert "pytorch_model.bin" in message


@pytest.mark.parametrize("kept", [0, 5, 8, 200, 30_000, -1])
def test_truncated_file(folder: Path, kept: int) -> None:
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(data[:kept])
    message = error_of(folder)
    assert FILE in message
    assert "missing tensors" not in message


def header(claim: Any, data: bytes = b"\0" * 64) -> bytes:
    text = claim if isinstance(claim, bytes) else json.dumps(claim).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype: Any = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"norm": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


MALFORMED = {
    "garbage": b"\x93" * 400,
    "header longer than the file": struct.pack("<Q", 2**63) + b"{}",
    "not JSON": header(b"{{{{"),
    "not UTF-8": header(b'{"\xff\xfe": 1}'),
    "not an object": header([1, 2]),
    "deeply nested": header(b"[" * 100_000),
    "no description": header({"norm": 3}),
    "a field missing": header({"norm": {"dtype": "F32", "shape": [4]}}),
    "one offset": header(tensor(offsets=[0])),
    "unknown dtype": header(tensor(dtype="F99")),
    "dtype no string": header(tensor(dtype=["F32"])),
    "huge shape": header(tensor(shape=[10**30, 10**30])),
    "large product": header(tensor(shape=[2**62, 2**62, 2**62])),
    "million dimensions": header(tensor(shape=[1] * 1_000_000)),
    "negative dimension": header(tensor(shape=[-4])),
    "fractional dimension": header(tensor(shape=[4.0])),
    "boolean dimension": header(tensor(shape=[True], offsets=[0, 4])),
    "negative offset": header(tensor(offsets=[-16, 0])),
    "offsets turned around": header(tensor(offsets=[16, 0])),
    "past the end": header(tensor(offsets=[1024, 1040])),
    "far past the end": header(tensor(offsets=[2**62, 2**62 + 16])),
    "fewer bytes than the shape": header(tensor(shape=[5])),
    "more bytes than the shape": header(tensor(shape=[3])),
    "bytes behind the last tensor": header(tensor()),
    "bytes of no tensor": header(tensor(offsets=[48, 64])),
    "overlapping tensors": header({**tensor(), "other": tensor(offsets=[12, 28])["norm"]}, b"\0" * 28),
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_files_are_refused(folder: Path, content: bytes) -> None:
    (folder / FILE).write_bytes(content)
    message = error_of(folder)
    assert "1 unreadable files" in message
    assert FILE in message
    assert len(message) < 1000


def test_a_file_that_shrinks_while_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size was right when the header was checked: the error must be as clean, not a crash."""
    check = weights._Checkpoint.check

    def check_then_shrink(self: weights._Checkpoint, *arguments: Any, **options: Any) -> None:
        check(self, *arguments, **options)
        with open(folder / FILE, "r+b") as file:
            file.truncate(20_000)

    monkeypatch.setattr(weights._Checkpoint, "check", check_then_shrink)
    assert "could not be read: ends at byte 20000" in error_of(folder)


def test_nothing_is_read_when_something_does_not_fit(folder: Path) -> None:
    change(folder, model__norm__weight=None)
    model = catalog.build(read_model_info(folder, {}), torch.float32, checkpoints.CPU, 64)
    for parameter in model.parameters():
        parameter.data.fill_(7)
    with pytest.raises(WeightsError):
        weights.load(model, folder, "auto")
    assert all((parameter == 7).all() for parameter in model.parameters())


# -- dummy weights ----------------------------------------------------------------------------------------------


def dummy(folder: Path, seed: int) -> DecoderStack:
    model = catalog.build(read_model_info(folder, {}), torch.bfloat16, checkpoints.CPU, 64)
    weights.load(model, folder, "dummy", seed=seed)
    return model


def test_dummy_weights_depend_on_the_seed_alone(folder: Path) -> None:
    (folder / FILE).unlink()
    assert equal(dummy(folder, 1), dummy(folder, 1))
    assert not equal(dummy(folder, 1), dummy(folder, 2))


def test_dummy_weights_give_sane_outputs(tmp_path: Path) -> None:
    from tests.models.paged import PagedRows

    reference = checkpoints.make("Qwen2", num_hidden_layers=24)
    rows = PagedRows(dummy(checkpoints.save(reference, tmp_path), 0))
    some, other = (logits[-1] for logits in rows.step([1, 2], [list(range(40)), list(range(50, 90))]))
    assert some.isfinite().all()
    assert 0.1 < some.std() < 10
    assert (some - other).abs().max() > 0.1, "the model says the same about every prompt"
