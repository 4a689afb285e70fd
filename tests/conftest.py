import contextlib
import json
import time
from collections import Counter

import pytest
import torch

import compare
import flashattn
from flashattn import _build, _load

PARTIAL_FAMILIES = _build.instances().PARTIAL_MODULES


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="where tests make their tensors: cpu, cuda, cuda:1, ...")
    parser.addoption("--family", help="only kernels of this family serve the tests that use the device; one "
                     "that does not serve every call comes first anyway")
    parser.addoption("--results", metavar="FILE", help="append each test's result to this file, as it comes")
    parser.addoption("--oracle", metavar="DEVICE", help="where the oracle computes; default: on --device")
    parser.addoption("--rows", help="of the tests of single kernels only those of these, separated by commas")
    parser.addoption("--until", type=float, help="tests that would begin after this time of day (seconds of "
                     "the epoch) are skipped")


def pytest_configure(config):
    # Test processes side by side share the cores; more threads than cores would only wait for each other.
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    compare.oracle_device = config.getoption("--oracle")
    if config.getoption("--results") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results(config.getoption("--results")))


def pytest_collection_modifyitems(config, items):
    if rows := config.getoption("--rows"):
        wanted = set(rows.split(","))
        items[:] = [item for item in items if item.callspec.params["row"].name in wanted]


def pytest_runtest_setup(item):
    if (until := item.config.getoption("--until")) and time.time() > until:
        pytest.skip("too late")


class Results:
    """A line of JSON that says how many tests each file has, then one for each test; of one that fails, for
    each part that fails."""

    def __init__(self, path):
        self.file, self.collected = open(path, "a", buffering=1), False

    def pytest_collection_finish(self, session):
        self.collect(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids):
        self.collect(ids)

    def collect(self, ids):
        if not self.collected:                                           # every worker collects the same
            counts = Counter(test.partition("::")[0].rpartition("/")[2] for test in ids)
            self.file.write(json.dumps({"collected": counts}) + "\n")
            self.collected = True

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            result = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
            self.file.write(json.dumps(result) + "\n")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _family(request):
    name = request.config.getoption("--family") if "device" in request.fixturenames else None
    if name in PARTIAL_FAMILIES:
        name = None
    with flashattn.force_family(name) if name else contextlib.nullcontext():
        yield


@pytest.fixture
def one_family(device):
    """Calls that differ in their layout or in the results they ask for give the same bits: a family that
    serves a part of the calls stays out of it."""
    partial = device.type == "cuda" and not _load.extension().forced_family() and any(
        family in PARTIAL_FAMILIES for family in flashattn.dispatch.families())
    with flashattn.force_family("sm80") if partial else contextlib.nullcontext():
        yield


@pytest.fixture(scope="session")
def device(request):
    """The device that tests make their tensors on."""
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def _memory(request):
    """Processes share a card: what a test does not need any more is for the others."""
    yield
    if request.config.getoption("--device") != "cpu" and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()
