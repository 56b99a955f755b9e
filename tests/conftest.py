"""What all tests share: one torch thread each, and a tiny model made once."""

from pathlib import Path

import pytest
import torch

from tests.tiny_model import make_tiny_llama


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def long_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As small, but its streams last for seconds."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "long", max_position=16384)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
