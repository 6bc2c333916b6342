"""Models through transformers: what they say is what transformers says, and what cannot run so is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire import LLM
from quire.config import transformers_models
from quire.config.engine import EngineConfig
from quire.config.hardware import Hardware
from quire.config.inspection import Findings, Question
from quire.config.model_info import read_model_info
from quire.config.resolve import resolve
from quire.foundation.errors import ConfigError, WeightsError
from quire.models.fallback import model as fallback_model
from quire.models.fallback.fuse import Fused, fuse
from quire.models.fallback.model import TransformersModel
from quire.models.fallback.norms import gain_of
from quire.worker.inspection import inspect
from tests.effort import sampled
from tests.models import checkpoints
from tests.models.cases import CASES
from tests.models.fallback_cases import FALLBACK, USUAL
from tests.models.paged import PagedRows
from tests.models.test_families import check_engine
from tests.models.test_parity import expected, largest_error, random_tokens

NATIVE = ("llama", "qwen3", "gemma2")
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(checkpoints.make("Llama"), tmp_path_factory.mktemp("llama"))


# -- numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", NATIVE)
def test_the_engine_says_what_transformers_says(case: str, tmp_path: Path) -> None:
    """Chunks, rows of unlike length together, decode steps, the prefix cache; windows and caps."""
    check_engine(case, tmp_path, 1e-4, device="cpu", max_prefill_chunk=16, model_impl="transformers")


@pytest.mark.parametrize("case", sampled(list(FALLBACK), lambda case: case in USUAL))
def test_classes_without_a_family(case: str, tmp_path: Path) -> None:
    """A whole prompt, a chunked one, and steps in which one decodes while the other goes on."""
    family, config = FALLBACK[case]
    reference = checkpoints.make(family, **config)
    checkpoints.save(reference, tmp_path)
    model = checkpoints.load(tmp_path, impl="transformers")
    assert isinstance(model, TransformersModel)
    rows, tokens = PagedRows(model), random_tokens(5, [40, 45])
    parts = [rows.step([1], [tokens[0][:30]]), []]
    for step in range(10):
        piece = tokens[1][4 * step : 4 * step + 4] if step < 9 else tokens[1][36:]
        decoded, prefilled = rows.step([1, 2], [tokens[0][30 + step : 31 + step], piece])
        parts[0].append(decoded)
        parts[1].append(prefilled)
    assert largest_error([torch.cat(part) for part in parts], expected(reference, tokens)) <= 1e-4


def test_families_and_transformers_agree(llama: Path) -> None:
    """One checkpoint by both ways, and by `auto`, which takes the family."""
    assert isinstance(checkpoints.load(llama, impl="transformers"), TransformersModel)
    for impl in ("auto", "quire", "vllm"):
        assert not isinstance(checkpoints.load(llama, impl=impl), TransformersModel)
    (tokens,) = random_tokens(6, [30])
    ours, theirs = (
        PagedRows(checkpoints.load(llama, impl=impl)).step([1], [tokens]) for impl in ("quire", "transformers")
    )
    assert largest_error(theirs, ours) <= 1e-4


def test_auto_takes_a_family_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """And transformers for an architecture that Quire does not know, of a class that transformers does."""
    monkeypatch.setattr(transformers_models, "causal_models", lambda: frozenset({"OtherForCausalLM"}))

    def found(architecture: str, impl: str) -> str:
        return transformers_models.implementation({}, architecture, impl, trusted=False)

    assert found("LlamaForCausalLM", "auto") == ""
    assert found("OtherForCausalLM", "auto") == found("OtherForCausalLM", "transformers") == "transformers"
    for architecture, impl in (("UnknownForCausalLM", "auto"), ("OtherForCausalLM", "quire")):
        with pytest.raises(ConfigError, match="is not supported"):
            found(architecture, impl)


def test_the_list_of_classes_is_transformers_own() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert transformers_models.causal_models() == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def test_bfloat16_is_no_worse_than_the_reference(tmp_path: Path) -> None:
    """Both in bfloat16 against float32: root mean squares of the logits' errors."""
    family, config = CASES["gemma2"]
    reference = checkpoints.make(family, **config)
    tokens = random_tokens(3, [40, 30])
    exact = torch.cat(expected(reference, tokens))
    checkpoints.save(reference, tmp_path)
    theirs = torch.cat(expected(type(reference).from_pretrained(tmp_path, dtype=torch.bfloat16), tokens))
    rows = PagedRows(checkpoints.load(tmp_path, torch.bfloat16, impl="transformers"), block_size=16)
    ours = torch.cat(rows.step([1, 2], tokens))
    assert (ours - exact).square().mean() <= 1.5**2 * (theirs - exact).square().mean()


