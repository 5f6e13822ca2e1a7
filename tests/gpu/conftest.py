"""Tests in this folder need a CUDA device; without one they are not collected, which saves their imports."""

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture
def deterministic():
    """Make torch deterministic. Without warnings only, it would demand an environment variable; fused attention is not
    deterministic then."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_collection_modifyitems(items):
    """Skip what was asked for by name all the same. On a new machine, processes race to create torch's cache folder."""
    raced = pytest.mark.filterwarnings("ignore:Specified kernel cache directory could not be created")
    for item in items:
        if "tests/gpu/" in str(item.path):
            item.add_marker(raced if torch.cuda.is_available() else pytest.mark.skip(reason="needs a CUDA device"))
