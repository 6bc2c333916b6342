"""Checkpoints that Quark itself exports: weights bit for bit, and the model's logits. SqueezeLLM's by definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.foundation.errors import ConfigError
from quire.quantization.methods.quark import Quark
from quire.quantization.select import make_method
from tests.effort import sampled
from tests.models import checkpoints
from tests.models.paged import PagedRows
from tests.quantization import test_models, writers
from tests.quantization.test_models import linears
from tests.quantization.test_torchao_hqq import Packed, check, make

INT: dict[str, Any] = {"scale_type": "float", "round_method": "half_even", "is_dynamic": False}
GROUP = {**INT, "ch_axis": 1, "group_size": 32}
SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8 by tensor": ("FP8E4M3PerTensorSpec", {"observer_method": "min_max", "is_dynamic": False}),
    "fp8 by output": ("FP8E4M3PerChannelSpec", {"is_dynamic": False, "ch_axis": 0}),
    "int8 by output": ("Int8PerChannelSpec", {**INT, "symmetric": True, "ch_axis": 0}),
    "int8 by tensor": ("Int8PerTensorSpec", {**INT, "symmetric": True, "observer_method": "min_max"}),
    "int4 by group": ("Int4PerGroupSpec", {**GROUP, "symmetric": True}),
    "uint4 by group": ("Uint4PerGroupSpec", {**GROUP, "symmetric": False}),
    "mxfp4": ("OCP_MXFP4Spec", {"is_dynamic": False, "ch_axis": -1}),
}


def export(family: str, spec: str, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """By the library from end to end; and what it says of each weight."""
    pytest.importorskip("quark.torch")
    import quark.torch.quantization.config.config as configs
    from quark.torch import ModelQuantizer, export_safetensors

    name, options = SPECS[spec]
    weight = getattr(configs, name)(**options).to_quantization_spec()
    sizes = {"num_local_experts": 4} if family == "Mixtral" else {}
    model = checkpoints.make(family, **writers.SIZES, **sizes)
    checkpoints.save(model, folder / "dense")
    config = configs.QConfig(global_quant_config=configs.QLayerConfig(weight=weight), exclude=["lm_head"])
    quantizer = ModelQuantizer(config)
    made = quantizer.freeze(quantizer.quantize_model(model, [torch.arange(16)[None]]))
    stands = {
        f"{path}.weight": module.get_quant_weight(module.weight).detach().clone()
        for path, module in made.named_modules()
        if hasattr(module, "get_quant_weight")
    }
    with torch.no_grad():
        export_safetensors(model=made, output_dir=str(folder / "packed"))
    return folder / "packed", stands


@pytest.mark.parametrize("spec", sampled(list(SPECS), lambda _: False))
def test_quarks_own_checkpoints(spec: str, tmp_path: Path) -> None:
    packed, stands = export("Llama", spec, tmp_path)
    ours, theirs = test_models.build(packed, unused=Quark.unused), test_models.build(tmp_path / "dense")
    seen = 0
    for path, linear in linears(theirs).items():
        names = [f"{module}.weight" for module in linear.modules_in_checkpoint]
        if names[0] not in stands:
            continue
        wanted = torch.cat([stands[name] for name in names])
        seen += len(names)
        assert torch.equal(linears(ours)[path].matrix.dense(torch.float32), wanted), path
        linear.set_dense(wanted)
    assert seen == len(stands) == 14
    ids = [list(range(30)), list(range(40, 60))]
    for one, other in zip(PagedRows(ours).step([1, 2], ids), PagedRows(theirs).step([1, 2], ids), strict=True):
        assert (one - other).abs().max() <= 1e-4


def quark(weight: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"quant_method": "quark", "global_quant_config": {"weight": weight, **more}, "exclude": ["lm_head"]}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            quark({"dtype": "fp6_e2m3", "qscheme": "per_group", "group_size": 32}),
            "dtype=fp6_e2m3, qscheme=per_group are not",
        ),
        (quark({"dtype": "fp4", "qscheme": "per_group", "group_size": 16}), "group_size=32, scale_format=e8m0"),
        (quark({"dtype": "int8", "qscheme": "per_channel", "symmetric": False}), "int8 weights with zeros"),
        (quark({"dtype": "int8", "odd": 1}), "odd=1 are not supported"),
        (quark({"dtype": "int8"}, bias={"dtype": "int8"}), "quantized biases"),
        ({**quark({"dtype": "int8"}), "export": {"weight_format": "fake_quantized"}}, "must be one of real_quantized"),
        ({**quark({"dtype": "int8"}), "softmax_quant_spec": {"dtype": "fp8_e4m3"}}, "softmax_quant_spec="),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": [{}, {}]}},
            "scales that are quantized themselves",
        ),
    ],
    ids=lambda _: "",
)
def test_what_quark_can_and_we_cannot_is_refused_by_name(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make("Llama", **writers.SIZES), tmp_path)
    checkpoints.rewrite_config(folder, quantization_config=config)
    with pytest.raises(ConfigError, match=message):
        test_models.build(folder)


# -- SqueezeLLM -------------------------------------------------------------------------------------------------


def by_table(_: str, weight: torch.Tensor) -> Packed:
    """qweight int32 [k / 8, n], the lowest bits the first input; lookup_table fp16 [n, 16]."""
    table = torch.quantile(weight, torch.linspace(0, 1, 16), dim=1).t().half()
    codes = (weight[..., None] - table.float()[:, None]).abs().argmin(-1)
    words = writers.stream(codes.numpy(), 4)
    return {"qweight": torch.from_numpy(words).t(), "lookup_table": table}, table.float().gather(1, codes)


@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_tables_by_output(family: str, tmp_path: Path) -> None:
    make(family, tmp_path, by_table, {"quant_method": "squeezellm", "wbits": 4})
    check(tmp_path)


def test_other_tables_are_refused() -> None:
    with pytest.raises(ConfigError, match="wbits must be one of 4, got 3"):
        make_method("squeezellm", {"quant_method": "squeezellm", "wbits": 3})