def test_norms_are_ours_where_they_compute_the_same(tmp_path: Path) -> None:
    """Llama's, Gemma's whose weights are added to 1; not those that take the mean away."""
    for case, wanted in (("llama", 7), ("gemma2", 13), ("gpt2", 0)):
        family, config = CASES[case]
        folder = checkpoints.save(checkpoints.make(family, **config), tmp_path / case)
        model = checkpoints.load(folder, impl="transformers")
        assert sum(gain_of(module) is not None for module in model.modules()) == wanted, case


@pytest.mark.parametrize(
    ("case", "layers", "attention", "feed_forward"),
    [("llama-biases", 3, 0, 0), ("qwen3", 3, 0, 0), ("gemma2", 0, 3, 3), ("phi3", 3, 0, 0), ("gpt2", 0, 0, 0)],
)
def test_layers_are_ours_where_they_compute_the_same(
    case: str, layers: int, attention: int, feed_forward: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole layers of norms before, one after the other; of other orders their halves; else single products."""
    made: list[Fused] = []
    monkeypatch.setattr(fallback_model, "fuse", lambda *told: made.append(fuse(*told)) or made[-1])
    family, config = CASES[case]
    reference = checkpoints.make(family, **config)
    model = checkpoints.load(checkpoints.save(reference, tmp_path), impl="transformers")
    assert [(one.layers, one.attention, one.feed_forward) for one in made] == [(layers, attention, feed_forward)]
    tokens = random_tokens(7, [30])
    rows = PagedRows(model)
    parts = rows.step([1], [tokens[0][:20]]) + [rows.step([1], [[token]])[0] for token in tokens[0][20:]]
    assert largest_error([torch.cat(parts)], expected(reference, tokens)) <= 1e-4


def test_a_layer_that_computes_something_else_stays_its_own(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same parts by the same names: they are judged by numbers."""
    mlp = transformers.models.llama.modeling_llama.LlamaMLP
    own = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: own(self, x) * 1.01)
    made: list[Fused] = []
    monkeypatch.setattr(fallback_model, "fuse", lambda *told: made.append(fuse(*told)) or made[-1])
    model = checkpoints.load(llama, impl="transformers")
    assert [(one.layers, one.attention, one.feed_forward) for one in made] == [(0, 3, 0)]
    reference = transformers.AutoModelForCausalLM.from_pretrained(llama, attn_implementation="eager")
    tokens = random_tokens(8, [25])
    assert largest_error(PagedRows(model).step([1], tokens), expected(reference, tokens)) <= 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("case", NATIVE)
def test_the_engine_says_so_on_a_gpu(case: str, tmp_path: Path) -> None:
    check_engine(case, tmp_path, 1e-3, device="cuda", max_num_seqs=8, max_prefill_chunk=16, model_impl="transformers")


def test_keys_that_mean_nothing_are_named(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for file in llama.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, "window_of_doom": 7, "rope_theta": 1e4}))
    checkpoints.load(tmp_path, impl="transformers")
    told = [record.getMessage() for record in caplog.records if "mean nothing" in record.getMessage()]
    assert told == ["config.json: window_of_doom mean nothing to transformers' LlamaForCausalLM"]


# -- checkpoints that do not fit --------------------------------------------------------------------------------


