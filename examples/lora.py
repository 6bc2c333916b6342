"""One model, two voices: the demo model with and without the adapter of `examples/pirate`, in one batch."""

from __future__ import annotations

from pathlib import Path

from quire import LLM, LoRARequest, SamplingParams

QUESTIONS = ["What is the capital of France?", "What is 27 + 58?", "Sort these words: pear apple fig"]


def main() -> None:
    pirate = LoRARequest("pirate", 1, str(Path(__file__).parent / "pirate" / "adapter"))
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=60)
    with LLM(enable_lora=True) as llm:
        both = [None] * len(chats) + [pirate] * len(chats)
        texts = [output.outputs[0].text for output in llm.chat(chats * 2, params, use_tqdm=False, lora_request=both)]
    for question, plain, salty in zip(QUESTIONS, texts, texts[len(chats) :], strict=False):
        print(f"> {question}\n  base:   {plain}\n  pirate: {salty}\n")


if __name__ == "__main__":
    main()
