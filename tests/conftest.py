import pytest
import torch


def pytest_configure(config):
    # Test processes side by side share the cores; more threads than cores would only wait for each other.
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def device():
    """The device that tests make their tensors on."""
    return torch.device("cpu")
