"""Errors caused by the user, files or peers. Commands print them as one line and exit with code 2."""


class UserError(ValueError):
    """An error outside the program. The message states the problem, its location and how to fix it."""

    agreed = False
    """Whether all ranks raise it, so that collectives still work (set by World.run_checked)."""


class RecipeError(UserError):
    """Invalid recipe, override or DeepSpeed JSON."""


class DataError(UserError):
    """Unusable data folder, prompt file, image or video."""


class StorageError(UserError):
    """Unsupported address, or a storage that does not respond or denies access."""


class ModelError(UserError):
    """Missing, unreadable or unsupported pipeline folder."""


class RewardError(UserError):
    """Unknown reward, failed start of a reward, or a reward service that does not respond."""


class RunError(RuntimeError):
    """The run failed although its recipe and data are valid. Prints one line and exits with code 1."""

    agreed = True  # its cause is known to all ranks


# Texts in RuntimeErrors of torch, cuBLAS, NCCL and C++.
OUT_OF_MEMORY_TEXTS = ("out of memory", "defaultcpuallocator", "std::bad_alloc", "_alloc_failed")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error or one of its causes is a failed allocation."""
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(words in str(error).lower() for words in OUT_OF_MEMORY_TEXTS):
            return True
        error = error.__cause__
    return False
