"""Offline work over a Ray cluster: prompts from files, answers into files, however many machines and whatever dies.

    from quire.ray import answer_files
    answer_files("prompts/*.parquet", "answers", model="Qwen/Qwen3-0.6B", replicas=8, num_gpus=1,
                 sampling_params=SamplingParams(max_tokens=256))

Rows are answered shard by shard. A shard's answers are one file, which appears whole or not at all and whose name says
which rows it holds: so a replica that dies loses a shard's work and no answer, a shard that is computed twice is there
once, and a run that was ended goes on with the shards that lack a file. `Generate` is the same for a pipeline of Ray
Data, whose own business all that is then. Ray is imported when it is needed.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quire.executor.ray import connect, import_ray
from quire.foundation.errors import ConfigError, InputError
from quire.foundation.log import get_logger
from quire.llm import LLM
from quire.types.output import RequestOutput
from quire.types.sampling import SamplingParams

_MANIFEST = "_quire.json"
_AHEAD = 2  # shards that a replica has at once
_log = get_logger(__name__)
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows [start, start + count) of a file. at: where they begin in it: a byte of lines, a row group of Parquet."""

    name: str
    path: str
    start: int
    count: int
    at: int
    skip: int = 0  # rows between `at` and the first


@dataclass(frozen=True, slots=True)
class Summary:
    rows: int
    shards: int
    skipped: int  # shards that an earlier run had answered
    failed_rows: int  # whose answer is an error


