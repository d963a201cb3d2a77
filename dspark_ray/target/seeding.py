"""Per-request random generators: steps whose draw is thrown away, and answers that began on another engine.

A partial prefill samples a token and discards it. vLLM gives the draw back by moving a CUDA generator's offset,
which kills the engine on the CPU, whose generators have none. Saving and restoring the state works on both.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

DRAWS_KEY = "dspark_draws_made"
"""In a request's extra_args: how many tokens of its answer were drawn before this engine got it."""


def advance(
    generator: torch.Generator, draws: int, vocab_size: int, dtype: torch.dtype = torch.float32
) -> None:
    """Bring a generator to where it is after some tokens: each was drawn with one noise value a vocabulary entry.

    Args:
        generator: as seeded.
        draws: tokens drawn.
        vocab_size: width of the logits.
        dtype: of the sampler's noise.
    """
    noise = torch.empty(vocab_size, dtype=dtype, device=generator.device)
    for _ in range(draws):
        noise.exponential_(generator=generator)


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
