"""What the verifier knows of its requests' context, of which every drafter is only a cache.

Symbols: W window, rows kept for each request · d width of a feature row.
"""

import torch
from torch import Tensor

FEATURE_DTYPE = torch.bfloat16


class ContextRows:
    """The last W feature rows of one request, and how far its drafter has followed.

    Attributes:
        low: oldest position kept; what lies before is not known here.
        have: one past the newest position: the anchor of the next draft stands there.
        sent: position up to which the drafter is believed to hold the context; None when it holds nothing.
    """

    def __init__(self, window: int, width: int):
        self._window = window
        self._buffer = torch.empty(2 * window, width, dtype=FEATURE_DTYPE)
        self._end_row = 0  # buffer row behind that of position have - 1
        self.low = self.have = 0
        self.sent: int | None = None

    def append(self, position: int, rows: Tensor) -> None:
        """Add rows [n, d] of positions from `position` on.

        Positions known already are skipped: a resumed request computes them again. A gap forgets what was
        before it, since a drafter can mask only a beginning.
        """
        if position > self.have:
            self.low = self.have = position
            self._end_row, self.sent = 0, None
        new = rows[self.have - position :]
        count = len(new)
        if not count:
            return
        if count >= self._window:
            self._buffer[: self._window] = new[-self._window :]
            self._end_row = self._window
        else:
            if self._end_row + count > len(self._buffer):
                kept = min(self.have - self.low, self._window - count)
                self._buffer[:kept] = self._buffer[self._end_row - kept : self._end_row].clone()
                self._end_row = kept
            self._buffer[self._end_row : self._end_row + count] = new
            self._end_row += count
        self.have += count
        self.low = max(self.low, self.have - self._window)

    def prepend(self, position: int, rows: Tensor) -> bool:
        """Put rows [n, d] of positions from `position` on before what is known, if they join up with it.

        Returns:
            Whether any row was new; the drafter is then to be fed from the beginning.
        """
        new = rows[: max(0, self.low - position)]
        first = max(position, self.have - self._window)
        if position + len(rows) < self.low or first >= self.low or not len(new):
            return False
        known = self.rows_from(self.low).clone()
        self.low = self.have = first
        self._end_row, self.sent = 0, None
        self.append(first, torch.cat([new[first - position :].to(FEATURE_DTYPE), known]))
        return True

    def truncate(self, position: int) -> None:
        """Forget rows at and behind `position`: their tokens were taken back."""
        if position >= self.have:
            return
        self._end_row -= self.have - max(position, self.low)
        self.have = max(position, self.low)
        if self.sent is not None:
            self.sent = min(self.sent, self.have)

    def rows_from(self, position: int) -> Tensor:
        """Rows [have - position, d] of positions position..have-1; a view. `position` must be low at least."""
        return self._buffer[self._end_row - (self.have - position) : self._end_row]

    def unsent(self) -> tuple[int, bool]:
        """From where on the drafter is to be fed, and whether its slot starts anew there."""
        if self.sent is None:
            return self.low, True
        return max(self.sent, self.low), False

    def missing(self, position: int) -> None:
        """The drafter says that it lacks the features from `position` on."""
        self.sent = position if self.low < position <= self.have else None
