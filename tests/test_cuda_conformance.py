import pytest
from helpers.cuda import LOCATIONS, MODE, SIMULATOR, needs_cuda, reset_cuda

from lkv.testing import DeviceConformance

pytestmark = needs_cuda

SCHEDULES = ["eager", "lazy", "random1", "random2", "random3"] if MODE == "sim" else ["as it comes"]


@pytest.fixture(params=SCHEDULES, autouse=True)
def schedule(request):
    if SIMULATOR is not None:
        SIMULATOR.schedule(request.param)
    yield request.param
    reset_cuda()


@pytest.fixture(params=["pool", "raw", "async"], autouse=True)
def allocator(request):
    import cupy

    allocate = {
        "pool": cupy.cuda.MemoryPool().malloc,
        "raw": cupy.cuda.memory._malloc,
        "async": cupy.cuda.MemoryAsyncPool().malloc,
    }
    with cupy.cuda.using_allocator(allocate[request.param]):
        yield request.param


class TestFirstDevice(DeviceConformance):
    location = "cuda:0"
    more_than_it_has = 1 << 44


@pytest.mark.skipif(len(LOCATIONS) == 1, reason="there is one GPU")
class TestSecondDevice(DeviceConformance):
    location = "cuda:1"
    more_than_it_has = 1 << 44
