"""`quire worker`."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.options import NotNegative, Options, Seconds


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(Options):
    rank: NotNegative | None = None
    """Its number; None: what RANK, SLURM_PROCID or a pod's index says, else whichever is free."""
    device: NotNegative | None = None
    """GPU of this machine; None: what LOCAL_RANK or SLURM_LOCALID says, else the one of its number."""
    wait_seconds: Seconds = 600.0
    """Seconds to wait for a core, at first and after one has gone."""
    log_level: str = "info"
    """How much is logged."""
