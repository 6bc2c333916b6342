"""LiteLLM as its users run it: a proxy with a file of models, in front of `quire serve`.

It has an environment of its own (`make test-gateways`); without it these tests are skipped. LITELLM names another.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.pooling import checkpoints
from tests.pooling.checkpoints import sentence_transformers
from tests.server.process import ROOT, server_process, status_of, wait_until

LITELLM = os.environ.get("LITELLM") or str(ROOT / ".venv-gateways" / "bin" / "litellm")
GATEWAY_KEY, QUIRE_KEY = "sk-the-key-of-the-gateway-0123456789", "the-key-behind-it"
OPTIONS = ["--port", "0", "--device", "cpu", "--dtype", "float32", "--api-key", QUIRE_KEY]


@dataclass
class Gateway:
    openai: openai.OpenAI
    claude: anthropic.Anthropic


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Streams of the generating server are full of comments: each step of the model is a silence."""
    if not Path(LITELLM).exists():
        pytest.skip("LiteLLM is not installed: make test-gateways")
    folder = tmp_path_factory.mktemp("gateway")
    checkpoints.make("BertModel", folder / "embedder")
    sentence_transformers(folder / "embedder", "Pooling", "Normalize", pooling_mode_cls_token=True)
    names = ["--served-model-name"]
    with (
        server_process("quire.cli.main", "serve", *OPTIONS, *names, "demo", "--keepalive-interval", "0.001") as demo,
        server_process("quire.cli.main", "serve", str(folder / "embedder"), *OPTIONS, *names, "tiny") as embedder,
    ):
        models = [
            model("hosted", "hosted_vllm/demo", demo.url),
            model("plain", "openai/demo", demo.url),
            model("claude", "anthropic/demo", demo.url.removesuffix("/v1")),
            model("embedder", "openai/tiny", embedder.url),
            model("wrong-key", "openai/demo", demo.url, "wrong"),
            model("wrong-name", "openai/nobody", demo.url),
        ]
        config = {
            "model_list": models,
            "general_settings": {"master_key": GATEWAY_KEY},
            "litellm_settings": {"num_retries": 0, "telemetry": False, "drop_params": False},
            "router_settings": {"disable_cooldowns": True, "num_retries": 0},
        }
        (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
        with running(folder, free_port()) as url:
            yield Gateway(
                openai.OpenAI(base_url=f"{url}/v1", api_key=GATEWAY_KEY, max_retries=0, timeout=120),
                anthropic.Anthropic(base_url=url, api_key=GATEWAY_KEY, max_retries=0, timeout=120),
            )


def model(name: str, target: str, url: str, key: str = QUIRE_KEY) -> dict[str, Any]:
    base = url if target.startswith("anthropic/") else f"{url}/v1"
    return {"model_name": name, "litellm_params": {"model": target, "api_base": base, "api_key": key}}


class running:  # noqa: N801 (a context manager)
    """The proxy, from when it answers."""

    def __init__(self, folder: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = (folder / "log.txt").open("w+")
        command = [LITELLM, "--config", str(folder / "config.yaml"), "--host", "127.0.0.1", "--port", str(port)]
        # Its table of prices comes with the package; otherwise it would look for a newer one outside.
        environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
        self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=self.log, stderr=subprocess.STDOUT)

    def __enter__(self) -> str:
        up = wait_until(
            lambda: status_of(f"{self.url}/health/liveliness") == 200 or self.process.poll() is not None, 180
        )
        if not up or self.process.poll() is not None:
            self.__exit__()
            raise RuntimeError(Path(self.log.name).read_text())
        return self.url

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
