"""Uploads exports to a repository on the Hub, in a thread of rank 0. A failed upload never ends the run.

huggingface_hub manages the token (HF_TOKEN or `hf auth login`), so recipes do not contain it.
"""

from __future__ import annotations

import logging
import shlex
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, constants, errors, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

from wfm_ds.distributed.liveness import LIVENESS
from wfm_ds.models.assets.hub import hide_bars_without_terminal, is_repo_id, shorten_error, snapshot_origin
from wfm_ds.recipe.schema import Recipe
from wfm_ds.runs.model_card import build_model_card, list_last_samples

log = logging.getLogger(__name__)

FINISH_TIMEOUT_S = 3600.0  # maximum wait for pending uploads at the end of a run
POLL_INTERVAL_S = 1.0
# errors.HTTPError: no connection (from the HTTP client of huggingface_hub).
PUSH_ERRORS = (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, errors.HTTPError, OSError, ValueError)  # type: ignore[attr-defined]


class HubPush:
    """Uploads complete exports to the repository in `export.push_to_hub`, one at a time. Only rank 0 uses it."""

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.export.push_to_hub is not None
        self.recipe, self.repo = recipe, recipe.export.push_to_hub
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hub push")
        self._sending: list[tuple[Future[None], Path]] = []
        if constants.HF_HUB_OFFLINE:
            log.warning("export.push_to_hub %s: HF_HUB_OFFLINE is set, exports will not be uploaded", self.repo)
        elif get_token() is None:
            log.warning(
                "export.push_to_hub %s: no token (HF_TOKEN or hf auth login): uploads will be rejected", self.repo
            )

    def send(self, folder: Path, base: Path, step: int, lines: str) -> None:
        """Queue the upload of an export folder. The folder must not change until `finish` returns.

        base: folder of the base model. lines: Python code that loads the export, written to the model card.
        """
        self._sending.append((self._thread.submit(self._send, folder, base, step, lines), folder))

    def finish(self, timeout_s: float = FINISH_TIMEOUT_S) -> None:
        """Wait for all uploads. Logs a warning for each incomplete upload, with a command that repeats the upload."""
        deadline = time.monotonic() + timeout_s
        for future, folder in self._sending:
            while not future.done() and time.monotonic() < deadline:
                LIVENESS.record_progress()
                wait([future], timeout=POLL_INTERVAL_S)
            if not future.done():
                future.cancel()
                self._warn_unsent(folder, f"not finished in {timeout_s:g} s")
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _send(self, folder: Path, base: Path, step: int, lines: str) -> None:
        try:
            api, repo = HfApi(), self.repo
            samples = list_last_samples(self.recipe.run.output_dir)
            base_id = base_model_id(self.recipe.model.path, base)
            card = build_model_card(
                self.recipe, repo, step, hub_loading_lines(lines, folder, base, repo), base_id, samples
            )
            files = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
            operations = [CommitOperationAdd(name, str(path)) for name, path in (files | samples).items()]
            operations.append(CommitOperationAdd("README.md", card.encode()))
            with hide_bars_without_terminal():
                api.create_repo(repo, private=self.recipe.export.private, exist_ok=True)
                api.create_commit(repo, operations, commit_message=f"step {step}")
        except PUSH_ERRORS as error:
            self._warn_unsent(folder, shorten_error(error))
            return
        log.info("uploaded the export of step %d to %s/%s", step, constants.ENDPOINT, repo)

    def _warn_unsent(self, folder: Path, reason: str) -> None:
        private = " --private" if self.recipe.export.private else ""
        log.warning(
            "export.push_to_hub: %s was not uploaded (%s). To upload it, run: hf upload %s %s .%s",
            *(folder, reason, self.repo, shlex.quote(str(folder)), private),
        )


def base_model_id(path: str, folder: Path) -> str | None:
    """Return the Hub id of the base model, or None if the base model is a local folder."""
    hub_origin = snapshot_origin(folder)
    return hub_origin[0] if hub_origin is not None else path if is_repo_id(path) else None


def hub_loading_lines(lines: str, folder: Path, base: Path, repo: str) -> str:
    """Return the loading code for other users. Local paths are replaced by `repo` and the base model's folder name."""
    from_repo = lines.replace(f'load_file("{folder}/', f'load_file(hf_hub_download("{repo}", "').replace(
        '.safetensors"), strict', '.safetensors")), strict'
    )
    if from_repo != lines:
        from_repo = "from huggingface_hub import hf_hub_download\n" + from_repo
    return from_repo.replace(str(folder), repo).replace(str(base), base.name)
