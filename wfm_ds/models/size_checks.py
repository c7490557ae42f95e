"""Size checks shared by families."""

from __future__ import annotations


def require_image(family: str, num_frames: int) -> None:
    """Raise ValueError unless num_frames is 1."""
    if num_frames != 1:
        raise ValueError(f"{family} makes images: num_frames must be 1, got {num_frames}")


def require_multiples(height: int, width: int, multiple: int) -> None:
    """Raise ValueError unless height and width are positive multiples of `multiple`."""
    for name, size in (("height", height), ("width", width)):
        if size < 1 or size % multiple:
            raise ValueError(f"{name} must be a multiple of {multiple}, got {size}")
