"""What the copy engine is told of tensors. Triton looks at every description anew, for longer than a launch should
take; here it looks at the first of each kind."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

# With the layout itself, whose number would else be another's once it is gone.
_looked_at: dict[Hashable, tuple[dict[str, Any], Any]] = {}


def described(
    kind: Any,
    base: torch.Tensor,
    block_shape: Sequence[int],
    layout: Any = None,
    shape: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Any:
    """`kind(base, shape, strides, block_shape, layout)`, by default all of `base`; kind: a class of Triton's or Gluon's
    descriptors, of which Triton's have no layout. Layouts of one kind are best one object.

    `launched_as`, which it has besides, is the same of all for which a kernel is compiled alike.
    """
    shape = base.shape if shape is None else shape
    strides = base.stride() if strides is None else strides
    key = (kind, base.dtype, *strides, *block_shape, id(layout))
    found = _looked_at.get(key)
    if found is None or base.data_ptr() % 16 or not base.numel():
        arguments = (base, shape, strides, list(block_shape))
        made = kind(*arguments) if layout is None else kind(*arguments, layout)
        made.launched_as = object()
        _looked_at[key] = {name: value for name, value in vars(made).items() if name != "base"}, layout
        return made
    made = object.__new__(kind)
    vars(made).update(found[0], base=base, shape=shape, strides=strides)
    return made
