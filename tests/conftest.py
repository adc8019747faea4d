import gc
import os

import pytest
from helpers.cuda import LOCATIONS, SCHEDULE, SIMULATOR, reset_cuda

# The checkout holds no compiled module: a Python that a test starts there must look for the installed package instead.
os.environ["PYTHONSAFEPATH"] = "1"


@pytest.fixture(params=["cpu", *LOCATIONS])
def device(request):
    """A location for the storages of a test: the host, and the CUDA devices when ``LKV_TEST_CUDA`` asks for them."""
    if request.param == "cpu":
        yield request.param
        gc.collect()
        return
    if SIMULATOR is not None:
        SIMULATOR.schedule(SCHEDULE)
    yield request.param
    reset_cuda()
