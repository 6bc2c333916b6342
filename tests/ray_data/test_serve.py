"""examples/ray_serve.py on a Ray Serve of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

pytest.importorskip("ray.serve", exc_type=ImportError)
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    import ray
    from ray import serve

    from examples.ray_serve import deployment

    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level=40)
    serve.start(http_options={"host": "127.0.0.1", "port": 18437})
    serve.run(deployment({"device": "cpu"}), name="quire", route_prefix="/")
    yield "http://127.0.0.1:18437"
    serve.shutdown()  # type: ignore[no-untyped-call]
    ray.shutdown()


def test_its_routes_are_those_of_a_server(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    [model] = [model.id for model in client.models.list()]
    asked: Any = {"model": model, "prompt": "One two", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**asked).choices[0].text
    parts = [event.choices[0].text for event in client.completions.create(**asked, stream=True)]
    assert "".join(parts) == whole != ""
    assert httpx.get(f"{url}/readyz").status_code == 200
    assert "vllm:generation_tokens_total" in httpx.get(f"{url}/metrics").text
