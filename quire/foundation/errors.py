"""The errors a user can meet. Each says what is wrong, with the numbers, and what to do."""

from __future__ import annotations


class QuireError(Exception):
    """Base of every error that Quire raises on purpose.

    code: its entry in the catalogue (`foundation/error_codes.py`), if class and field do not say it.
    """

    code: str | None = None


class InputError(QuireError, ValueError):
    """A request cannot be accepted. It is raised at the door and harms no other request.

    `param` names the field (as the user wrote it), so that the server can answer with it.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ContextLengthError(InputError):
    """A prompt that is too long. Agents read its wording: they shorten the conversation and ask again."""

    @classmethod
    def of(cls, num_prompt: int, num_output: int, context: int) -> ContextLengthError:
        """num_output: tokens that the answer needs at least; 0: there is none, and the prompt may take it all."""
        need = f", and the answer needs at least {num_output} of them" if num_output else ""
        return cls(
            f"the prompt is too long: {num_prompt} tokens > {context - num_output} maximum. This model's maximum "
            f"context length is {context} tokens (max_model_len){need}",
            "prompt",
        )

    @classmethod
    def of_chars(
        cls, num_chars: int, most: int, context: int | None = None, *, is_more: bool = False
    ) -> ContextLengthError:
        """Of a text that is longer than a server reads; most: characters. is_more: it was not counted to its end."""
        least = "at least " if is_more else ""
        length = f" of {context} tokens (max_model_len)" if context else ""
        return cls(
            f"the prompt is too long: {least}{num_chars} characters > {most} maximum, with this model's maximum "
            f"context length{length}",
            "prompt",
        )

    @classmethod
    def of_text(cls, num_chars: int, least: int, most: int, context: int) -> ContextLengthError:
        """Of a text that was not encoded. least: tokens that it has at least; most: tokens that it may have."""
        return cls(
            f"the prompt is too long: {least} tokens > {most} maximum, or more: it has {num_chars} characters. This "
            f"model's maximum context length is {context} tokens (max_model_len)",
            "prompt",
        )


class OverloadedError(QuireError):
    """Too much waits already. The same request may be accepted a moment later."""


class ConfigError(QuireError, ValueError):
    """An option, a model folder or the combination of both cannot work."""

    def __init__(self, message: str, field: str | None = None, *, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class WeightsError(ConfigError):
    """A checkpoint does not fit the model: the message lists every missing, extra or misshapen tensor."""


class DoesNotFitError(ConfigError):
    """Weights and one request do not fit: the message names the bytes short and the option to change."""


class EngineDeadError(QuireError, RuntimeError):
    """The engine (or its process) stopped. Requests in flight cannot be finished by it.

    was_killed: by SIGKILL, which nobody sends to himself.
    """

    def __init__(self, message: str, *, was_killed: bool = False) -> None:
        super().__init__(message)
        self.was_killed = was_killed
