import contextlib

import pytest
import torch

import flashattn


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="where tests make their tensors: cpu, cuda, cuda:1, ...")
    parser.addoption("--family", help="only kernels of this family serve")


def pytest_configure(config):
    # Test processes side by side share the cores; more threads than cores would only wait for each other.
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _family(request):
    name = request.config.getoption("--family")
    with flashattn.force_family(name) if name else contextlib.nullcontext():
        yield


@pytest.fixture
def device(request):
    """The device that tests make their tensors on."""
    return torch.device(request.config.getoption("--device"))
