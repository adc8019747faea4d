import gc
import os

import pytest
from helpers.cuda import LOCATIONS, SCHEDULE, SIMULATOR, reset_cuda
from helpers.places import set_place

# The checkout holds no compiled module: a Python that a test starts there must look for the installed package instead.
os.environ["PYTHONSAFEPATH"] = "1"


def pytest_configure(config):
    config.addinivalue_line("markers", "host_only(reason): a test of `everywhere` that is about the host's memory")


def pytest_generate_tests(metafunc):
    if "everywhere" in metafunc.fixturenames:
        only_here = metafunc.definition.get_closest_marker("host_only")
        metafunc.parametrize("everywhere", ["cpu"] if only_here else ["cpu", *LOCATIONS], indirect=True)


def on_location(location):
    if location == "cpu":
        yield location
        return
    if SIMULATOR is not None:
        SIMULATOR.schedule(SCHEDULE)
    yield location
    reset_cuda()


@pytest.fixture(params=["cpu", *LOCATIONS])
def device(request):
    """A location for the storages of a test: the host, and the CUDA devices when ``LKV_TEST_CUDA`` asks for them."""
    yield from on_location(request.param)
    gc.collect()


@pytest.fixture
def everywhere(request):
    """The same for a whole module: what `helpers.places` makes is on each location in turn, unless ``host_only``."""
    set_place(request.param)
    try:
        yield from on_location(request.param)
    finally:
        set_place("cpu")


def pytest_collection_finish(session):
    if LOCATIONS:  # every test there collects garbage, and need not look through all of the tests for it
        gc.collect()
        gc.freeze()
