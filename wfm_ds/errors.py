"""Errors that the user, a file or a peer causes. Commands print them as one line and exit with code 2."""


class UserError(ValueError):
    """An error with a cause outside the program. The message states the problem, its location and how to fix it."""

    agreed = False
    """Whether all ranks raise this error, so that collectives still work. Set by World.run_checked."""


class RecipeError(UserError):
    """Invalid recipe, override or DeepSpeed JSON."""


class DataError(UserError):
    """Data folder, prompt file, image or video that cannot be used."""


class StorageError(UserError):
    """Unsupported address, or a storage that does not respond or denies access."""


class ModelError(UserError):
    """Pipeline folder that is missing, unreadable or not supported."""


class RewardError(UserError):
    """Unknown reward, a reward that cannot be started, or a reward service that does not respond."""


class RunError(RuntimeError):
    """The run failed although its recipe and data are valid. Commands print it as one line and exit with code 1."""

    agreed = True  # all ranks know its cause


# Texts in RuntimeErrors of torch, cuBLAS, NCCL and C++.
OUT_OF_MEMORY_TEXTS = ("out of memory", "defaultcpuallocator", "std::bad_alloc", "_alloc_failed")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one of the errors that caused it, is a failed memory allocation."""
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(words in str(error).lower() for words in OUT_OF_MEMORY_TEXTS):
            return True
        error = error.__cause__
    return False
