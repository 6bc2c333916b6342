"""What is asked of a model before it is loaded, and what is known of it then."""

from __future__ import annotations

import msgspec

from quire.config.hardware import Hardware
from quire.config.resolve import Resolved
from quire.types.kv import KVGroupSpec


class Question(msgspec.Struct, frozen=True):
    """Of a model that is built without its numbers."""

    resolved: Resolved
    hardware: Hardware


class Fit(msgspec.Struct, frozen=True):
    """What a KV cache holds: so many requests at once of so many tokens each."""

    context: int
    requests: int


class Findings(msgspec.Struct, frozen=True):
    """As an engine would report them, of one rank; bytes but for what is called otherwise."""

    parameters: int  # of the whole model
    active_parameters: int  # that one token is multiplied by
    weight_bytes: int
    weight_formats: dict[str, int]  # bytes by format
    activation_bytes: int  # of the largest step: an estimate, where an engine measures
    groups: list[KVGroupSpec]
    page_bytes: int
    attention: str  # backend, and why it is not certain if it is not
    kernels: str
    num_blocks: int = 0
    max_model_len: int = 0  # that the cache can hold
    fits: list[Fit] = []
    note: str = ""  # what was lowered
    too_large: str = ""  # why it does not fit; "": it does
