"""Adapters as models of a server: named, loaded and unloaded as it runs, and there again after its engine's death."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from quire import LLM, LoRARequest
from quire.config.engine import EngineConfig
from quire.config.serve import ServeConfig
from quire.foundation.errors import ConfigError
from tests.lora.adapters import simple, write
from tests.server.process import PATIENCE, ServerProcess, server_process

QUESTION = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def adapter(folder: Path, seed: int) -> Path:
    """For the demo model: it says something else, whatever it is asked."""
    made = torch.Generator().manual_seed(seed)
    layers = [f"model.layers.{number}.self_attn.o_proj" for number in range(8)]
    tensors = {f"{layer}.lora_A": torch.randn(2, 256, generator=made) * 0.4 for layer in layers}
    tensors |= {f"{layer}.lora_B": torch.randn(256, 2, generator=made) * 0.4 for layer in layers}
    return write(folder, tensors, target_modules=["o_proj"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("first", "kept/found", "later", "other")):
        adapter(root / name, seed)
    simple(root / "wide", hidden=128)
    return root


@pytest.fixture(scope="module")
def server(folders: Path) -> Iterator[ServerProcess]:
    options = ["--port", "0", "--device", "cpu", "--dtype", "float32", "--served-model-name", "demo", "--enable-lora"]
    options += ["--lora-modules", f"first={folders / 'first'}", "--lora-resolver-dir", str(folders / "kept")]
    options += ["--allow-runtime-lora-updating", "--num-gpu-blocks-override", "100", "--max-num-seqs", "4"]
    with server_process("quire.cli.main", "serve", *options) as process:
        assert process.url
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as made:
        yield made


def answer(client: httpx.Client, model: str, **fields: Any) -> str:
    reply = client.post("/v1/completions", json={**QUESTION, "model": model, **fields})
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == model
    text: str = reply.json()["choices"][0]["text"]
    return text


def test_an_adapter_is_a_model(client: httpx.Client, folders: Path) -> None:
    cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    assert cards["first"]["parent"] == "demo"
    assert cards["first"]["root"] == str(folders / "first")
    assert cards["first"]["max_model_len"] is None
    assert cards["demo"]["parent"] is None
    assert client.get("/v1/models/first").json()["id"] == "first"
    assert answer(client, "first") != answer(client, "demo")
    chat = {"model": "first", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
    for path in ("/v1/chat/completions", "/v1/messages"):
        reply = client.post(path, json=chat)
        assert reply.status_code == 200, reply.text
        assert reply.json()["model"] == "first"
    responses = client.post("/v1/responses", json={"model": "first", "input": "Hello", "max_output_tokens": 16})
    assert responses.json()["model"] == "first"
    metrics = client.get("/metrics").text
    assert 'vllm:lora_requests_info{max_lora="1"' in metrics


def test_a_name_that_nobody_has(client: httpx.Client) -> None:
    for name in ("nobody", "../first", "later"):
        reply = client.post("/v1/completions", json={**QUESTION, "model": name})
        assert reply.status_code == 404
        assert reply.json()["error"]["type"] == "NotFoundError"
        assert "Served: demo, first" in reply.json()["error"]["message"]


def test_one_in_the_folder_is_found_when_it_is_named(client: httpx.Client) -> None:
    assert "found" not in [card["id"] for card in client.get("/v1/models").json()["data"]]
    assert answer(client, "found") not in (answer(client, "demo"), answer(client, "first"))
    assert "found" in [card["id"] for card in client.get("/v1/models").json()["data"]]


def test_load_and_unload(client: httpx.Client, folders: Path) -> None:
    def load(**fields: Any) -> httpx.Response:
        return client.post("/v1/load_lora_adapter", json=fields)

    def unload(**fields: Any) -> httpx.Response:
        return client.post("/v1/unload_lora_adapter", json=fields)

    done = load(lora_name="later", lora_path=str(folders / "later"))
    assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'later' added successfully.")
    before = answer(client, "later")
    again = load(lora_name="later", lora_path=str(folders / "other"))
    assert again.status_code == 400
    assert again.json()["error"]["type"] == "InvalidUserInput"
    assert load(lora_name="later", lora_path=str(folders / "other"), load_inplace=True).status_code == 200
    assert answer(client, "later") != before, "neither weights nor cached prefixes are those of before"
    for fields, status, message in (
        ({"lora_name": "x"}, 400, "must be provided"),
        ({"lora_name": "demo", "lora_path": str(folders / "later")}, 400, "the base model"),
        ({"lora_name": "x", "lora_path": str(folders / "nowhere")}, 404, "does not exist"),
        ({"lora_name": "x", "lora_path": str(folders / "wide")}, 400, "the adapter's rank need [2, 256]"),
    ):
        reply = load(**fields)
        assert reply.status_code == status, reply.text
        assert message in reply.json()["error"]["message"]
    assert unload(lora_name="x").status_code == 404
    assert unload(lora_name="later", lora_int_id=999).status_code == 404
    assert unload(lora_name="later").text == "Success: LoRA adapter 'later' removed successfully."
    assert client.post("/v1/completions", json={**QUESTION, "model": "later"}).status_code == 404


def test_several_that_are_loaded_at_once_stay_apart(client: httpx.Client, folders: Path) -> None:
    """Each has an id of its own: the one that is unloaded goes, and no other."""
    names = [f"at once {number}" for number in range(4)]
    bodies = [{"lora_name": name, "lora_path": str(folders / "other")} for name in names]
    with ThreadPoolExecutor(len(names)) as pool:
        replies = list(pool.map(lambda body: client.post("/v1/load_lora_adapter", json=body), bodies))
    assert [reply.status_code for reply in replies] == [200] * len(names)
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": names[3]}).status_code == 200
    left = {card["id"] for card in client.get("/v1/models").json()["data"]} & set(names)
    assert left == set(names[:3])


def test_loaded_adapters_outlive_the_engine(server: ServerProcess, client: httpx.Client, folders: Path) -> None:
    load = {"lora_name": "stays", "lora_path": str(folders / "other")}
    assert client.post("/v1/load_lora_adapter", json=load).status_code == 200
    before = answer(client, "stays")
    children = psutil.Process(server.process.pid).children(recursive=True)
    [core] = [child for child in children if "quire.engine.process" in child.cmdline()]
    core.send_signal(signal.SIGKILL)
    assert answer(client, "stays") == before
    assert answer(client, "demo") != before


@pytest.mark.parametrize("given", ["first", "=path", "name=", '{"name": "x"}', '{"name": 3, "path": "y"}'])
def test_modules_that_are_none(given: str) -> None:
    with pytest.raises(ConfigError, match="lora_modules"):
        ServeConfig(lora_modules=[given]).modules()


def test_modules_as_json() -> None:
    [module] = ServeConfig(lora_modules=['{"name": "a", "path": "/b", "base_model_name": "c"}']).modules()
    assert (module.name, module.path, module.base_model_name) == ("a", "/b", "c")


def test_options_that_need_others() -> None:
    with pytest.raises(ConfigError, match="lora_modules needs enable_lora"):
        ServeConfig(lora_modules=["a=b"]).check_adapters(EngineConfig())
    adapted = EngineConfig.from_flat(enable_lora=True)
    with pytest.raises(ConfigError, match="needs api_server_count=1"):
        ServeConfig(allow_runtime_lora_updating=True, api_server_count=2).check_adapters(adapted)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["a={0}/first", "a={0}/other"], "the name 'a' is taken"),
        (["quire-demo={0}/first"], "the name 'quire-demo' is taken"),
        (['{{"name": "a", "path": "{0}/first", "base_model_name": "other"}}'], "'a' is for 'other', and 'quire-demo'"),
        (["a={0}/nowhere"], "a: the adapter's folder .* does not exist"),
        (["a={0}/first", "b={0}/large"], "b: .*rank 64 is more than max_lora_rank=16"),
    ],
    ids=str,
)
def test_adapters_are_looked_at_before_a_model_is_loaded(modules: list[str], message: str, folders: Path) -> None:
    simple(folders / "large", r=64)
    serve = ServeConfig(lora_modules=[module.format(folders) for module in modules])
    with pytest.raises(ConfigError, match=f"lora_modules: {message}"):
        serve.check_adapters(EngineConfig.from_flat(enable_lora=True))


def test_a_folder_of_adapters_must_be_there(tmp_path: Path) -> None:
    serve = ServeConfig(lora_resolver_dir=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"lora_resolver_dir: '.*nowhere' is no folder"):
        serve.check_adapters(EngineConfig.from_flat(enable_lora=True))


def test_an_adapter_of_the_hub(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name, as a model; what is no such name is a folder."""
    import huggingface_hub

    asked: list[tuple[str, list[str]]] = []

    def fetch(name: str, *, allow_patterns: list[str], **_options: Any) -> str:
        asked.append((name, allow_patterns))
        return str(folders / "first")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    config = EngineConfig.from_flat(enable_lora=True)
    ServeConfig(lora_modules=["a=some/adapter", f"b={folders / 'other'}"]).check_adapters(config)
    assert asked == [("some/adapter", ["adapter_config.json", "adapter_model.safetensors"])]
    with LLM(device="cpu", enable_lora=True, max_model_len=64, num_gpu_blocks_override=8) as llm:
        assert llm.llm_engine.add_lora(LoRARequest("a", 1, "some/adapter"))
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="a: 'no/one' is neither a local folder nor anything that the hub"):
        ServeConfig(lora_modules=["a=no/one"]).check_adapters(config)
