"""Exact distributions: run code on every sequence of random outcomes, with their probabilities."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from torch import Tensor

T = TypeVar("T", bound=Hashable)


class EveryOutcome:
    """A `Chance` that follows one path of outcomes and notes the paths not taken."""

    def __init__(self, path: Sequence[int]):
        self._path = path
        self._taken: list[int] = []
        self.weight = 1.0
        self.others: list[list[int]] = []

    def accepts(self, probability: float, position: int) -> bool:
        return self._branch([1.0 - probability, probability]) == 1

    def draws(self, probs: Tensor, position: int) -> int:
        return self._branch(probs.double().tolist())

    def _branch(self, probabilities: Sequence[float]) -> int:
        possible = [i for i, p in enumerate(probabilities) if p > 0]
        depth = len(self._taken)
        if depth < len(self._path):
            choice = self._path[depth]
        else:
            choice = possible[0]
            self.others += [[*self._taken, other] for other in possible[1:]]
        self.weight *= probabilities[choice]
        self._taken.append(choice)
        return choice


def distribution(run: Callable[[EveryOutcome], T]) -> dict[T, float]:
    """Probability of every result that `run` can return."""
    totals: dict[T, float] = defaultdict(float)
    paths: list[list[int]] = [[]]
    while paths:
        chance = EveryOutcome(paths.pop())
        result = run(chance)
        totals[result] += chance.weight
        paths += chance.others
    return dict(totals)
