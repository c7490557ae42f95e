"""The rows of each step, read ahead: which conversations they hold follows from the step, what is bad is counted."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from wfm_ds.errors import DataError
from wfm_ds.language.annotations import BadConversation
from wfm_ds.language.data import LanguageData
from wfm_ds.language.packing import RowOrder
from wfm_ds.language.rows import Sample, SampleReader

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 300.0
MIN_TRIED = 100  # conversations; of fewer the share of bad ones says little


@dataclass(frozen=True, slots=True)
class StepRows:
    """A rank's rows of a step, and what was left out of them."""

    rows: list[list[Sample]]
    num_bad: int
    num_tried: int


class RowSource:
    """Rows for one rank. A conversation whose media cannot be read is left out of its row."""

    def __init__(
        self, data: LanguageData, order: RowOrder, reader: SampleReader, *, rows_per_step: int, workers: int
    ) -> None:
        self._data, self._order, self._reader = data.training, order, reader
        self._rows_per_step = rows_per_step
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="read")
        self._ahead: dict[int, list[list[Future[Sample | BadConversation]]]] = {}
        self.tried, self.bad = 0, 0  # over all ranks, as `judge` was told

    def step(self, step: int, rank: int, num_ranks: int) -> StepRows:
        """The rows of this step, from 1, that are this rank's: every `num_ranks`th. Raises DataError."""
        for wanted in (step, step + 1):
            if wanted not in self._ahead:
                self._ahead[wanted] = self._begin(wanted, rank, num_ranks)
        rows, bad, tried = list[list[Sample]](), 0, 0
        for futures in self._ahead.pop(step):
            results = [self._result(future) for future in futures]
            rows.append([result for result in results if isinstance(result, Sample)])
            bad += len(results) - len(rows[-1])
            tried += len(results)
        return StepRows(rows, bad, tried)

    def epoch(self, step: int) -> float:
        """Passes over the data after this step."""
        epoch, _ = self._order.place(step * self._rows_per_step - 1)
        return float(epoch)

    def judge(self, bad: int, tried: int, allowed: float) -> None:
        """Count the conversations of a step over all ranks. Raises DataError, on all alike, for too many bad ones."""
        self.bad, self.tried = self.bad + bad, self.tried + tried
        if self.bad > allowed * max(self.tried, MIN_TRIED):
            raise DataError(
                f"{self.bad} of {self.tried} conversations had media that cannot be read, more than "
                f"data.max_bad_fraction {allowed:g} allows; the log names them"
            )

    def state(self) -> dict[str, int]:
        return {"bad": self.bad, "tried": self.tried}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.bad, self.tried = state["bad"], state["tried"]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self, step: int, rank: int, num_ranks: int) -> list[list[Future[Sample | BadConversation]]]:
        first = (step - 1) * self._rows_per_step
        places = range(first + rank, first + self._rows_per_step, num_ranks)
        return [[self._pool.submit(self._read, index) for index in self._order.row(place)] for place in places]

    def _read(self, index: int) -> Sample | BadConversation:
        try:
            sample = self._reader.read(self._data.conversations[index])
        except BadConversation as error:
            return error
        if len(sample.tokens) != self._data.lengths[index]:  # its row was filled for another number
            return BadConversation("media", sample.id, "a medium has another size than when the data were measured")
        return sample

    def _result(self, future: Future[Sample | BadConversation]) -> Sample | BadConversation:
        try:
            result = future.result(READ_TIMEOUT_S)
        except TimeoutError as error:
            raise DataError(f"a conversation could not be read within {READ_TIMEOUT_S:g} s: is a disk away?") from error
        if isinstance(result, BadConversation):
            log.warning("left out: %s", result)
        return result
