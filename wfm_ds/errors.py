"""Errors that commands print as one line, and functions that describe errors or detect out-of-memory errors."""


class UserError(ValueError):
    """An error that the user can fix. The message states the problem, its location and the fix.

    Commands print it as one line and exit with code 2.
    """

    agreed = False
    """True if all ranks raise this error. Collectives then still work. Set by World.run_checked."""


class RecipeError(UserError):
    """An invalid recipe, override or DeepSpeed JSON file."""


class DataError(UserError):
    """A data folder, prompt file, image or video that cannot be used."""


class StorageError(UserError):
    """A remote storage address that is not supported, does not respond or denies access."""


class ModelError(UserError):
    """A pipeline folder or model that is missing, unreadable or not supported."""


class RewardError(UserError):
    """A reward that is unknown or cannot start, or a reward service that does not respond."""


class RunError(RuntimeError):
    """A run failed although its recipe and data are valid. Commands print it as one line and exit with code 1."""

    agreed = True  # all ranks know its cause


class GatherError(RuntimeError):
    """A rank failed while all ranks gathered tensors, so the ranks can no longer communicate."""


def describe_error(error: BaseException) -> str:
    """Return the message of a UserError, or the type and message of another error."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def escape_controls(text: str) -> str:
    """Escape control characters, because text from a file could otherwise change the terminal's state."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


# Lower-case texts in RuntimeErrors of torch, cuBLAS, NCCL and C++.
OUT_OF_MEMORY_TEXTS = ("out of memory", "defaultcpuallocator", "std::bad_alloc", "_alloc_failed")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an error, or any error in its chain of causes, reports a failed memory allocation."""
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(words in str(error).lower() for words in OUT_OF_MEMORY_TEXTS):
            return True
        error = error.__cause__
    return False
