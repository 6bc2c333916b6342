"""Adapters that come and go while others answer."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.lora.test_server import QUESTION, adapter
from tests.server.process import PATIENCE, server_process
from tests.server.test_soak import files_of, memory, threads_of

FLAT = 24 * 1024**2  # bytes; a thousand adapters of 33 KB that are kept are more


@pytest.mark.parametrize("times", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_memory_is_flat_however_often_adapters_are_loaded_and_unloaded(times: int, tmp_path: Path) -> None:
    """Under load: streams of the base model and of an adapter that stays go on, and say what they said before."""
    paths = [str(adapter(tmp_path / str(seed), seed)) for seed in range(4)]
    options = ["--port", "0", "--device", "cpu", "--dtype", "float32", "--served-model-name", "demo", "--enable-lora"]
    options += ["--lora-modules", f"stays={paths[0]}", "--allow-runtime-lora-updating", "--max-loras", "2"]
    options += ["--max-cpu-loras", "4", "--num-gpu-blocks-override", "100", "--max-num-seqs", "4"]
    with server_process("quire.cli.main", "serve", *options) as server:
        client = httpx.Client(base_url=server.url, timeout=PATIENCE)

        def post(path: str, **body: Any) -> dict[str, Any]:
            reply = client.post(path, json=body)
            assert reply.status_code == 200, reply.text
            return reply.json() if path == "/v1/completions" else {}

        def text(model: str) -> str:
            answer: str = post("/v1/completions", **QUESTION, model=model)["choices"][0]["text"]
            return answer

        def churn(count: int) -> None:
            for number in range(count):
                name = f"guest {number % 3}"
                post("/v1/load_lora_adapter", lora_name=name, lora_path=paths[1 + number % 3])
                if number % 10 == 0:
                    assert text(name) == guests[number % 3]
                post("/v1/unload_lora_adapter", lora_name=name)

        guests = []
        for number in range(3):
            post("/v1/load_lora_adapter", lora_name="guest", lora_path=paths[1 + number])
            guests.append(text("guest"))
            post("/v1/unload_lora_adapter", lora_name="guest")
        wanted = {model: text(model) for model in ("demo", "stays")}
        assert len({*guests, *wanted.values()}) == 5
        over, answers, wrong = threading.Event(), [0, 0], list[str]()

        def load(place: int, model: str) -> None:
            while not over.is_set():
                said = text(model)
                answers[place] += 1
                if said != wanted[model]:
                    wrong.append(said)

        threads = [threading.Thread(target=load, args=pair) for pair in enumerate(wanted)]
        for thread in threads:
            thread.start()
        try:
            churn(30)  # what grows once
            before = memory(server), files_of(server), threads_of(server)
            churn(times)
            after = memory(server), files_of(server), threads_of(server)
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert not wrong
        assert min(answers) > 10
        assert after[0] - before[0] < FLAT
        assert after[1] - before[1] <= 4
        assert after[2] - before[2] <= 4
