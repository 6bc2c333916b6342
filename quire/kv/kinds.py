"""The kinds of groups there are, by name."""

from __future__ import annotations

from quire.foundation.errors import ConfigError
from quire.kv.chunk import Chunk
from quire.kv.full import FullAttention
from quire.kv.group import BlockNames, KVGroup
from quire.kv.history import History
from quire.kv.none import Nothing
from quire.kv.state import State
from quire.kv.window import SlidingWindow
from quire.types.kv import KVGroupSpec

KINDS: dict[str, type[KVGroup]] = {
    "full": FullAttention,
    "latent": FullAttention,  # another row a token, kept as long
    "window": SlidingWindow,
    "chunk": Chunk,
    "state": State,
    "history": History,
    "none": Nothing,
}
UNSHARED = {"none"}  # a model with one of these has no prefix cache
CACHED = {name for name, kind in KINDS.items() if hasattr(kind, "find")}  # a hit of the prefix cache depends on them


def make_group(spec: KVGroupSpec, names: BlockNames) -> KVGroup:
    """Raises ConfigError for a kind that no class serves."""
    if spec.kind not in KINDS:
        raise ConfigError(f"a KV group is of kind {spec.kind!r}; known kinds: {', '.join(KINDS)}")
    return KINDS[spec.kind](spec, names)
