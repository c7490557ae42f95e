"""Sets up logging: one log file per rank, and the console of rank 0."""

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

NOISY_LIBRARIES = (
    *("DeepSpeed", "deepspeed", "transformers", "diffusers", "peft", "accelerate", "tensorboard", "PIL", "matplotlib"),
    *("huggingface_hub", "httpx2"),  # huggingface_hub uses httpx2, which logs a line per file
    *("torch", "torch.distributed", "torch._dynamo", "torch._inductor"),
)
"""Libraries that log irrelevant INFO lines. Only their warnings are logged."""


TRUNCATION_TEXT = "The following part of your input was truncated because"
TRUNCATION_NOTE = "; warnings about other truncated prompts are not shown"


class _TruncationFilter(logging.Filter):
    """Passes only one warning about truncated prompts for each maximum length, such as 77 tokens for CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self._limits: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = str(record.msg)
        if not text.startswith(TRUNCATION_TEXT):
            return True
        if not text.endswith(TRUNCATION_NOTE):  # the filter of another handler may have added it
            record.msg = text + TRUNCATION_NOTE
        limit = text.partition(":")[0]
        is_first = limit not in self._limits
        self._limits.add(limit)
        return is_first


class _OwnHandler(logging.Handler):
    """Base class of the handlers that `setup_logging` installs, by which `close_logging` recognizes them."""


class _FileHandler(logging.FileHandler, _OwnHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the line on an OSError, such as a full disk. Writers of essential files report such errors."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # unflushed lines are dropped too
            super().close()


class _ConsoleHandler(logging.StreamHandler[TextIO], _OwnHandler):
    """Handler that writes to the current sys.stderr. rich replaces sys.stderr while it shows a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _is_for_console(record: logging.LogRecord) -> bool:
    is_ours = record.name.split(".", 1)[0] in ("wfm_ds", "wfm_reward")
    return is_ours or record.levelno >= logging.WARNING


def setup_logging(output_dir: Path | None, rank: int, *, console: bool) -> None:
    """Log to `output_dir/logs/rank_<R>.log` (INFO and above) and, on rank 0, to stderr. Replaces earlier handlers.

    output_dir: None writes no file. console: if True, stderr shows INFO lines of wfm_ds and wfm_reward, and warnings of
    other packages. If False, stderr shows only errors. Raises UserError if the file cannot be written. Call this after
    heavy imports, because it also removes the handlers that libraries install on import.
    """
    root = logging.getLogger()
    close_logging()
    root.setLevel(logging.INFO)
    if output_dir is not None:
        root.addHandler(_open_file_handler(output_dir / "logs" / f"rank_{rank}.log", rank))
    if rank == 0:
        handler = _ConsoleHandler()
        handler.setLevel(logging.INFO if console else logging.ERROR)
        handler.addFilter(_is_for_console)
        handler.addFilter(_TruncationFilter())
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"))
        root.addHandler(handler)
    elif not root.handlers:
        root.addHandler(logging.NullHandler())  # else logging prints the warnings of every rank
    logging.captureWarnings(True)
    for name in NOISY_LIBRARIES:
        if not (name.startswith("torch") and "TORCH_LOGS" in os.environ):  # the user wants torch's log lines
            library = logging.getLogger(name)
            library.handlers.clear()  # they print on every rank; ours print only on rank 0
            library.propagate = True
            library.setLevel(logging.WARNING)


def is_console_quiet() -> bool:
    """Return whether stderr shows only errors, because `setup_logging` was called with console=False."""
    return any(isinstance(handler, _ConsoleHandler) and handler.level > logging.INFO for handler in _own_handlers())


def _own_handlers() -> list[logging.Handler]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, _OwnHandler)]


def close_logging() -> None:
    for handler in _own_handlers():
        logging.getLogger().removeHandler(handler)
        handler.close()


def _open_file_handler(path: Path, rank: int) -> logging.Handler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{path}: cannot write the log ({error.strerror}); set run.output_dir to another folder"
        ) from error
    handler.addFilter(_TruncationFilter())
    formatter = logging.Formatter(
        f"%(asctime)s.%(msecs)03dZ rank {rank} %(levelname)s %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime  # UTC: the machines of a run may be in different time zones
    handler.setFormatter(formatter)
    return handler


def quiet_libraries() -> None:
    """Hide start-up messages of libraries, unless the user has set their verbosity variables."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # several adapters are intended
