"""Pages that hold states: copied for the prefix cache, and zeroed before keys and values are written there."""

from __future__ import annotations

import numpy as np
import torch

from quire.platforms.transfers import upload
from quire.types.plan import PageCopies, StepPlan
from quire.worker.pages import Pages


class StatePages:
    """data: bytes [slabs, pages, bytes of a slice]. Everything happens in the order of the steps, on their stream.

    As keys and values a state's numbers may be NaN, and attention may multiply what it must not see by 0. So pages that
    held a state, a request's or a copy, are zeroed when another group gets them.
    """

    def __init__(self, pages: Pages, data: torch.Tensor) -> None:
        kinds = [group.kind for group in pages.groups]
        self._data, self._group = data, kinds.index("state")
        self._others = [i for i, kind in enumerate(kinds) if kind not in ("state", "history")]
        self._held = np.zeros(data.shape[1], np.bool_)  # pages whose bytes are a state's

    def before(self, plan: StepPlan) -> None:
        """To be called before anything else of the step."""
        if plan.restores is not None:
            self._copy(plan.restores)
        if not plan.blocks:
            return
        self._held[plan.blocks[self._group].blocks] = True
        for group in self._others:
            new = plan.blocks[group].blocks
            dirty = new[self._held[new]]
            if len(dirty):
                self._held[dirty] = False
                self._data.index_fill_(1, upload(torch.from_numpy(dirty.astype(np.int64)), self._data.device), 0)

    def after(self, plan: StepPlan) -> None:
        """To be called once the forward pass of the step is under way."""
        if plan.snapshots is not None:
            self._held[plan.snapshots.targets] = True
            self._copy(plan.snapshots)

    def _copy(self, copies: PageCopies) -> None:
        for sources, targets in zip(copies.sources.tolist(), copies.targets.tolist(), strict=True):
            read = [self._data[:, page] for page in sources]
            if not set(sources).isdisjoint(targets):  # the copy's own pages were all that was free
                read = [page.clone() for page in read]
            for page, source in zip(targets, read, strict=True):
                self._data[:, page].copy_(source)
