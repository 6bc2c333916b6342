"""Offline generation: text, chat, one prompt answered four times, and the most likely continuations.

python examples/offline.py [MODEL]        without MODEL: the demo model that ships with Quire
"""

from __future__ import annotations

import sys

from quire import LLM, BeamSearchParams, SamplingParams


def main() -> None:
    with LLM(*sys.argv[1:2]) as llm:
        questions = ["What is the capital of Peru?", "What is 123 + 456?", "Sort these words: pear apple fig"]
        chats = [[{"role": "user", "content": question}] for question in questions]
        for question, output in zip(
            questions, llm.chat(chats, SamplingParams(temperature=0, max_tokens=64)), strict=True
        ):
            print(f"{question}  →  {output.outputs[0].text.strip()}")

        several = SamplingParams(n=4, temperature=0.9, seed=1, max_tokens=24)
        for answer in llm.chat([{"role": "user", "content": "Tell me a story about an owl."}], several)[0].outputs:
            print(f"[{answer.index}] {answer.text.strip()!r}")

        beams = llm.beam_search(["The capital of France is"], BeamSearchParams(beam_width=3, max_tokens=8))
        for sequence in beams[0].sequences:
            print(f"{sequence.cum_logprob:7.2f}  {sequence.text!r}")


if __name__ == "__main__":
    main()
