import subprocess
import sys
from enum import Enum

import numpy as np
import pytest
from helpers.plans import held, latent, locations
from helpers.threads import PATIENCE, start

from lkv import DType, Storage, errors
from lkv.plan import InferenceContext, ModelInstanceId, shape_key


def test_a_context_keeps_storages_by_node():
    context = InferenceContext("cpu")
    first, second = Storage(64), Storage(64)
    assert context.insert("embed", first) is None
    assert context.insert("embed", second) is first
    context.insert(7, first)
    assert (len(context), context.get("embed"), context.get(7), context.get(8)) == (2, second, first, None)
    assert context.contains(7) and 7 in context and not context.contains(8)
    assert context.remove(7) is first
    assert context.remove(7) is None
    context.clear_persistent()
    assert len(context) == 0
    assert "0 storages, no session" in repr(context)


def test_a_context_takes_only_storages_of_its_device():
    context = InferenceContext(locations()["planned:0"])
    assert str(context.device) == "planned:0"
    with pytest.raises(errors.DeviceMismatchError, match="expected planned:0, got cpu"):
        context.insert(0, Storage(64))
    with pytest.raises(errors.ArgumentTypeError):
        context.insert(0, np.zeros(4))
    with pytest.raises(errors.DeviceUnavailableError):
        InferenceContext("cpu:1")


def test_a_session_is_held_by_one_at_a_time():
    context = InferenceContext()
    session, _ = held(latent())
    assert not context.has_decode_session()
    assert context.take_decode_session() is None
    assert context.put_decode_session(session) is None
    assert context.has_decode_session()
    context.clear_persistent()
    other, _ = held(latent())
    assert context.put_decode_session(other) is session
    assert context.take_decode_session() is other
    assert not context.has_decode_session()
    with pytest.raises(errors.ArgumentTypeError):
        context.put_decode_session(object())


def test_of_many_takers_one_gets_the_session():
    context = InferenceContext()
    session, _ = held(latent())
    for _ in range(200):
        context.put_decode_session(session)
        takers = [start(context.take_decode_session) for _ in range(4)]
        assert sorted(bool(taker.result(PATIENCE)) for taker in takers) == [False, False, False, True]


class Form(Enum):
    ABSORBED = 1
    EXPANDED = 2


def test_equal_arguments_give_equal_keys_in_any_order():
    assert shape_key(1, a=1, b="x") == shape_key(1, b="x", a=1)
    assert 0 <= shape_key(1) < 2**64
    assert shape_key(1, a=np.int64(3)) == shape_key(1, a=3)
    assert shape_key(1, a=[1, 2]) == shape_key(1, a=(1, 2))


def test_whatever_differs_gives_another_key():
    variants = [
        shape_key(1),
        shape_key(2),
        *(
            shape_key(1, a=value)
            for value in (None, 0, 1, True, False, 1.0, "1", b"1", "", (), (1,), ((1,),), (1, 2), ((1,), 2), -1, -0.0)
        ),
        shape_key(1, a=DType.of("float32")),
        shape_key(1, a=DType.of("float16")),
        shape_key(1, a="float32"),
        shape_key(1, a=Form.ABSORBED),
        shape_key(1, a=Form.EXPANDED),
        shape_key(1, b=1),
        shape_key(1, a=1, b=1),
    ]
    assert len(set(variants)) == len(variants)


def test_neighbouring_strings_do_not_run_together():
    keys = {
        shape_key(1, a="bc", d="e"),
        shape_key(1, a="b", cd="e"),
        shape_key(1, a="bcde"),
        shape_key(1, a=("ab", "c")),
        shape_key(1, a=("a", "bc")),
        shape_key(1, a=("abc",)),
        shape_key(1, a=("ab", "c", "")),
        shape_key(1, ab="c"),
        shape_key(1, a="", b="c"),
    }
    assert len(keys) == 9


def test_a_key_is_the_same_in_another_process():
    made = subprocess.run(
        [sys.executable, "-c", "from lkv.plan import shape_key; print(shape_key(5, width=512, form='absorbed'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(made.stdout) == shape_key(5, width=512, form="absorbed")


def test_what_has_no_stable_form_is_refused():
    for value in (object(), {1}, {"a": 1}, np.zeros(3), [object()]):
        with pytest.raises(errors.ArgumentTypeError, match="a"):
            shape_key(1, a=value)
    with pytest.raises(errors.ArgumentTypeError, match="model_instance"):
        shape_key("model")


def test_model_instances_are_never_mistaken_for_each_other():
    ids = [ModelInstanceId.next() for _ in range(100)]
    assert len(set(ids)) == 100
    assert len({shape_key(model, width=512) for model in ids}) == 100
    assert repr(ids[0]) == f"model instance {int(ids[0])}"
