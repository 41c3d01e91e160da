"""Every error Octavo raises on purpose. Bad input is a `ValueError` too, so that callers need not import this."""

from __future__ import annotations


class OctavoError(Exception):
    """Base of every error Octavo raises on purpose; its text is one sentence for the person who can mend it."""


class InvalidValueError(OctavoError, ValueError):
    """A value the caller gave is wrong: a prompt, a sampling parameter, a configuration key."""


class UnsupportedError(OctavoError, ValueError):
    """The request is understood and well formed, and this version does not offer it."""


class ConfigError(InvalidValueError):
    """A configuration key is unknown, has the wrong type, or contradicts another."""


class PromptTooLongError(InvalidValueError):
    """A prompt exceeds what the context, or the KV pool, can ever hold."""


class ModelNotFoundError(OctavoError):
    """No weights were found under the name given."""


class CheckpointError(OctavoError, ValueError):
    """Weights were found, and are damaged, incomplete, or of a kind Octavo cannot read."""


class ChatTemplateError(InvalidValueError):
    """The model has no chat template, or its template refuses these messages."""


class EngineError(OctavoError, RuntimeError):
    """The engine itself failed, or was used after `close()`."""


class OverloadedError(OctavoError):
    """Too much waits already; the same request may be taken later. retry_after: seconds, as a guess."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UnavailableError(OctavoError):
    """The engine is loading, shutting down, or has stopped, and takes no request."""


class InvariantError(EngineError):
    """An integrity check found the engine's books in disorder: a fault of Octavo's."""


def described(error: BaseException) -> str:
    """An error of foreign code as a message shows it: short, on one line, whatever it is."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "an error that cannot be printed"
    return f"{type(error).__name__}: {text if len(text) <= 300 else text[:300] + '...'}"


def shown(value: object) -> str:
    """A caller's value as an error message shows it: short, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # a number of more digits than Python prints, or an object that cannot describe itself
        text = f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= 200 else f"{text[:200]}..."
