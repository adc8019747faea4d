import gc

import numpy as np
import pytest
from helpers.appends import a_cache, append, refuse, rows, same
from helpers.dlpack import Odd, Producer
from helpers.ids import named

from lkv import Storage, errors


@pytest.fixture(params=["separate", "packed"])
def cache(request):
    return a_cache(layout=request.param)


def fail():
    raise RuntimeError("no luck today")


# ---- DLPack ----


@pytest.mark.parametrize("versioned", [True, False])
def test_objects_with_nothing_but_dlpack_are_arrays(cache, versioned):
    producers = [Producer(one, versioned=versioned) for one in rows(3)]
    assert same(append(cache, producers), rows(3))
    assert [producer.deleted for producer in producers] == [2, 2, 2]


def test_strides_of_dlpack_count_elements(cache):
    producers = [Producer(np.repeat(one, 2, axis=0)[::2]) for one in rows(3)]
    assert same(append(cache, producers), rows(3))
    for producer in producers:
        producer.managed.tensor.strides = None
    producers = [Producer(one) for one in rows(3)]
    for producer in producers:
        producer.managed.tensor.strides = None
        producer.managed.tensor.data += -8
        producer.managed.tensor.byte_offset = 8
    assert same(append(cache, producers), rows(3))


@pytest.mark.parametrize(
    "options",
    [{"code": 4}, {"code": 0}, {"bits": 16}, {"lanes": 2}, {"null": True}, {"major": 2}, {"device": 2}, {"device": 14}],
    ids=named,
)
@pytest.mark.parametrize("versioned", [True, False])
def test_a_capsule_that_does_not_fit_is_refused_and_freed(cache, options, versioned):
    if "major" in options and not versioned:
        pytest.skip("says no version")
    arrays = rows(2)
    arrays[1] = Producer(arrays[1], versioned=versioned, **options)
    assert refuse(cache, arrays, errors.LkvError, "append: slot 1 (k_pe)")
    assert arrays[1].deleted == arrays[1].asked > 0


def stop():
    raise StopIteration


@pytest.mark.parametrize(
    "action",
    [fail, stop, lambda: None, lambda: 4, lambda: b"dltensor", lambda: Storage(4).capsule(), lambda: (_ for _ in ())],
    ids=["raises", "stops", "None", "an int", "bytes", "another capsule", "a generator"],
)
def test_an_object_that_breaks_the_protocol_is_refused_by_slot(cache, action):
    arrays = rows(2)
    arrays[1] = Odd(action)
    assert refuse(cache, arrays, errors.ArgumentTypeError, "append: slot 1 (k_pe)")


def test_the_cause_of_a_refusal_is_kept(cache):
    with pytest.raises(errors.ArgumentTypeError, match="no luck today") as caught:
        cache.append(0, [Odd(fail), *rows()[1:]])
    assert isinstance(caught.value.__cause__, RuntimeError)

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.append(0, [Odd(interrupt), *rows()[1:]])


def test_a_capsule_can_be_taken_once(cache):
    capsule = Producer(rows()[0]).__dlpack__()
    arrays = rows(2)
    arrays[0] = Odd(lambda: capsule)
    cache.append(0, arrays)
    cache.truncate_to(0)
    with pytest.raises(errors.ArgumentTypeError, match=r"slot 0 \(c_kv\)"):
        cache.append(0, arrays)


def test_a_list_that_changes_while_it_is_read_is_read_as_it_was(cache):
    for change in (list.clear, lambda arrays: arrays.__setitem__(0, None), lambda arrays: arrays.extend(arrays)):
        arrays = rows(2)
        last = Producer(arrays[2])

        def meddle(arrays=arrays, change=change, last=last):
            change(arrays)
            gc.collect()
            return last.__dlpack__()

        arrays[2] = Odd(meddle)
        assert same(append_once(cache, arrays), rows(2))


def append_once(cache, arrays):
    cache.truncate_to(0)
    cache.append(0, arrays)
    cache.append(1, rows(2))
    cache.advance_by(2)
    with cache.read(0) as view:
        return [one.copy() for one in view.numpy()]


def test_an_append_inside_an_append_is_sound(cache):
    first = Producer(rows(2, start=50)[0])

    def nested():
        cache.append(1, rows(2))
        return first.__dlpack__()

    cache.append(0, [Odd(nested), *rows(2, start=50)[1:]])
    cache.advance_by(2)
    for layer, start in ((0, 50), (1, 1)):
        with cache.read(layer) as view:
            assert same(view.numpy(), rows(2, start=start))


# ---- NumPy's array interface ----


class Interface:
    def __init__(self, one):
        self.one, self.__array_interface__ = one, one.__array_interface__


def test_objects_with_nothing_but_the_array_interface_are_arrays(cache):
    assert same(append(cache, [Interface(one) for one in rows(3)]), rows(3))
    assert refuse(cache, [Interface(one) for one in rows(2, "f8")], errors.DTypeMismatchError, "slot 0 (c_kv)")
    broken = Interface(rows()[0])
    broken.__array_interface__ = {"shape": "no"}
    assert refuse(cache, [broken, *rows()[1:]], errors.ArgumentTypeError, "slot 0 (c_kv)")
