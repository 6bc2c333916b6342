"""Statistics as lines of JSON, appended to the file that STATS_FILE names."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from quire.observe.stat_logger import StatLogger, StatLoggerSetup
from quire.types.output import EngineStats


class JsonLines(StatLogger):
    interval = 5.0  # seconds

    def __init__(self, setup: StatLoggerSetup) -> None:
        super().__init__(setup)
        self._file = Path(os.environ.get("STATS_FILE", "quire-stats.jsonl")).open("a", buffering=1)  # noqa: SIM115

    def record(self, stats: EngineStats) -> None:
        line = {
            "time": time.time(),
            "model": self.setup.model_name,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "prompt_tokens": stats.prompt_tokens,
            "generation_tokens": stats.generation_tokens,
            "kv_usage": stats.kv_usage,
        }
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        self._file.close()
