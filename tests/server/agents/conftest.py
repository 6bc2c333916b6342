from __future__ import annotations

from collections.abc import Iterator

import anthropic
import openai
import pytest

from tests.server.agents.dictated_llm import DictatedLLM
from tests.server.conftest import Served, echo_server

MODEL = "scripted"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with echo_server(DictatedLLM(served_model_name=[MODEL])) as served:
        yield served


@pytest.fixture
def llm(served: Served) -> Iterator[DictatedLLM]:
    llm = served.llm
    assert isinstance(llm, DictatedLLM)
    yield llm
    llm.reset()


@pytest.fixture(scope="module")
def oai(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client
