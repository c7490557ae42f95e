"""Converts errors of the Hugging Face Hub to messages that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants, errors
from huggingface_hub.errors import (
    DryRunError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from wfm_ds.errors import ModelError
from wfm_ds.models.assets.released_repos import suggest_released_repo
from wfm_ds.storage.filesystem import shorten_error

# Errors of the HTTP client and of hf_xet (which downloads large files): lost connections and responses other than HTTP.
CONNECTION_ERRORS = (errors.HTTPError, ConnectionError, TimeoutError, RuntimeError)  # type: ignore[attr-defined]


class HubConnectionError(ModelError):
    """Raised if the Hub cannot be reached and the Hub cache lacks a required file."""


@contextmanager
def translate_hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    """Convert huggingface_hub's exceptions inside the context to ModelErrors that say what to do."""
    at = f" --revision {revision}" if revision is not None else ""
    try:
        yield
    except ModelError:  # also a ValueError, which the last clause would convert
        raise
    except GatedRepoError as error:
        raise ModelError(licence_message(repo, error)) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{repo} is neither a local folder nor a Hub repository that you can access: check the spelling, or run hf "
            f"auth login{suggest_released_repo(repo)}"
        ) from error
    except RevisionNotFoundError as error:
        key = "data.options.revision" if "/datasets/" in str(error) else "model.revision"  # the text has the URL
        raise ModelError(f"{repo} has no branch, tag or commit {revision}: change {key}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, DryRunError) as error:
        if isinstance(error.__cause__, GatedRepoError):
            raise ModelError(licence_message(repo, error.__cause__)) from error
        if isinstance(error.__cause__, HfHubHTTPError):  # the Hub did respond
            raise ModelError(download_failure(repo, error.__cause__)) from error
        raise HubConnectionError(
            f"{repo} is not in the Hub cache (and not a local folder), and the Hub cannot be reached; on a machine "
            f'with a network: hf download {repo}{at} --exclude "*.bin"{suggest_released_repo(repo)}'
        ) from error
    except HFValidationError as error:
        raise ModelError(
            f"{repo} is neither a local folder nor owner/name on the Hub: {shorten_error(error)}"
        ) from error
    except (HfHubHTTPError, EntryNotFoundError) as error:
        raise ModelError(download_failure(repo, error)) from error
    except CONNECTION_ERRORS as error:
        raise HubConnectionError(
            f"the connection to the Hub was lost ({type(error).__name__}: {shorten_error(error)}): repeat the command, "
            f"which continues the download of {repo}"
        ) from error
    except ValueError as error:  # a file name that leaves the cache, such as ../x
        raise ModelError(f"{repo} cannot be downloaded: {shorten_error(error)}") from error
    except OSError as error:  # disk error
        raise ModelError(f"{repo} cannot be written to {constants.HF_HUB_CACHE} ({error}): set HF_HOME") from error


def licence_message(repo: str, error: BaseException) -> str:
    page = f"datasets/{repo}" if "/datasets/" in str(error) else repo  # the text has the URL
    return (
        f"{repo} requires that you accept its licence: open https://huggingface.co/{page}, accept it, then run "
        "hf auth login (or set HF_TOKEN)"
    )


def download_failure(repo: str, error: Exception) -> str:
    return f"{repo} cannot be downloaded from the Hub ({shorten_error(error)}): try again later"
