"""The batches of a server, one after another, oldest first, in the background."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

from starlette.types import ASGIApp

from quire.foundation.errors import ConfigError, EngineDeadError, InputError
from quire.foundation.log import get_logger
from quire.server.batches.journal import Journal
from quire.server.batches.lines import LineRunner, ServerGoneError, count_lines
from quire.server.batches.store import BatchJob, BatchStore, LineCounts, default_folder, now
from quire.server.http.errors import ApiError
from quire.server.service import Service

log = get_logger(__name__)

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


class BatchQueue:
    """Nothing touches the disk before the first file comes, unless files are there already."""

    def __init__(self, service: Service, app: ASGIApp) -> None:
        folder = service.serve.batch_dir
        self._folder = default_folder() if folder is None else Path(folder).expanduser()
        self._service = service
        self._app = app
        self._store: BatchStore | None = None
        self._waiting: list[BatchJob] = []
        self._task: asyncio.Task[None] | None = None
        self._current: tuple[BatchJob, Journal, asyncio.Task[None]] | None = None
        self._is_stopped = False

    def resume(self) -> None:
        """Go on with what an earlier server left. Raises ConfigError if the directory of the options cannot be used."""
        if not self._folder.exists() and self._service.serve.batch_dir is None:
            return
        try:
            self._open()
        except ConfigError as error:
            if self._service.serve.batch_dir is not None:
                raise
            log.warning("no batches here: %s", error)

    def store(self) -> BatchStore:
        """Raises ApiError 503 if there is no directory for files."""
        try:
            return self._open()
        except ConfigError as error:
            raise ApiError(503, f"this server cannot keep files: {error}") from None

    async def create(
        self, endpoint: str, input_file_id: str, completion_window: str, metadata: dict[str, str] | None
    ) -> BatchJob:
        """Raises InputError for an input file that is none, or too long, ApiError 507 if the disk is full."""
        store = self.store()
        file = store.files.get(input_file_id)
        if file is None or file.purpose != "batch":
            what = "does not exist" if file is None else f"has the purpose {file.purpose!r}, not 'batch'"
            raise InputError(f"the file {input_file_id[:80]!r} {what}", "input_file_id")
        total, most = await asyncio.to_thread(count_lines, store.data(file.id)), self._service.serve.max_batch_lines
        if not 1 <= total <= most:
            raise InputError(
                f"the input file must hold 1 to {most} requests, one a line (option max_batch_lines); it holds {total}",
                "input_file_id",
            )
        batch = BatchJob(
            id=f"batch_{secrets.token_hex(12)}",
            endpoint=endpoint,
            model=self._service.names[0],
            input_file_id=file.id,
            completion_window=completion_window,
            created_at=now(),
            request_counts=LineCounts(total),
            metadata=metadata,
        )
        try:
            store.save(batch)
        except OSError as error:
            raise ApiError(507, f"the batch cannot be kept: {error.strerror}") from None
        self._enqueue(batch)
        return batch

    def get(self, batch_id: str) -> BatchJob:
        """With the counts of this moment. Raises ApiError 404."""
        batch = self.store().batches.get(batch_id)
        if batch is None:
            raise ApiError(404, f"there is no batch with the id {batch_id[:256]!r}", "batch_id")
        if self._current is not None and self._current[0] is batch:
            self._count(batch, self._current[1])
        return batch

    def cancel(self, batch: BatchJob) -> None:
        """Requests that run are aborted; answers that are there stay. Raises InputError if it is over already.

        On a full disk too, which only the next server could miss.
        """
        if batch.is_final or batch.status == "finalizing":
            raise InputError(f"the batch is {batch.status} and cannot be cancelled", "batch_id")
        if batch.status == "cancelling":
            return
        batch.become("cancelling")
        self._try_to_save(batch)
        if self._current is not None and self._current[0] is batch:
            self._current[2].cancel()
        elif batch not in self._waiting:  # of another model's server
            self._enqueue(batch)

    def uses(self, file_id: str) -> bool:
        """Whether a batch that is not over reads the file."""
        return any(batch.input_file_id == file_id for batch in self.store().unfinished())

    async def stop(self) -> None:
        """Leave the rest to the next server."""
        self._is_stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        if self._store is not None:
            self._store.close()

    def _open(self) -> BatchStore:
        if self._is_stopped:
            raise ApiError(503, "the server is shutting down")
        if self._store is None:
            self._store = BatchStore(self._folder)
            for batch in self._store.unfinished():
                if batch.model in self._service.names or batch.status == "cancelling":
                    log.info("going on with %s", batch.id)
                    self._enqueue(batch)
                else:
                    log.warning("%s waits for a server of the model %s", batch.id, batch.model)
        return self._store

    def _enqueue(self, batch: BatchJob) -> None:
        self._waiting.append(batch)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work(), name="quire-batches")

    async def _work(self) -> None:
        while self._waiting:
            batch = self._waiting[0]
            try:
                await self._run(batch)
            except (ServerGoneError, EngineDeadError):
                return
            except Exception as error:
                log.exception("%s cannot be finished", batch.id)
                self._fail(batch, error)
            self._waiting.remove(batch)

    async def _run(self, batch: BatchJob) -> None:
        """From where it stands to its end, or until the server stops."""
        store = self.store()
        answers, failures = map(store.data, batch.result_ids)
        journal = await asyncio.to_thread(Journal, answers, failures)
        try:
            if batch.status not in ("cancelling", "finalizing"):
                if batch.in_progress_at is None:
                    batch.become("in_progress")
                    store.save(batch)
                width = max(1, self._service.running().info.resolved.max_num_seqs // 2)  # seats stay free for others
                lines = LineRunner(self._app, self._service, (batch.endpoint,), width)
                task = asyncio.create_task(lines.run(store.data(batch.input_file_id), journal))
                self._current = batch, journal, task
                try:
                    await task
                except asyncio.CancelledError:
                    if batch.status != "cancelling" or self._is_stopped:
                        task.cancel()
                        await asyncio.wait((task,))
                        raise
                finally:
                    self._current = None
        finally:
            await asyncio.shield(asyncio.to_thread(journal.close))
        self._count(batch, journal)
        if batch.status != "cancelling":
            batch.become("finalizing")
            store.save(batch)
        self._publish(batch)
        batch.become("cancelled" if batch.status == "cancelling" else "completed")
        store.save(batch)
        log.info(
            "%s is %s: %d answers, %d failures", batch.id, batch.status, journal.counts.completed, journal.counts.failed
        )

    def _publish(self, batch: BatchJob) -> None:
        """Turn the results into files. Nothing happens the second time."""
        store = self.store()
        for name, file_id in zip(("output", "error"), batch.result_ids, strict=True):
            path = store.data(file_id)
            if path.exists() and path.stat().st_size:
                if file_id not in store.files:
                    store.publish(file_id, f"{batch.id}_{name}.jsonl", "batch_output")
                setattr(batch, f"{name}_file_id", file_id)
            else:
                path.unlink(missing_ok=True)

    def _fail(self, batch: BatchJob, error: Exception) -> None:
        """What is there stays there."""
        problem = {"code": type(error).__name__, "message": str(error), "param": None, "line": None}
        batch.errors = {"object": "list", "data": [problem]}
        batch.become("failed")
        try:
            self._publish(batch)
        except OSError as worse:
            log.error("the results of %s cannot be published: %s", batch.id, worse)
        self._try_to_save(batch)

    def _try_to_save(self, batch: BatchJob) -> None:
        try:
            self.store().save(batch)
        except OSError as error:
            log.error("%s is %s, which cannot be saved: %s", batch.id, batch.status, error)

    @staticmethod
    def _count(batch: BatchJob, journal: Journal) -> None:
        counts = journal.counts
        batch.request_counts = LineCounts(batch.request_counts.total, counts.completed, counts.failed)
