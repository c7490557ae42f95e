"""Removes the temporary files of killed processes from the caches on disk."""

from __future__ import annotations

from pathlib import Path

from wfm_ds.models.assets.text_cache import TEXT_FOLDER
from wfm_ds.recipe.shared_defaults import user_cache_folder
from wfm_ds.storage import atomic

FILE_FOLDERS = ("captions", "latents", "lengths", "tars/*", TEXT_FOLDER)  # folders of a cache with temporary files


def remove_temporary_files(cache_dir: Path | None, now_s: float) -> None:
    """Remove old temporary files and folders from the user's cache and from `cache_dir`, if it is set.

    now_s: current Unix time in seconds.
    """
    cache = user_cache_folder()
    paths = [path for root in {cache, cache_dir or cache} for name in FILE_FOLDERS for path in root.glob(f"{name}/.*")]
    paths += cache.glob(f"{TEXT_FOLDER}/*/.*")
    atomic.remove_stale((path for path in paths if atomic.PART_NAME.fullmatch(path.name)), now_s)
    atomic.remove_stale(cache.glob(f"*/*/{atomic.temporary_pattern()}"), now_s)  # tiny models and demo data
