"""Exports on their way to a repository of the hub: one thread of rank 0 sends them, and the run never fails of it.

The token is huggingface_hub's own affair (HF_TOKEN, or `hf auth login`); a recipe has none.
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
from wfm_ds.models.hub import bars_on_terminals, is_id, one_line, origin
from wfm_ds.recipe.schema import Recipe
from wfm_ds.run.model_card import last_samples, model_card

log = logging.getLogger(__name__)

FINISH_S = 3600.0  # that the end of a run waits for what is still on its way
POLL_S = 1.0
# HTTPError, of the client that huggingface_hub has chosen: no connection at all.
ERRORS = (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, errors.HTTPError, OSError, ValueError)  # type: ignore[attr-defined]


class HubPush:
    """Sends exports that are complete to `export.push_to_hub`, one after the other. For rank 0."""

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.export.push_to_hub is not None
        self.recipe, self.repo = recipe, recipe.export.push_to_hub
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hub push")
        self._sending: list[tuple[Future[None], Path]] = []
        if constants.HF_HUB_OFFLINE:
            log.warning("export.push_to_hub %s: HF_HUB_OFFLINE is set, the exports will stay here", self.repo)
        elif get_token() is None:
            log.warning("export.push_to_hub %s: no token (HF_TOKEN, or hf auth login): it will be refused", self.repo)

    def send(self, folder: Path, base: Path, step: int, lines: str) -> None:
        """Send what an export made, `folder`, which stays as it is until `finish`. lines: that load it from there."""
        self._sending.append((self._thread.submit(self._send, folder, base, step, lines), folder))

    def finish(self, timeout_s: float = FINISH_S) -> None:
        """Wait until all is sent; a warning for what is not, with the command that does it later."""
        until = time.monotonic() + timeout_s
        for future, folder in self._sending:
            while not future.done() and time.monotonic() < until:
                LIVENESS.advance()
                wait([future], timeout=POLL_S)
            if not future.done():
                future.cancel()
                self._warn(folder, f"not sent in {timeout_s:g} s")
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _send(self, folder: Path, base: Path, step: int, lines: str) -> None:
        try:
            api, repo = HfApi(), self.repo
            samples = last_samples(self.recipe.run.output_dir)
            base_id = base_name(self.recipe.model.path, base)
            card = model_card(self.recipe, repo, step, from_hub(lines, folder, base, repo), base_id, samples)
            files = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
            sent = [CommitOperationAdd(name, str(path)) for name, path in (files | samples).items()]
            sent.append(CommitOperationAdd("README.md", card.encode()))
            with bars_on_terminals():
                api.create_repo(repo, private=self.recipe.export.private, exist_ok=True)
                api.create_commit(repo, sent, commit_message=f"step {step}")
        except ERRORS as error:
            self._warn(folder, one_line(error))
            return
        log.info("sent the export of step %d to %s/%s", step, constants.ENDPOINT, repo)

    def _warn(self, folder: Path, reason: str) -> None:
        private = " --private" if self.recipe.export.private else ""
        log.warning(
            "export.push_to_hub: %s was not sent (%s); it is complete here, and this sends it: hf upload %s %s .%s",
            *(folder, reason, self.repo, shlex.quote(str(folder)), private),
        )


def base_name(path: str, folder: Path) -> str | None:
    """The id of the model that was trained; None for one that is a folder of this machine alone."""
    found = origin(folder)
    return found[0] if found is not None else path if is_id(path) else None


def from_hub(lines: str, folder: Path, base: Path, repo: str) -> str:
    """The loading lines as they are for somebody else: the repository in the export's place, and of a base that is on
    this machine alone its name."""
    from_repo = lines.replace(f'load_file("{folder}/', f'load_file(hf_hub_download("{repo}", "').replace(
        '.safetensors"), strict', '.safetensors")), strict'
    )
    if from_repo != lines:
        from_repo = "from huggingface_hub import hf_hub_download\n" + from_repo
    return from_repo.replace(str(folder), repo).replace(str(base), base.name)
