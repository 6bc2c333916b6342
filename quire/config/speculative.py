"""`speculative_config`: who drafts tokens ahead, and how many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from quire.foundation.errors import ConfigError
from quire.foundation.registry import Registry

DRAFTERS = Registry(
    "drafter",
    {"ngram": "quire.worker.drafters:NgramDrafter"},
    contract="quire.worker.drafters:Drafter",
    needs=("propose",),
    is_class=True,
)
"""Who drafts, by `method`; each is a `quire.worker.drafters.Drafter`."""
OPTION = "speculative_config"
MAX_DRAFTS = 15  # with the token before them 16 queries a row
MAX_LOOKUP = 31
_LOOKUP = 5  # tokens, unless a length is given


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of the JSON object, by the names that other engines have for them, and `policy`."""

    method: str  # ngram: what followed the same tokens before, in the request's own text; or a plugin's name
    num_speculative_tokens: int
    prompt_lookup_max: int  # most tokens at the end of the text that are looked for …
    prompt_lookup_min: int  # … and fewest
    policy: Literal["auto", "always"] = "auto"  # auto: steps have drafts where these are learned to pay

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> SpeculativeConfig | None:
        """None if nothing is to be drafted. Raises ConfigError naming the key."""
        if not given:
            return None
        unknown = [key for key in given if key not in cls.__struct_fields__]
        if unknown:
            known = ", ".join(cls.__struct_fields__)
            raise ConfigError(f"{OPTION} has the unknown key {unknown[0]!r}; it may hold {known}", OPTION)
        if missing := [key for key in ("method", "num_speculative_tokens") if given.get(key) is None]:
            raise ConfigError(f"{OPTION} lacks {missing[0]!r}", OPTION)
        longest, shortest = given.get("prompt_lookup_max"), given.get("prompt_lookup_min")
        either = longest if shortest is None else shortest
        both = {
            "prompt_lookup_max": (_LOOKUP if either is None else either) if longest is None else longest,
            "prompt_lookup_min": (_LOOKUP if either is None else either) if shortest is None else shortest,
        }
        try:
            found = msgspec.convert({**given, **both}, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{OPTION}: {error}", OPTION) from None
        found._check()
        return found

    def _check(self) -> None:
        if self.method not in DRAFTERS:
            raise ConfigError(f"{OPTION}: method must be one of {', '.join(DRAFTERS)}, got {self.method!r}", OPTION)
        if not 1 <= self.num_speculative_tokens <= MAX_DRAFTS:
            raise ConfigError(
                f"{OPTION}: num_speculative_tokens must be in [1, {MAX_DRAFTS}], got {self.num_speculative_tokens}",
                OPTION,
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max <= MAX_LOOKUP:
            raise ConfigError(
                f"{OPTION}: 1 <= prompt_lookup_min <= prompt_lookup_max <= {MAX_LOOKUP} must hold, got "
                f"{self.prompt_lookup_min} and {self.prompt_lookup_max}",
                OPTION,
            )
