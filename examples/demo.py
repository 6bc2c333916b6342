"""What `make demo` runs: the model that ships with Quire answers, token by token; then where the time went.

Start-up, one streamed answer, and a batch of 64 questions, on the GPU if there is one and else on the CPU.
"""

from __future__ import annotations

import asyncio
import time

from quire import AsyncLLM, EngineConfig, RequestOutputKind, SamplingParams
from quire.frontend.templates.chat import render

QUESTION = "Tell me a short story about a brave fox."
QUESTIONS = [
    "What is the capital of France?",
    "What is 27 + 58?",
    "Sort these words: pear apple fig",
    "Who are you?",
]
NEXT = """
What next
  .venv/bin/quire chat                      talk to this model; with a hub id or a folder behind it, to another
  .venv/bin/quire serve                     a server with the APIs of OpenAI and Anthropic at http://127.0.0.1:8000;
                                            see it work at http://127.0.0.1:8000/dashboard
  .venv/bin/quire top                       what that server does, from another terminal
  .venv/bin/quire doctor                    what this machine can run
  docs/first_hour.md                        the first hour, step by step"""


def prompt(llm: AsyncLLM, question: str) -> str:
    return render([{"role": "user", "content": question}], template=llm.chat_template)


async def stream(llm: AsyncLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=200, output_kind=RequestOutputKind.DELTA)
    began = time.perf_counter()
    first, count = 0.0, 0
    print(f"\n> {QUESTION}\n")
    async for output in llm.generate(prompt(llm, QUESTION), params, "story"):
        first = first or time.perf_counter()
        count += len(output.outputs[0].token_ids)
        print(output.outputs[0].text, end="", flush=True)
    rate = (count - 1) / (time.perf_counter() - first)
    print(f"\n\n{count} tokens: the first after {(first - began) * 1e3:.0f} ms, then {rate:,.0f} tokens/s")


async def batch(llm: AsyncLLM, size: int = 64) -> None:
    params = SamplingParams(temperature=0, max_tokens=64, output_kind=RequestOutputKind.FINAL_ONLY)

    async def one(i: int) -> int:
        async for output in llm.generate(prompt(llm, QUESTIONS[i % len(QUESTIONS)]), params, f"batch-{i}"):
            answers[i % len(QUESTIONS)] = output.outputs[0].text.strip()
        return len(output.outputs[0].token_ids)

    answers: dict[int, str] = {}
    began = time.perf_counter()
    total = sum(await asyncio.gather(*(one(i) for i in range(size))))
    seconds = time.perf_counter() - began
    print(f"\n{size} questions at once:")
    for i, question in enumerate(QUESTIONS):
        print(f"  {question}  →  {answers[i]}")
    print(f"{total} tokens in {seconds:.2f} s: {total / seconds:,.0f} tokens/s")


async def main() -> None:
    began = time.perf_counter()
    llm = await AsyncLLM.start(EngineConfig())
    report = llm.info.report
    print(f"started in {time.perf_counter() - began:.1f} s on {report.device}")
    try:
        await stream(llm)
        await batch(llm)
        print("\nwhere the time went")
        print("  start-up:   " + phases(report.phases))
        print("  engine loop: " + phases(llm.stats().phase_seconds))
        print(NEXT)
    finally:
        llm.shutdown()


def phases(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())


if __name__ == "__main__":
    asyncio.run(main())