class Generate:
    """Rows in, the same rows with answers out: a stage of Ray Data.

    dataset.map_batches(Generate, fn_constructor_kwargs={"model": …}, concurrency=8, num_gpus=1, batch_size=512)
    """

    def __init__(
        self,
        *,
        prompt_column: str = "prompt",
        sampling_params: SamplingParams | None = None,
        **engine: Any,
    ) -> None:
        """engine: options of `LLM`. A column `messages` instead of the prompts holds conversations."""
        self._column, self._params = prompt_column, sampling_params
        self._llm = LLM(**engine)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """batch: columns of the same length, as Ray Data has them."""
        names = list(batch)
        rows = [dict(zip(names, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        answers = self.answer(rows)
        return (
            {**batch, **{name: [answer[name] for answer in answers] for name in answers[0]}} if answers else dict(batch)
        )

    def answer(self, rows: Sequence[Row]) -> list[Row]:
        """What each row's answer adds to it. A row that cannot run has an `error`."""
        answers: dict[int, Row] = {}
        prompts: dict[int, Any] = {}
        conversations: dict[int, Any] = {}
        for number, row in enumerate(rows):
            try:
                (conversations if self._has_messages(row) else prompts)[number] = self._asked(row)
            except InputError as error:
                answers[number] = _nothing(str(error))
        for run, asked in ((self._llm.generate, prompts), (self._llm.chat, conversations)):
            answers |= zip(asked, self._answers(run, [*asked.values()]), strict=True)
        return [answers[number] for number in range(len(rows))]

    def _has_messages(self, row: Row) -> bool:
        return row.get(self._column) is None and row.get("messages") is not None

    def _asked(self, row: Row) -> Any:
        """A prompt or a conversation, as `LLM` takes one among several. Raises InputError."""
        if self._has_messages(row):
            messages = row["messages"]
            if isinstance(messages, str | Mapping) or not hasattr(messages, "__iter__"):
                raise InputError(f"messages must be a list, got {type(messages).__name__}", "messages")
            return list(messages)
        prompt = row.get(self._column)
        if prompt is None:
            raise InputError(f"a row has no {self._column!r}; it has {', '.join(row)}", self._column)
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt, bytes | Mapping) or not hasattr(prompt, "__iter__"):
            raise InputError(f"{self._column} must be a string or token ids, got {type(prompt).__name__}", self._column)
        return {"prompt_token_ids": [*prompt]}

    def _answers(self, run: Callable[..., list[RequestOutput]], asked: list[Any]) -> list[Row]:
        """One by one, if one of them cannot run."""
        try:
            return [_told(output) for output in run(asked, self._params, use_tqdm=False)] if asked else []
        except InputError as error:
            if len(asked) == 1:
                return [_nothing(str(error))]
        return [answer for one in asked for answer in self._answers(run, [one])]


class Replica:
    """An actor: a model, and the shards that it is given."""

    def __init__(self, output: str, stage: dict[str, Any]) -> None:
        self._output = Path(output)
        self._generate = Generate(**stage)

    def answer(self, shard: Shard) -> tuple[int, int]:
        """Answer a shard. Returns its rows, and how many of them failed."""
        rows = read_shard(shard)
        if len(rows) != shard.count:
            raise ConfigError(f"{shard.path} has changed: {shard.count} rows were there, now {len(rows)}", "inputs")
        answers = self._generate.answer(rows)
        write_shard(self._output / shard.name, [{**row, **answer} for row, answer in zip(rows, answers, strict=True)])
        return len(rows), sum(answer["error"] is not None for answer in answers)

    def pid(self) -> int:
        return os.getpid()


def answer_files(
    inputs: str | Sequence[str],
    output: str,
    *,
    replicas: int = 1,
    rows_per_shard: int = 512,
    num_gpus: float = 0,
    num_cpus: float = 1,
    prompt_column: str = "prompt",
    sampling_params: SamplingParams | None = None,
    **engine: Any,
) -> Summary:
    """Answer every row of some files, each once.

    Args:
        inputs: .parquet and .jsonl files that every machine can read; patterns with `*` are allowed.
        output: folder that every machine can write to. What an earlier call left there is gone on with.
        replicas: models at once, each an actor.
        rows_per_shard: rows of one file of answers.
        num_gpus: of a replica.
        num_cpus: of a replica.
        prompt_column: column with the prompts; rows with `messages` instead are conversations.
        sampling_params: of all answers.
        **engine: options of `LLM`.

    Returns:
        What there is in the end.

    Raises:
        ConfigError: a file cannot be read, or the folder is of another call.
    """
    files = _found(inputs)
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    stage = {"prompt_column": prompt_column, "sampling_params": sampling_params, **engine}
    _check_manifest(folder, files, rows_per_shard, stage)
    shards = [shard for number, path in enumerate(files) for shard in shards_of(number, path, rows_per_shard)]
    left = [shard for shard in shards if not (folder / shard.name).exists()]
    rows = failed = 0
    if left:
        rows, failed = _run_on_ray(left, str(folder.absolute()), stage, replicas, num_gpus, num_cpus)
    done = sum(shard.count for shard in shards) - sum(shard.count for shard in left)
    return Summary(rows + done, len(shards), len(shards) - len(left), failed)


def _run_on_ray(
    shards: Sequence[Shard], output: str, stage: dict[str, Any], replicas: int, num_gpus: float, num_cpus: float
) -> tuple[int, int]:
    ray = import_ray()
    connect(ray)
    # A replica that dies is started again, and what it had is asked again.
    actor = ray.remote(num_gpus=num_gpus, num_cpus=num_cpus, max_restarts=-1, max_task_retries=-1)(Replica)
    workers = [actor.remote(output, stage) for _ in range(min(replicas, len(shards)))]
    waiting = iter(shards)
    running: dict[Any, Any] = {}
    rows = failed = 0

    def give(worker: Any) -> None:
        if (shard := next(waiting, None)) is not None:
            running[worker.answer.remote(shard)] = worker

    try:
        for _ in range(_AHEAD):
            for worker in workers:
                give(worker)
        while running:
            [done], _ = ray.wait(list(running), num_returns=1)
            worker = running.pop(done)
            give(worker)
            found = ray.get(done)
            rows, failed = rows + found[0], failed + found[1]
    finally:
        for worker in workers:
            ray.kill(worker)
    return rows, failed


# -- files -------------------------------------------------------------------------------------------------------


def _found(inputs: str | Sequence[str]) -> list[str]:
    found: list[str] = []
    for pattern in [inputs] if isinstance(inputs, str) else inputs:
        files = sorted(glob.glob(pattern))
        if not files:
            raise ConfigError(f"inputs: there is no file {pattern!r}", "inputs")
        found += [str(Path(file).absolute()) for file in files]
    for file in found:
        if not file.endswith((".parquet", ".jsonl")):
            raise ConfigError(f"inputs must be .parquet or .jsonl files, got {file!r}", "inputs")
    return found


def _check_manifest(folder: Path, files: Sequence[str], rows_per_shard: int, stage: dict[str, Any]) -> None:
    """What is in the folder must be answers to the same question."""
    asked = msgspec.to_builtins(
        {"files": [[file, os.path.getsize(file)] for file in files], "rows_per_shard": rows_per_shard, "stage": stage},
        enc_hook=repr,
    )
    path = folder / _MANIFEST
    if path.exists():
        before = json.loads(path.read_text())
        differs = [name for name in asked if before.get(name) != json.loads(json.dumps(asked))[name]]
        if differs:
            raise ConfigError(
                f"output: {folder} holds answers of a call with other {', '.join(differs)}; give another folder",
                "output",
            )
        return
    _write(path, json.dumps(asked).encode())


def shards_of(number: int, path: str, rows_per_shard: int) -> Iterator[Shard]:
    """number: of the file."""
    ending = path.rpartition(".")[2]

    def named(start: int, count: int, at: int, skip: int = 0) -> Shard:
        return Shard(f"part-{number:05d}-{start:012d}.{ending}", path, start, count, at, skip)

    if ending == "parquet":
        start = 0
        metadata = _parquet().ParquetFile(path).metadata
        for group in range(metadata.num_row_groups):
            rows = metadata.row_group(group).num_rows
            for skip in range(0, rows, rows_per_shard):
                yield named(start + skip, min(rows_per_shard, rows - skip), group, skip)
            start += rows
        return
    start = count = at = 0
    with open(path, "rb") as file:
        while line := file.readline():
            if not line.strip():
                continue
            if count == 0:
                at = file.tell() - len(line)
            count += 1
            if count == rows_per_shard:
                yield named(start, count, at)
                start, count = start + count, 0
    if count:
        yield named(start, count, at)


def read_shard(shard: Shard) -> list[Row]:
    """Raises ConfigError for a line that is no object."""
    if shard.path.endswith(".parquet"):
        table = _parquet().ParquetFile(shard.path).read_row_group(shard.at)
        rows: list[Row] = table.slice(shard.skip, shard.count).to_pylist()
        return rows
    rows = []
    with open(shard.path, "rb") as file:
        file.seek(shard.at)
        while len(rows) < shard.count and (line := file.readline()):
            if not line.strip():
                continue
            try:
                rows.append(msgspec.json.decode(line, type=dict))
            except msgspec.DecodeError as error:
                raise ConfigError(f"{shard.path}, row {shard.start + len(rows)}: {error}", "inputs") from None
    return rows


def write_shard(path: Path, rows: Sequence[Row]) -> None:
    """Whole or not at all."""
    if path.suffix == ".jsonl":
        _write(path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        return
    import pyarrow

    hidden = _hidden(path)
    _parquet().write_table(pyarrow.Table.from_pylist(list(rows)), hidden)
    os.replace(hidden, path)


def _write(path: Path, content: bytes) -> None:
    hidden = _hidden(path)
    with open(hidden, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(hidden, path)


def _hidden(path: Path) -> Path:
    """Of this process; what a dead one left there is nobody's."""
    with contextlib.suppress(OSError):
        for old in path.parent.glob(f".{path.name}.*"):
            old.unlink()
    return path.with_name(f".{path.name}.{os.uname().nodename}-{os.getpid()}")


def _parquet() -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise ConfigError(
            "pyarrow is not installed: pip install 'quire[ray]'", "inputs", code="missing-package"
        ) from None
    return parquet


# -- rows --------------------------------------------------------------------------------------------------------


def _told(output: RequestOutput) -> Row:
    if output.error is not None:
        return _nothing(output.error)
    answers = output.outputs
    return {
        "answer": answers[0].text if len(answers) == 1 else [answer.text for answer in answers],
        "finish_reason": answers[0].finish_reason,
        "num_prompt_tokens": output.num_prompt_tokens,
        "num_answer_tokens": sum(len(answer.token_ids) for answer in answers),
        "error": None,
    }


def _nothing(error: str) -> Row:
    return {"answer": None, "finish_reason": "error", "num_prompt_tokens": 0, "num_answer_tokens": 0, "error": error}
