"""Names of tensors as training tools leave them: with what they wrapped modules in, a prefix too many, or one less."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from quire.models.base import DecoderStack, Model
from quire.models.pooling import PoolingModel

# torch.compile, FSDP, activation checkpointing, DeepSpeed; wherever they stand.
WRAPPERS = re.compile(r"\b(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\.")


class Spelling(NamedTuple):
    """taken: from the beginning of names; given: to the beginning of those but the head's."""

    taken: str = ""
    given: str = ""
    head: str = ""
    has_wrappers: bool = False

    def __call__(self, name: str) -> str:
        """What the family's own checkpoints call it."""
        name = WRAPPERS.sub("", name) if self.has_wrappers else name
        if self.given and not name.startswith(self.head):
            return self.given + name
        return name.removeprefix(self.taken)

    def described(self) -> str:
        """What is unusual about the names; "": nothing."""
        found = [f"begin with {self.taken!r}"] if self.taken else []
        found += [f"lack {self.given!r}"] if self.given else []
        return " and ".join([*found, "hold what wrapped modules"] if self.has_wrappers else found)


def spelling_of(model: Model, names: Iterable[str]) -> Spelling:
    """Of all of a checkpoint's tensors, as `model.file_name` has them. Names with several prefixes are left as they
    are: which of them are the model's nobody knows."""
    names = list(names)
    has_wrappers = any(WRAPPERS.search(name) for name in names)
    names = [WRAPPERS.sub("", name) for name in names] if has_wrappers else names
    trunk = model.trunk if isinstance(model, PoolingModel) else model
    if not isinstance(trunk, DecoderStack):
        return Spelling(has_wrappers=has_wrappers)
    inner = trunk.checkpoint_name("layers.0.x").removesuffix("0.x")  # "model.layers."
    pattern = re.compile(rf"((?:.*?\.)?){re.escape(inner)}\d")
    before = {found[1] for name in names if (found := pattern.match(name))}
    if len(before) == 1:
        return Spelling(taken=before.pop(), has_wrappers=has_wrappers)
    first, dot, rest = inner.partition(".")
    if (
        not before
        and rest
        and not trunk.naming.is_optional
        and any(re.match(rf"{re.escape(rest)}\d", name) for name in names)
    ):
        head = trunk.checkpoint_name("lm_head.weight").removesuffix("weight")
        return Spelling(given=first + dot, head=head, has_wrappers=has_wrappers)
    return Spelling(has_wrappers=has_wrappers)
