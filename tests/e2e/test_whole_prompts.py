"""Steps of whole prompts have graphs of their own where a kernel attends to them in another form than to chunks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.worker.mixed_graphs import WHOLE_TOKENS, MixedGraphs, MixedSize, mixed_sizes, with_twins
from tests.e2e.test_compiled_ahead import LATENT


def test_few_sizes_more_than_without() -> None:
    """Every number of tokens has a size for whole prompts once it has room for some, and every other one for any."""
    usual = mixed_sizes(256, 4096, 10**9, 28)
    sizes = with_twins(usual, prefixes=False, adapters=False, whole=True)
    roomy = [size for size in usual if size.tokens - size.decodes >= WHOLE_TOKENS]
    assert sum(size.whole for size in sizes) == len(roomy)
    assert {size for size in sizes if not size.whole} <= set(usual)
    assert sorted({size.tokens for size in sizes if not size.whole}, reverse=True)[:2] == [2048, 1024]
    assert [size.tokens for size in sizes] == sorted((size.tokens for size in sizes), reverse=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no such GPU")
def test_graphs_say_what_python_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt, several that leave rows empty, and prompts that go on behind what is cached of them."""
    config: dict[str, Any] = {**LATENT, "num_hidden_layers": 2, "first_k_dense_replace": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    replayed: list[MixedSize] = []
    forward = MixedGraphs.forward

    def noted(self: MixedGraphs, size: MixedSize) -> None:
        replayed.append(size)
        forward(self, size)

    monkeypatch.setattr(MixedGraphs, "forward", noted)
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(1, config["vocab_size"]) for _ in range(length)]

    first, others = prompt(700), [prompt(length) for length in (300, 17, 350)]
    rounds = [([first], True), (others, True), ([[*first, *prompt(600)]], False)]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False, logprobs=1)
    memory = {"kv_cache_memory_bytes": 2**28}  # whatever tests beside this one hold
    found: list[list[list[float]]] = []
    for eager in (False, True):
        used: dict[str, Any] = {"max_num_seqs": 32, "enforce_eager": eager, "load_format": "dummy", **memory}
        with LLM(str(tmp_path), max_model_len=2048, skip_tokenizer_init=True, **used) as llm:
            answers = []
            for prompts, is_whole in rounds:
                replayed.clear()
                wanted = [{"prompt_token_ids": ids} for ids in prompts]
                outputs = llm.generate(wanted, params, use_tqdm=False)
                assert eager or {size.whole for size in replayed} == {is_whole}
                for output in outputs:
                    answer = output.outputs[0]
                    assert answer.logprobs is not None
                    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
                    answers.append([one[token].logprob for token, one in pairs])
        found.append(answers)
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(found[1]), atol=0.05, rtol=0)
