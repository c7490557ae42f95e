"""The errors that a user, a file or a peer can cause. Entry points print them as one line and exit with code 2."""


class UserError(ValueError):
    """Something outside the program is wrong; the message says what, where and what to do."""

    agreed = False
    """Whether it is known that all ranks raise it, so that they can go on talking to each other (`World.checked`)."""


class RecipeError(UserError):
    """A recipe, an override or a DeepSpeed JSON does not say what it must."""


class DataError(UserError):
    """A data folder, a prompt file or a media file cannot be used."""


class StorageError(UserError):
    """An address is of an unknown kind, or the storage behind it does not answer or refuses."""


class ModelError(UserError):
    """A pipeline folder is missing, unreadable or of a family that is not supported."""


class RewardError(UserError):
    """A reward is unknown, cannot start, or its service does not answer."""


class RunError(RuntimeError):
    """The run cannot go on, through no fault of its recipe or data: exit code 1, with this one sentence."""

    agreed = True  # it follows from what all ranks know


# What torch, cuBLAS, NCCL and C++ say of it in a RuntimeError.
OF_ALLOCATORS = ("out of memory", "defaultcpuallocator", "std::bad_alloc", "_alloc_failed")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised from, is an allocation that failed."""
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(words in str(error).lower() for words in OF_ALLOCATORS):
            return True
        error = error.__cause__
    return False
