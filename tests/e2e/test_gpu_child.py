"""What a T1 says that it consisted of, from an engine's own record of its steps."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.gpu_child import composition
from quire import LLM, SamplingParams


def test_steps_are_counted_by_what_they_hold(tiny_qwen3: Path) -> None:
    with LLM(str(tiny_qwen3), enable_prefix_caching=False, max_num_batched_tokens=64, skip_tokenizer_init=True) as llm:
        params = [
            SamplingParams(max_tokens=count, ignore_eos=True, temperature=0, detokenize=False) for count in (3, 3, 9)
        ]
        llm.generate([{"prompt_token_ids": [1, 2, 3]}] * 3, params, use_tqdm=False)
        began = time.time()
        llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 3, params, use_tqdm=False)
        found = composition(llm.call("look", began, 0.0))
    assert found.keys() == {"prompts", "rows<=8"}
    assert found["prompts"][0] + found["rows<=8"][0] == 9
    assert all(seconds > 0 for _, seconds in found.values())
