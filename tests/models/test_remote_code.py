"""Code that comes with a checkpoint: run in the worker alone, after the option that says so, and named in the log."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import dynamic_module_utils

from quire import LLM, SamplingParams
from quire.foundation.errors import ConfigError
from tests.models import checkpoints
from tests.models.paged import PagedRows
from tests.models.twins import with_slopes

MODELING = """
import os
from pathlib import Path

from transformers import LlamaForCausalLM

from .configuration_odd import OddConfig

Path(__file__).with_name("ran_in").write_text(str(os.getpid()))
Path(os.environ["ODD_MARKER"]).write_text(str(os.getpid()))


class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = -outputs.logits * self.config.slope
        return outputs
"""
CONFIGURATION = """
from transformers import LlamaConfig


class OddConfig(LlamaConfig):
    model_type = "odd"
    slope: float = 1.5
"""
PROMPT = [5, 9, 3, 44, 17]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=5)


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the code leaves word that it ran; what transformers copies it to is in the same folder."""
    monkeypatch.setenv("ODD_MARKER", str(tmp_path / "marker"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "marker"


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    folder = checkpoints.save(checkpoints.make("Llama"), tmp_path / "odd")
    (folder / "modeling_odd.py").write_text(MODELING)
    (folder / "configuration_odd.py").write_text(CONFIGURATION)
    listed = {"AutoConfig": "configuration_odd.OddConfig", "AutoModelForCausalLM": "modeling_odd.OddForCausalLM"}
    checkpoints.rewrite_config(folder, architectures=["OddForCausalLM"], model_type="odd", auto_map=listed, slope=0.7)
    return folder


def test_code_runs_in_the_worker_once_it_is_trusted(
    odd: Path, marker: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "info")
    reference = checkpoints.make("Llama")
    with LLM(
        str(odd), device="cpu", dtype="float32", skip_tokenizer_init=True, num_threads=1, trust_remote_code=True
    ) as llm:
        (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], GREEDY, use_tqdm=False)
    assert int(marker.read_text()) != os.getpid()
    made = answer.outputs[0]
    with torch.inference_mode():
        logits = reference(torch.tensor([PROMPT + made.token_ids])).logits[0].float()
    expected = (-0.7 * logits).log_softmax(-1)
    for place, (token, found) in enumerate(zip(made.token_ids, made.logprobs, strict=True)):
        row = expected[len(PROMPT) - 1 + place]
        assert int(row.argmax()) == token
        assert abs(found[token].logprob - row[token].item()) < 1e-4
    said = capfd.readouterr().err
    for file in ("modeling_odd.py", "configuration_odd.py"):
        digest = hashlib.sha256((odd / file).read_bytes()).hexdigest()[:16]
        assert f"running {odd / file} (sha256 {digest})" in said


def test_code_is_not_run_unless_it_is_trusted(odd: Path, marker: Path) -> None:
    for impl in ("auto", "transformers"):
        with pytest.raises(ConfigError, match=r"OddForCausalLM is code that comes .*trust_remote_code"):
            LLM(str(odd), device="cpu", skip_tokenizer_init=True, model_impl=impl)
    with pytest.raises(ConfigError, match="is not supported"):
        LLM(str(odd), device="cpu", skip_tokenizer_init=True, model_impl="quire", trust_remote_code=True)
    assert not marker.exists()


def test_code_of_classes_that_there_are_is_never_run(odd: Path, marker: Path) -> None:
    """Whoever trusts a checkpoint still gets Quire's family, or transformers' class, where there is one."""
    checkpoints.rewrite_config(odd, architectures=["LlamaForCausalLM"], model_type="llama")
    for impl in ("auto", "transformers"):
        checkpoints.load(odd, impl=impl, trusted=True)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("reference", "match"),
    [
        ("somebody/else--modeling_odd.OddForCausalLM", "code of another repository"),
        ("../modeling_odd.OddForCausalLM", "no file beside it"),
        ("absent.OddForCausalLM", "no file beside it"),
        ("modeling_odd", "no file beside it"),
        ("modeling_odd.NobodyForCausalLM", "NobodyForCausalLM"),
    ],
)
@pytest.mark.usefixtures("marker")
def test_only_code_beside_the_weights_is_run(reference: str, match: str, odd: Path) -> None:
    config = json.loads((odd / "config.json").read_text())
    checkpoints.rewrite_config(odd, auto_map={**config["auto_map"], "AutoModelForCausalLM": reference})
    with pytest.raises(ConfigError, match=match):
        checkpoints.load(odd, trusted=True)


SLOPING = """
import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_odd import OddConfig


def eager_attention_forward(module, q, k, v, mask, scaling, dropout=0.0, alibi_slopes=None, **kwargs):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    place = torch.arange(k.shape[2])
    scores = q @ k.transpose(2, 3) * scaling - alibi_slopes[:, None, None] * (place[:, None] - place).abs() + mask
    return (scores.softmax(-1) @ v).transpose(1, 2).contiguous(), None


class OddAttention(nn.Module):
    is_causal = True

    def __init__(self, config, old):
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, old.layer_idx, old.head_dim
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = old.q_proj, old.k_proj, old.v_proj, old.o_proj

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        heads = self.config.num_attention_heads
        q, k, v = (
            proj(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        attend = ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation, eager_attention_forward)
        slopes = 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)
        kwargs = {key: value for key, value in kwargs.items() if key != "position_embeddings"}
        y, _ = attend(self, q, k, v, attention_mask, scaling=self.head_dim**-0.5, alibi_slopes=slopes[HOW], **kwargs)
        return self.o_proj(y.flatten(2)), None


class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn = OddAttention(config, layer.self_attn)
"""


@pytest.mark.usefixtures("marker")
def test_slopes_are_those_that_attention_functions_are_told(
    odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ALiBi of a checkpoint's own class: whole prompts, chunks and decode steps are what the formula says."""
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:  # of other tests
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    (odd / "modeling_odd.py").write_text(SLOPING.replace("[HOW]", ""))
    ids = list(range(3, 40))
    with torch.inference_mode():
        theirs = with_slopes(checkpoints.make("Llama"))(torch.tensor([ids])).logits[0]
    for counts in ([37], [20, 9, 1, 1, 6]):
        rows, found, begin = PagedRows(checkpoints.load(odd, trusted=True)), [], 0
        for count in counts:
            found += rows.step([1], [ids[begin : begin + count]])
            begin += count
        assert (torch.cat(found) - theirs).abs().max() <= 1e-4
    (odd / "modeling_odd.py").write_text(SLOPING.replace("HOW", ":1"))
    with pytest.raises(ConfigError, match=r"has \[1\] slopes for 4 heads"):
        checkpoints.load(odd, trusted=True)
