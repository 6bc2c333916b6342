"""Adapters that cannot be used are refused by name, and harm nobody."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, LoRARequest, SamplingParams
from quire.config.engine import EngineConfig
from quire.config.peft import PeftConfig
from quire.foundation.errors import ConfigError, InputError, WeightsError
from quire.models.adapters.tensors import read_tensors
from tests.lora import adapters
from tests.lora.adapters import PROMPT, simple, write
from tests.models import checkpoints

OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "num_threads": 1, "max_model_len": 64, "skip_tokenizer_init": True,
    "enable_lora": True, "max_lora_rank": 8, "num_gpu_blocks_override": 40,
}  # fmt: skip
ASK = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
Q, B = "model.layers.0.self_attn.q_proj", "model.layers.0.block.q_proj"
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "IA3"}, "peft_type must be LORA, got 'IA3'"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head'] is not supported"),
    "biases": ({"bias": "all"}, "bias='all' is not supported"),
    "lora_bias": ({"lora_bias": True}, "lora_bias=True is not supported"),
    "tokens": ({"trainable_token_indices": [3]}, "trainable_token_indices=[3] is not supported"),
    "layers twice": ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
    "aLoRA": ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens=[5] is not supported"),
    "PiSSA": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' changed the base model's"),
    "something new": ({"use_magic": True}, "use_magic=True means nothing here"),
    "rank": ({"r": 9}, "rank 9 is more than max_lora_rank=8"),
    "rank by pattern": ({"rank_pattern": {"q_proj": 64}}, "rank 64 is more than max_lora_rank=8"),
    "no rank": ({"r": 0}, "r must be >= 1, got 0"),
    "no expression": ({"target_modules": "(q_proj"}, "'(q_proj' is no regular expression"),
    "layers": ({"layers_to_transform": "one"}, "layers_to_transform must be a list of integers"),
    "absent target": ({"target_modules": ["q_proj", "w_pack"]}, "target_modules has 'w_pack', and the model"),
    "absent parameter": ({"target_parameters": ["mlp.experts.w"]}, "target_parameters has 'mlp.experts.w'"),
    "more targets": ({"layers_to_transform": None}, "layers.1.self_attn.q_proj lacks lora_A"),
    "other targets": ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, f"{Q} is not among the"),
    "dora": ({"use_dora": True}, f"{Q} lacks lora_magnitude_vector"),
    "another rank": ({"r": 4}, f"{Q}.lora_A is [2, 48], the model and the adapter's rank need [4, 48]"),
}  # fmt: skip
TENSORS: dict[str, tuple[dict[str, tuple[int, ...]], str]] = {
    "strange module": ({f"{B}.lora_A": (2, 48), f"{B}.lora_B": (48, 2)}, f"{B} is no module of this model"),
    "inputs": ({f"{Q}.lora_A": (2, 64), f"{Q}.lora_B": (48, 2)}, "lora_A is [2, 64], the model and"),
    "outputs": ({f"{Q}.lora_A": (2, 48), f"{Q}.lora_B": (64, 2)}, "lora_B is [64, 2], the model and"),
    "half": ({f"{Q}.lora_A": (2, 48)}, f"{Q} lacks lora_B"),
    "no factor": ({"lm_head": (97, 48)}, "base_model.model.lm_head.weight is no factor"),
    "base": ({f"{Q}.lora_A": (2, 48), f"{Q}.lora_B": (48, 2), f"{Q}.base_layer": (48, 48)}, "comes with a base layer"),
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = checkpoints.save(checkpoints.make("Llama"), tmp_path_factory.mktemp("base"))
    with LLM(str(folder), **OPTIONS, max_loras=1, max_cpu_loras=2) as made:
        yield made


def refusal(llm: LLM, folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        llm.generate(PROMPT, ASK, lora_request=LoRARequest("bad", 7, str(folder)), use_tqdm=False)
    assert "bad" not in [request.lora_name for request in llm.llm_engine.adapters]
    return str(caught.value)


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_that_change_something_else(case: str, llm: LLM, tmp_path: Path) -> None:
    config, message = CONFIGS[case]
    assert message in refusal(llm, simple(tmp_path, **config))


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit(case: str, llm: LLM, tmp_path: Path) -> None:
    shapes, message = TENSORS[case]
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    config: dict[str, Any] = {"target_modules": "all-linear"}
    assert message in refusal(llm, write(tmp_path, tensors, **config))


def test_files_that_are_none(llm: LLM, tmp_path: Path) -> None:
    assert "does not exist" in refusal(llm, tmp_path / "nowhere")
    assert "adapter_config.json does not exist" in refusal(llm, tmp_path)
    folder = simple(tmp_path / "cut")
    whole = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(whole[:-8])
    assert "is it cut off?" in refusal(llm, folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert "adapter_model.bin is a pickle, which is not read" in refusal(llm, folder)
    broken = {f"{Q}.lora_A": torch.full((2, 48), torch.nan), f"{Q}.lora_B": torch.zeros(48, 2)}
    assert "holds NaN" in refusal(llm, write(tmp_path / "nan", broken, target_modules="all-linear"))


def test_after_all_that_the_engine_answers(llm: LLM, tmp_path: Path) -> None:
    request = LoRARequest("good", 1, str(simple(tmp_path)))
    plain, adapted = llm.generate([PROMPT] * 2, ASK, lora_request=[None, request], use_tqdm=False)
    assert plain.outputs[0].token_ids != adapted.outputs[0].token_ids
    assert plain.lora_request is None
    assert adapted.lora_request == request
    assert llm.call("check") is None


def test_names_and_places(llm: LLM, tmp_path: Path) -> None:
    """Names are one adapter's each; adapters come and go, and memory on the host is for two."""
    engine = llm.llm_engine
    folders = [simple(tmp_path / str(i), seed=i) for i in range(4)]
    requests = [LoRARequest(f"n{i}", 10 + i, str(folder)) for i, folder in enumerate(folders)]
    alone = [llm.generate(PROMPT, ASK, lora_request=r, use_tqdm=False)[0].outputs[0].token_ids for r in requests]
    assert len({tuple(ids) for ids in alone}) == 4
    assert {10, 11, 12, 13} <= engine.list_loras()
    together = llm.generate([PROMPT] * 4, ASK, lora_request=requests, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in together] == alone
    llm.generate(PROMPT, ASK, lora_request=requests[3], use_tqdm=False)
    with pytest.raises(InputError, match="load_inplace=True lets another take its place"):
        engine.add_lora(LoRARequest("n0", 10, str(folders[1])))
    assert engine.add_lora(LoRARequest("n0", 10, str(folders[1]), load_inplace=True))
    renewed = LoRARequest("n0", 10, str(folders[1]))
    assert llm.generate(PROMPT, ASK, lora_request=renewed, use_tqdm=False)[0].outputs[0].token_ids == alone[1]
    assert engine.pin_lora(10)
    with pytest.raises(InputError, match="one must stay unpinned"):
        engine.pin_lora(13)
    assert not engine.pin_lora(99)
    assert engine.remove_lora(10)
    assert not engine.remove_lora(10)
    hosted = llm.apply_model(lambda _: None)
    assert hosted == [None]


