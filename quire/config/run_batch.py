"""`quire run-batch`."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.options import Options


@dataclass(frozen=True, kw_only=True)
class RunBatchConfig(Options):
    input_file: str = ""
    """File (-i) with a request a line: {"custom_id", "method": "POST", "url", "body"}."""
    output_file: str = ""
    """File (-o) for the results, a line each. Lines that it holds a result of are not asked again."""
