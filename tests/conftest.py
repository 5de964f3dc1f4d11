"""Small tensors, many tests: one thread each, and as many workers as there are cores."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
