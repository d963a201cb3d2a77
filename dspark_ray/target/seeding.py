"""Per-request random generators that survive steps whose draw is thrown away.

A partial prefill samples a token and discards it. vLLM gives the draw back by moving a CUDA generator's offset,
which kills the engine on the CPU, whose generators have none. Saving and restoring the state works on both.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def discarded_draws_given_back(
    generators: dict[int, torch.Generator],
    discarded: np.ndarray,  # [num_reqs] bool
) -> Iterator[None]:
    """Restore, on leaving, the generator of every request whose sampled token will be discarded.

    Args:
        generators: batch row -> generator, of the seeded requests.
        discarded: [num_reqs] bool, true where this step ends inside the prompt.
    """
    saved = [
        (generator, generator.get_state())
        for row, generator in generators.items()
        if row < len(discarded) and discarded[row]
    ]
    yield
    for generator, state in saved:
        generator.set_state(state)
