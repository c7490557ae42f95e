"""Download of LeRobot datasets from the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Sequence

from wfm_ds.errors import DataError
from wfm_ds.storage.filesystem import is_repo_id, shorten_error

META_FILES = ("meta/*", "*/meta/*")


def download_metadata(path: str, revision: str | None = None) -> str:
    """Download the metadata of a dataset on the Hub and return its local folder.

    A path that is not a Hub repository is returned unchanged. Raises DataError if the download fails.
    """
    return download_files(path, revision, META_FILES) if is_repo_id(path) else path


def download_files(repo: str, revision: str | None, patterns: Sequence[str]) -> str:
    """Download the files of a Hub dataset that match one of the patterns, unless they are in the Hub cache.

    Returns the snapshot folder in the Hub cache. Its name is the commit. Raises DataError if the download fails.
    """
    from huggingface_hub import constants, errors, snapshot_download

    try:
        return snapshot_download(
            repo,
            repo_type="dataset",
            revision=revision,
            allow_patterns=list(patterns),
            local_files_only=constants.HF_HUB_OFFLINE,
        )
    except (OSError, ValueError, RuntimeError, errors.HTTPError) as error:  # type: ignore[attr-defined]
        raise DataError(
            f"{repo} is neither a folder nor a dataset that can be downloaded from the Hub ({shorten_error(error)}). "
            f"On a machine with network access: hf download --repo-type dataset {repo}"
        ) from error
