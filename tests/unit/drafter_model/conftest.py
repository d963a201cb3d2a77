"""A small drafter with random weights."""

from collections.abc import Callable

import pytest
import torch
from draft_shape import SHAPE

from dspark_ray.drafter.model import DraftConfig, DSparkModel


@pytest.fixture
def make_model() -> Callable[..., DSparkModel]:
    def make(**changes: object) -> DSparkModel:
        torch.manual_seed(0)
        model = DSparkModel(DraftConfig(**{**SHAPE, **changes}))
        for parameter in model.parameters():
            parameter.data = torch.randn_like(parameter) * 0.3
        config = model.config
        rows = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
        model.attach_target(
            torch.randn(config.vocab_size, config.hidden_size),
            torch.randn(config.vocab_size, config.hidden_size),
            rows if config.reduced_vocabulary else None,
        )
        return model.eval().requires_grad_(False)

    return make