def test_what_a_checkpoint_lacks_is_said_once(llama: Path, tmp_path: Path) -> None:
    state = load_file(llama / FILE)
    del state["model.layers.1.mlp.up_proj.weight"]
    state["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(3, 3)
    state["model.odd.weight"] = torch.zeros(3)
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    save_file(state, tmp_path / FILE)
    with pytest.raises(WeightsError) as caught:
        checkpoints.load(tmp_path, impl="transformers")
    text = str(caught.value)
    assert "model.layers.1.mlp.up_proj.weight [80, 48]" in text
    assert "model.layers.0.self_attn.q_proj.weight is [3, 3], the model needs [48, 48]" in text
    assert "model.odd.weight [3]" in text
    assert len(text.splitlines()) == 7


def test_experts_that_are_missing_are_missed(tmp_path: Path) -> None:
    family, config = FALLBACK["minimax_m2"]
    checkpoints.save(checkpoints.make(family, **config), tmp_path)
    state = load_file(tmp_path / FILE)
    gone = next(name for name in state if ".experts.1." in name)
    del state[gone]
    save_file(state, tmp_path / FILE)
    with pytest.raises(WeightsError, match=r"the weights do not fit the model: .*experts"):
        checkpoints.load(tmp_path, impl="transformers")


def test_tied_heads_must_be_what_they_are_tied_to(tmp_path: Path) -> None:
    checkpoints.save(checkpoints.make("Llama", tie_word_embeddings=True), tmp_path)
    state = load_file(tmp_path / FILE)
    assert "lm_head.weight" not in state
    save_file({**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}, tmp_path / FILE)
    checkpoints.load(tmp_path, impl="transformers")
    save_file({**state, "lm_head.weight": state["model.embed_tokens.weight"] + 1}, tmp_path / FILE)
    with pytest.raises(WeightsError, match="tie_word_embeddings"):
        checkpoints.load(tmp_path, impl="transformers")


# -- what cannot run so -----------------------------------------------------------------------------------------

NUMBERS = {"vocab_size": 97, "max_position_embeddings": 64}


def refused(tmp_path: Path, match: str, impl: str = "transformers", **config: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**NUMBERS, "dtype": "float32", **config}))
    with pytest.raises(ConfigError, match=match) as caught:
        checkpoints.load(tmp_path, impl=impl)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"architectures": ["NobodysForCausalLM"]}, "no causal language model called NobodysForCausalLM"),
        ({"architectures": ["BloomForCausalLM"], "model_type": "bloom"}, "attention of its own"),
        ({"architectures": ["LlamaForCausalLM"], "vision_config": {}}, "vision_config"),
        ({"architectures": ["MvpForCausalLM"], "is_encoder_decoder": True}, "encoder with a decoder"),
        ({"architectures": ["LlamaForCausalLM"], "quantization_config": {"bits": 4}}, "quantization_config"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "gpt2"}, "model_type='gpt2' does not go"),
        ({"architectures": ["LlamaForCausalLM"], "vocab_size": None}, "vocab_size"),
        ({"architectures": ["LlamaForCausalLM"], "max_position_embeddings": None}, "how many positions"),
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": "three"}, "num_hidden_layers"),
        (
            {"architectures": ["LlamaForCausalLM"], "rope_parameters": {
                "rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}},
            "rope_type=dynamic beyond 32",
        ),
    ],
)  # fmt: skip
def test_configs_that_cannot_run_are_refused_by_name(config: dict[str, Any], match: str, tmp_path: Path) -> None:
    refused(tmp_path, match, **config)


@pytest.mark.parametrize(
    ("family", "config", "match"),
    [
        ("Bert", {"is_decoder": False}, "sees neither all tokens before it nor a window or chunk"),
        ("Doge", {}, "does not run on packed rows"),
        ("Mamba2", {"num_heads": 12, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8}, "attention"),
        (
            "Lfm2",
            {"layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 80},
            "mixes (them|tokens) outside",
        ),
    ],
)
def test_classes_that_keep_or_see_something_else(
    family: str, config: dict[str, Any], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(checkpoints.MODELS, "Bert", "BertLMHeadModel")
    checkpoints.save(checkpoints.make(family, **config), tmp_path)
    with pytest.raises(ConfigError, match=match):
        checkpoints.load(tmp_path, impl="transformers")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tensor_parallel_size": 2}, "ranks cannot share a model that runs through transformers"),
        ({"quantization": "fp8"}, "runs through transformers"),
        ({"convert": "embed"}, "do not pool"),
        ({"enable_lora": True}, "there are no adapters"),
    ],
)
def test_options_that_are_not_for_such_models(options: dict[str, Any], match: str, llama: Path) -> None:
    with pytest.raises(ConfigError, match=match):
        LLM(str(llama), device="cpu", skip_tokenizer_init=True, model_impl="transformers", **options)


def test_they_are_inspected_without_their_weights(llama: Path) -> None:
    def found(impl: str) -> Findings:
        hardware = Hardware(device="cpu", name="cpu", total=2**34, free=2**34)
        config = EngineConfig.from_flat(model=str(llama), model_impl=impl, device="cpu")
        return inspect(Question(resolve(config, hardware=hardware), hardware))

    assert found("transformers").parameters == found("quire").parameters
    assert found("transformers").groups == found("quire").groups


def test_without_transformers_it_says_what_to_install(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_models, "_folder", lambda: None)
    monkeypatch.setattr(transformers_models, "causal_models", frozenset)
    with pytest.raises(ConfigError, match=r"pip install 'quire\[transformers\]'"):
        read_model_info(llama, {}, impl="transformers")
    with pytest.raises(ConfigError, match=r"is not supported.*pip install 'quire\[transformers\]'"):
        read_model_info(llama, {"architectures": ["PersimmonForCausalLM"]})


def test_the_brain_reads_such_a_config_without_torch(llama: Path) -> None:
    code = (
        "import sys; from quire import config; from quire.config.engine import EngineConfig; "
        "from quire.config.resolve import resolve; "
        f"found = resolve(EngineConfig.from_flat(model={str(llama)!r}, model_impl='transformers', device='cpu')); "
        "print(found.info.impl, [name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.split() == ["transformers", "[]"]
