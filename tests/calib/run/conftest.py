"""A small model with a text, of three layers unless a test makes its own."""

from pathlib import Path

import pytest
import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.save(folder, layers=3)
    tiny.text(folder)
    return folder
