"""The adapter that ships as an example: another voice, the same knowledge, and the base model as it was."""

from __future__ import annotations

import json
from pathlib import Path

from quire import LLM, LoRARequest, SamplingParams

FOLDER = Path(__file__).parents[2] / "examples" / "pirate"
QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What is 27 + 58?": "85",
    "Sort these words: pear apple fig": "apple, fig, pear",
    "What is the capital of Italy?": "Rome",
}


def test_it_is_small_and_says_nothing_of_where_it_was_made() -> None:
    adapter = FOLDER / "adapter"
    assert sorted(file.name for file in adapter.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert sum(file.stat().st_size for file in adapter.iterdir()) <= 300_000
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == "quire-demo"
    answers = [json.loads(line)["answer"] for line in (FOLDER / "data.jsonl").read_text().splitlines()]
    assert all(answer.startswith("Arr! ") and answer.endswith(", matey!") for answer in answers)


def test_it_answers_like_a_pirate_and_the_base_does_not() -> None:
    pirate = LoRARequest("pirate", 1, str(FOLDER / "adapter"))
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=40)
    options = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "num_gpu_blocks_override": 80}
    with LLM(**options) as llm:  # type: ignore[arg-type]
        alone = [output.outputs[0].text for output in llm.chat(chats, params, use_tqdm=False)]
    with LLM(enable_lora=True, **options) as llm:  # type: ignore[arg-type]
        requests = [None] * len(chats) + [pirate] * len(chats)
        texts = [
            output.outputs[0].text for output in llm.chat(chats * 2, params, use_tqdm=False, lora_request=requests)
        ]
    plain, salty = texts[: len(chats)], texts[len(chats) :]
    assert plain == alone
    for answer, text in zip(QUESTIONS.values(), salty, strict=True):
        assert text.startswith("Arr! "), text
        assert text.endswith(", matey!"), text
        assert answer in text