def test_one_that_vanishes_ends_its_own_requests_alone(llm: LLM, tmp_path: Path) -> None:
    """It was let go of on the host, and is not there to be read again."""
    folders = [simple(tmp_path / str(i), seed=20 + i) for i in range(3)]
    requests = [LoRARequest(f"v{i}", 30 + i, str(folder)) for i, folder in enumerate(folders)]
    for request in requests:
        llm.llm_engine.add_lora(request)
    (folders[0] / "adapter_config.json").unlink()
    gone, there = llm.generate([PROMPT] * 2, ASK, lora_request=[requests[0], requests[2]], use_tqdm=False)
    assert gone.outputs[0].finish_reason == "error"
    assert "adapter_config.json does not exist" in str(gone.error)
    assert there.outputs[0].finish_reason == "length"


def test_an_engine_without_adapters(tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make("Llama"), tmp_path / "base")
    with LLM(str(folder), **{**OPTIONS, "enable_lora": False}) as llm, pytest.raises(InputError, match="enable_lora"):
        llm.generate(PROMPT, ASK, lora_request=LoRARequest("a", 1, str(simple(tmp_path / "a"))), use_tqdm=False)


def test_only_some_modules_take_adapters(tmp_path: Path) -> None:
    folder = checkpoints.save(checkpoints.make("Llama"), tmp_path / "base")
    refused = LoRARequest("a", 1, str(simple(tmp_path / "a")))
    message = "q_proj is no module of this model that takes adapters"
    with LLM(str(folder), **OPTIONS, lora_target_modules=["v_proj"]) as llm, pytest.raises(InputError, match=message):
        llm.generate(PROMPT, ASK, lora_request=refused, use_tqdm=False)
    with pytest.raises(ConfigError, match="no modules called nothing that take adapters"):
        LLM(str(folder), **OPTIONS, lora_target_modules=["nothing"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_loras": 0}, "max_loras must be >= 1"),
        ({"max_lora_rank": 1000}, re.escape("max_lora_rank must be in [1, 512]")),
        ({"max_loras": 4, "max_cpu_loras": 3}, "max_cpu_loras must be >= max_loras = 4"),
        ({"fully_sharded_loras": True}, "fully_sharded_loras is not supported"),
        ({"default_mm_loras": {}}, "default_mm_loras is not supported"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_flat(enable_lora=True, **options)


@pytest.mark.parametrize(
    "changes", [{"lora_int_id": 0}, {"lora_name": ""}, {"lora_path": ""}, {"tensorizer_config_dict": {}}]
)
def test_requests_that_cannot_be(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        LoRARequest(**{"lora_name": "a", "lora_int_id": 1, "lora_path": "/", **changes})


def test_every_key_of_the_library_is_known(tmp_path: Path) -> None:
    """One that it adds later is refused until somebody has looked at it."""
    peft = pytest.importorskip("peft")
    folder = simple(tmp_path)
    config = {key: value for key, value in peft.LoraConfig().to_dict().items() if isinstance(value, str | int | None)}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["q_proj"]}))
    assert PeftConfig.read(folder, 16).rank == 8
    assert adapters.ALL


SPELLED: dict[str, Callable[[str], str]] = {
    "peft's name": lambda name: name.replace(".weight", ".default.weight"),
    "compiled": lambda name: name.replace("base_model.model.", "base_model.model._orig_mod."),
    "checkpointed": lambda name: name.replace("self_attn.", "self_attn._checkpoint_wrapped_module."),
    "FSDP": lambda name: f"_fsdp_wrapped_module.{name}",
    "DDP": lambda name: f"module.{name}",
    "without peft's beginning": lambda name: name.removeprefix("base_model.model."),
    "with it twice": lambda name: f"base_model.model.{name}",
}


@pytest.mark.parametrize("how", SPELLED)
def test_names_as_other_tools_leave_them(how: str, tmp_path: Path) -> None:
    file = simple(tmp_path) / "adapter_model.safetensors"
    wanted, stored = read_tensors(file), load_file(file)
    save_file({SPELLED[how](name): tensor for name, tensor in stored.items()}, file)
    found = read_tensors(file)
    assert found.keys() == wanted.keys() == {Q}
    assert found[Q].keys() == {"lora_A", "lora_B"}
    assert all(torch.equal(tensor, wanted[Q][what]) for what, tensor in found[Q].items())
    save_file(stored | {f"module.{name}": tensor.clone() for name, tensor in stored.items()}, file)
    with pytest.raises(WeightsError, match=r"q_proj\.lora_A\.weight is there under another name too"):
        read_tensors(file)
