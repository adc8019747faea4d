import copy
import pickle

import pytest

from lkv import errors

BUILTIN_OF = {
    "ArgumentTypeError": TypeError,
    "CapacityError": ValueError,
    "ConsumedError": RuntimeError,
    "DTypeMismatchError": TypeError,
    "DeviceError": RuntimeError,
    "DeviceMismatchError": ValueError,
    "DeviceUnavailableError": RuntimeError,
    "ForkedError": RuntimeError,
    "GeometryError": ValueError,
    "IncompleteStepError": RuntimeError,
    "LayerIndexError": IndexError,
    "LeaseEndedError": RuntimeError,
    "LeaseTimeoutError": TimeoutError,
    "OutOfMemoryError": MemoryError,
    "PoisonedError": RuntimeError,
    "ReadOnlyError": ValueError,
    "RebindRefused": RuntimeError,
    "RestoreError": ValueError,
    "ShapeMismatchError": ValueError,
    "ShutdownError": RuntimeError,
    "StepInProgressError": RuntimeError,
    "UnpopulatedLayerError": LookupError,
    "WouldDeadlockError": RuntimeError,
}
SPECIAL = {"OutOfMemoryError", "RebindRefused"}


def test_every_error_stands_in_this_table():
    assert {"LkvError", *BUILTIN_OF} == set(errors.__all__)


@pytest.mark.parametrize("name", BUILTIN_OF)
def test_an_error_is_caught_as_its_builtin_and_as_the_base(name):
    cls = getattr(errors, name)
    for caught in (BUILTIN_OF[name], errors.LkvError):
        with pytest.raises(caught, match="went wrong"):
            raise cls("it went wrong")


@pytest.mark.parametrize("name", sorted({"LkvError", *BUILTIN_OF} - SPECIAL))
def test_an_error_carries_expected_and_actual(name):
    error = getattr(errors, name)("it went wrong", expected=(1, 64), actual=(2, 64))
    assert (str(error), error.expected, error.actual) == ("it went wrong", (1, 64), (2, 64))
    bare = getattr(errors, name)("it went wrong")
    assert (bare.expected, bare.actual) == (None, None)


def test_out_of_memory_carries_the_device_and_the_numbers():
    error = errors.OutOfMemoryError("no room", device="cuda:0", requested=2048, free=1024)
    assert (error.device, error.requested, error.free) == ("cuda:0", 2048, 1024)
    assert (error.expected, error.actual) == (2048, 1024)


def test_a_refused_rebind_carries_which_slot_and_why():
    error = errors.RebindRefused("refused", reason="STORAGE_DIFFERS", layer=3, which=1, baked=64, incoming=32)
    assert (error.reason, error.layer, error.which) == ("STORAGE_DIFFERS", 3, 1)
    assert (error.baked, error.incoming, error.expected, error.actual) == (64, 32, 64, 32)


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
@pytest.mark.parametrize(
    "error",
    [
        *(getattr(errors, n)("it went wrong", expected=1, actual=2) for n in sorted({*BUILTIN_OF} - SPECIAL)),
        errors.OutOfMemoryError("no room", device="cpu", requested=5, free=4),
        errors.RebindRefused("refused", reason="POISONED", layer=0, which=1, baked=2, incoming=3),
    ],
    ids=lambda e: type(e).__name__,
)
def test_an_error_survives_pickling_with_all_it_carries(error, clone):
    again = clone(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
