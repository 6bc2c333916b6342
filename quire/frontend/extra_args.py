"""Arguments that requests give to the engine's own logits processors."""

from __future__ import annotations

from quire.config.logits_processors import processor_class
from quire.engine.client import EngineInfo
from quire.foundation.errors import InputError
from quire.types.sampling import SamplingParams


def check_extra_args(params: SamplingParams, info: EngineInfo) -> None:
    """Let every processor of the engine look at a request. Raises InputError if one refuses it.

    Arguments that nobody could read are refused too: they were meant to change the answer.
    """
    names = info.resolved.config.model.logits_processors
    if not names:
        if params.extra_args:
            raise InputError(
                "extra_args are for logits processors, and this engine was started without any (logits_processors)",
                "extra_args",
            )
        return
    for name in names:
        found = processor_class(name)
        try:
            found.validate_params(params)  # type: ignore[attr-defined]
        except InputError:
            raise
        except Exception as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            raise InputError(f"extra_args: {found.__name__} refuses them: {kind}{error}", "extra_args") from error
