"""Ranks as actors of a Ray cluster: one a rank, in a placement group, on as many machines as it takes.

Ray finds the machines and starts the processes; plans and results go over channels of ours. An actor that dies, or its
machine, cuts its lifeline, which is the end of all ranks: another engine gets a placement group of its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from quire.config.resolve import Resolved
from quire.executor.messages import FromWorker, ToWorker
from quire.executor.several_machines import SeveralMachines
from quire.foundation.errors import ConfigError, EngineDeadError
from quire.foundation.remote import Invitation, RemoteChild, RemoteParent

_ADDRESS = "RAY_ADDRESS"
_PLACE_SECONDS = 300.0  # for a placement group: a cluster may have to grow first
# A rank's kernels write into the memory of others of its machine: all of them see all its GPUs.
_ENVIRONMENT = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


class RayExecutor(SeveralMachines):
    """Joins the cluster at RAY_ADDRESS, or the one of this machine, or starts one here."""

    _group: Any = None
    _actors: Sequence[Any] = ()

    def _host(self) -> str:
        ray = import_ray()
        connect(ray)
        return str(ray.util.get_node_ip_address())

    def _invite(self, resolved: Resolved, children: Sequence[RemoteChild[FromWorker]]) -> None:
        ray = import_ray()
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        gpus = 1 if resolved.device.endswith("cuda") else 0
        bundle = {"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}
        # Ranks are best side by side; if no machine has room for all, as few machines as it takes.
        self._group = ray.util.placement_group([bundle] * len(children), strategy="PACK")
        if not self._group.wait(_PLACE_SECONDS):
            self._forget()
            raise EngineDeadError(
                f"the Ray cluster has no room for {len(children)} ranks of {bundle} within {_PLACE_SECONDS:.0f} s: it "
                f"has {ray.available_resources()}"
            )
        actor = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)(RankActor)
        self._actors = [
            actor.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
                runtime_env={"env_vars": _ENVIRONMENT},
            ).remote()
            for index in range(len(children))
        ]
        for one, child in zip(self._actors, children, strict=True):
            one.join.remote(child.invitation.text())

    def _forget(self) -> None:
        if self._group is None:
            return
        ray = import_ray()
        group, self._group = self._group, None
        if ray.is_initialized():
            ray.util.remove_placement_group(group)  # its actors go with it


class RankActor:
    """Of Ray: a process in which a rank's worker runs."""

    def join(self, invitation: str) -> int:
        """Be the rank until told to stop, or the core is gone."""
        from quire.executor.worker_process import serve

        parent: RemoteParent[ToWorker] = RemoteParent(Invitation.read(invitation), ToWorker, _own_device())
        return serve(parent)


def _own_device() -> int:
    ids = import_ray().get_gpu_ids()
    return int(ids[0]) if ids else -1


def connect(ray: Any) -> None:
    """Join a cluster, if this process has not."""
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = os.environ.get(_ADDRESS)
        ray.init(address=address, log_to_driver=address is None, logging_level="warning", namespace="quire")


def import_ray() -> Any:
    """Raises ConfigError if Ray is not installed."""
    try:
        import ray
        import ray.util
    except ImportError:
        raise ConfigError(
            "Ray is not installed: pip install 'quire[ray]'", "distributed_executor_backend", code="missing-package"
        ) from None
    return ray
