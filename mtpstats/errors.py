"""The exception tree. Every message is one plain line: what, where, what to do.

``exit_code`` is what the command line returns when the exception reaches it.
"""

from __future__ import annotations

from collections.abc import Sequence


class MtpStatsError(Exception):
    """Base of every exception mtpstats raises on purpose."""

    exit_code = 1


class InputError(MtpStatsError):
    """Bad usage or a bad input file."""

    exit_code = 2


class ModelError(InputError):
    """A model file that cannot be loaded, or cannot be driven with its MTP head."""


class LibraryNotFound(MtpStatsError):
    """No usable libllama; the message lists every place that was tried."""


class AbiMismatch(MtpStatsError):
    """libllama does not have the layout its manifest promises; the message names the field."""


class LlamaError(MtpStatsError):
    """libllama refused a call. ``code`` is its return value."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class DecodeError(LlamaError):
    """``llama_decode`` failed."""


class ContextFull(LlamaError):
    """No room is left in the context for the batch."""


class Interrupted(MtpStatsError):
    """The user interrupted the run. ``code`` is libllama's return value if it was in a call."""

    exit_code = 130
    code: int = 0


class CheckFailed(MtpStatsError):
    """A check the user asked for did not hold."""

    exit_code = 3


class SetAside(MtpStatsError):
    """All is done but for prompts that killed two workers each; ``exit_code`` 1."""

    def __init__(self, names: Sequence[str], planned: int) -> None:
        shown = ", ".join(name for name in names[:5])
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        super().__init__(
            f"{len(names)} of {planned} prompts set aside, each killed two workers: {shown}{more}"
        )
