"""`quire worker`."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.options import Options


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(Options):
    rank: int | None = None
    """Its number; None: what RANK, SLURM_PROCID or a pod's index says, else whichever is free."""
    device: int | None = None
    """GPU of this machine; None: what LOCAL_RANK or SLURM_LOCALID says, else the one of its number."""
    wait_seconds: float = 600.0
    """Seconds to wait for a core, at first and after one has gone."""
    log_level: str = "info"
    """How much is logged."""
