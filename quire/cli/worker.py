"""quire worker: one rank of an engine whose core waits at QUIRE_MASTER."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from quire.cli import options
from quire.config.worker import WorkerConfig
from quire.foundation.errors import QuireError
from quire.foundation.log import get_logger, setup

_AGAIN_SECONDS = 0.5
_RANKS = ("RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX", "LWS_WORKER_INDEX")
_DEVICES = ("LOCAL_RANK", "SLURM_LOCALID")
log = get_logger(__name__)


def run(arguments: Sequence[str]) -> int:
    values = options.parse(
        "worker",
        "Be one rank of an engine on several machines (--distributed-executor-backend external). QUIRE_MASTER is "
        "HOST:PORT of its core, QUIRE_CLUSTER_KEY the secret that both know.",
        arguments,
        (WorkerConfig,),
    )
    config = options.section_of(WorkerConfig, values)
    setup(config.log_level)
    from quire.executor.external import cluster_key, knock, master_address

    host, port = master_address()
    cluster_key()
    rank = _number(config.rank, _RANKS)
    device = _number(config.device, _DEVICES)
    began = time.monotonic()
    while True:
        try:
            answer = knock(rank)
        except OSError as error:
            if time.monotonic() - began > config.wait_seconds:
                raise QuireError(f"no core at {host}:{port} for {config.wait_seconds:.0f} s: {error}") from None
            time.sleep(_AGAIN_SECONDS)
            continue
        log.info("rank %d joins %s:%d", answer.rank, host, port)
        code = _serve(answer.invitation, device)
        log.info("rank %d has ended with %d; waiting for another core", answer.rank, code)
        began = time.monotonic()


def _serve(invitation: str, device: int) -> int:
    """A rank's life is a process: what it leaves of a device cannot be used again."""
    command = [sys.executable, "-P", "-m", "quire.executor.guest", str(device)]
    # torchrun's agent keeps a store of its own, where ranks of ours would look for theirs.
    env = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    env["PYTHONPATH"] = os.pathsep.join(p or os.getcwd() for p in sys.path)
    done = subprocess.run(command, input=invitation, text=True, check=False, env=env)
    return done.returncode


def _number(given: int | None, names: Sequence[str]) -> int:
    if given is not None:
        return given
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), -1)
