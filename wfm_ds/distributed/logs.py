"""Destinations of log lines: one file per rank, and rank 0's console. What is logged is the business of each module."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import TextIO

from wfm_ds.errors import UserError

NOISY = (
    "DeepSpeed",
    "deepspeed",
    "transformers",
    "diffusers",
    "peft",
    "accelerate",
    "huggingface_hub",
    "httpx2",  # its client: a line for each file
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch._inductor",
    "tensorboard",
    "PIL",
    "matplotlib",
)
"""Libraries whose INFO lines say nothing about a run; their warnings are kept."""


class _Owned(logging.Handler):
    """Marks the handlers that a second call of `setup_logging` replaces."""


class _FileHandler(logging.FileHandler, _Owned):
    def handleError(self, record: logging.LogRecord) -> None:
        """Go on without this line where the disk is full: what the run cannot do without says so itself."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the same for lines that were not flushed
            super().close()


class _ConsoleHandler(logging.StreamHandler[TextIO], _Owned):
    """Looks sys.stderr up for each line: while a progress line is shown, rich puts something else there that prints
    above it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _Formatter(logging.Formatter):
    def __init__(self, rank: int) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03dZ rank {rank} %(levelname)s %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
        )
        self.converter = time.gmtime  # machines of one run may be in several time zones


def _for_console(record: logging.LogRecord) -> bool:
    ours = record.name.split(".", 1)[0] in ("wfm_ds", "wfm_reward")
    return ours or record.levelno >= logging.WARNING


def setup_logging(output_dir: Path | None, rank: int, *, console: bool) -> None:
    """Send this process's log to `output_dir/logs/rank_<R>.log` (INFO and above) and, on rank 0, to stderr.

    The console shows INFO of our packages and warnings of all others, in a short form; without `console`, errors only.
    Without an `output_dir` there is no file. Python warnings are logged too. Noisy libraries are quieted and lose the
    handlers that they gave themselves; as they do that when imported, call it after the heavy imports. Another call
    replaces the first.
    Raises UserError if the file cannot be written.
    """
    root = logging.getLogger()
    close_logging()
    root.setLevel(logging.INFO)
    if output_dir is not None:
        root.addHandler(_file_handler(output_dir / "logs" / f"rank_{rank}.log", rank))
    if rank == 0:
        shown = _ConsoleHandler()
        shown.setLevel(logging.INFO if console else logging.ERROR)
        shown.addFilter(_for_console)
        shown.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"))
        root.addHandler(shown)
    elif not root.handlers:
        root.addHandler(logging.NullHandler())  # else logging's last resort prints the warnings of every rank
    logging.captureWarnings(True)
    for name in NOISY:
        if not (name.startswith("torch") and "TORCH_LOGS" in os.environ):  # the user asked for torch's own logs
            _quiet(logging.getLogger(name))


def close_logging() -> None:
    """Flush and remove what `setup_logging` installed."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _Owned)]:
        root.removeHandler(handler)
        handler.close()


def _file_handler(path: Path, rank: int) -> logging.Handler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{path}: cannot write the log ({error.strerror}); set run.output_dir to another folder"
        ) from error
    handler.setFormatter(_Formatter(rank))
    return handler


def _quiet(library: logging.Logger) -> None:
    # Libraries print to stdout or stderr with handlers of their own, on every rank; ours do it once, with the rank.
    library.handlers.clear()
    library.propagate = True
    library.setLevel(logging.WARNING)


def quieten_libraries() -> None:
    """Hide what libraries say of their own affairs at each start; a user's own setting stays."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # several adapters are meant
