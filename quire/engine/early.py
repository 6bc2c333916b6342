"""A core's process that is begun before it is known what for: it imports what workers need, and brings the GPU's driver
up, while its parent imports a server and reads the model's files."""

from __future__ import annotations

from collections.abc import Mapping

from quire.config.engine import EngineConfig
from quire.engine.messages import FromCore
from quire.foundation.child import Child

MODULE, TITLE = "quire.engine.process", "engine core process"
_begun: list[Child[FromCore]] = []


def begin(config: EngineConfig) -> None:
    """Begin the next core that this process starts, if it will have a worker inside and no variables of its own. If
    none is started, it ends with this process."""
    runtime, backend = config.runtime, config.runtime.distributed_executor_backend
    is_inside = backend == "uni" or (backend == "auto" and runtime.num_ranks == 1)
    if is_inside and runtime.data_parallel_size == 1 and not config.model.trust_remote_code and not _begun:
        arguments = ["torch", "gpu"] if runtime.device in ("auto", "cuda") else ["torch"]
        _begun.append(Child(MODULE, FromCore, TITLE, arguments=arguments))


def take(title: str, environment: Mapping[str, str]) -> Child[FromCore]:
    """The one that was begun, if it may be this one; else another."""
    if _begun and not environment:
        return _begun.pop()
    return Child(MODULE, FromCore, title, env=environment)
