import pickle
import sys

import numpy as np
import pytest
from helpers.ids import named
from hypothesis import given
from hypothesis import strategies as st

from lkv import Layout, SlotSpec
from lkv.errors import ArgumentTypeError, CapacityError, GeometryError, LayerIndexError
from lkv.layout import check_count, check_index, slot_specs

NO_INTEGERS = [True, False, 1.0, None, "1", b"1", [1], np.float32(1)]


@given(st.lists(st.integers(0, 5), max_size=4))
def test_a_contiguous_layout_is_that_of_a_numpy_array(shape):
    array = np.empty(shape, np.int32)
    layout = Layout.contiguous(shape)
    assert layout.shape == array.shape
    assert layout.is_contiguous
    assert (layout.size, layout.nbytes(4)) == (array.size, array.nbytes)
    assert layout.extent == array.size
    if array.size:
        assert tuple(4 * s for s in layout.strides) == array.strides


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=4), st.integers(0, 9))
def test_the_extent_is_one_past_the_highest_element(axes, offset):
    layout = Layout(tuple(n for n, _ in axes), tuple(s for _, s in axes), offset)
    touched = [offset + sum(i * s for i, s in zip(at, layout.strides, strict=True)) for at in np.ndindex(layout.shape)]
    assert layout.extent == max(touched) + 1
    assert layout.is_contiguous == (touched == list(range(offset, offset + layout.size)))


def test_a_slot_in_a_packed_row_is_strided():
    layout = Layout((1024, 64), (576, 1), 512)
    assert not layout.is_contiguous
    assert layout.extent == 1024 * 576
    assert layout.nbytes(2) == 1024 * 64 * 2


def test_a_layout_without_elements_touches_nothing():
    layout = Layout((0, 64), (64, 1), 7)
    assert (layout.size, layout.extent, layout.is_contiguous) == (0, 0, True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Layout((2, 3), (1,)),
        lambda: Layout((-1,), (1,)),
        lambda: Layout((2,), (-1,)),
        lambda: Layout((2,), (1,), -1),
        lambda: Layout((sys.maxsize, 2), (2, 1)),
        lambda: Layout((3,), (sys.maxsize // 2 + 1,)),
        lambda: Layout((2,), (1,), sys.maxsize),
        lambda: Layout.contiguous((2**32, 2**31)),
        lambda: Layout.contiguous((0, 2**40, 2**40)),
        lambda: Layout.contiguous((sys.maxsize,)).nbytes(2),
        lambda: Layout.contiguous((2**64,)),
        lambda: Layout.contiguous((2,)).nbytes(0),
    ],
)
def test_a_layout_that_cannot_be_is_refused(make):
    with pytest.raises(GeometryError, match="expected"):
        make()


@pytest.mark.parametrize("shape", [(True,), (1.0,), (None,), "12", 4, None])
def test_a_shape_of_something_else_than_integers_is_refused(shape):
    with pytest.raises(ArgumentTypeError, match="shape"):
        Layout.contiguous(shape)


def test_a_layout_is_a_value():
    layout = Layout([2, np.int64(3)], [3, 1])
    assert layout == Layout.contiguous((2, 3))
    assert hash(layout) == hash(Layout.contiguous((2, 3)))
    assert pickle.loads(pickle.dumps(layout)) == layout
    with pytest.raises(AttributeError):
        layout.offset = 1


def test_a_slot_knows_its_width():
    assert SlotSpec("c_kv", (512,)).width == 512
    assert SlotSpec("k", [8, 128]).trailing == (8, 128)
    assert SlotSpec("k", [8, 128]).width == 1024
    assert SlotSpec("score", ()).width == 1


@pytest.mark.parametrize("trailing", [(0,), (-1,), (4, 0), (2**32, 2**32)])
def test_a_slot_of_impossible_size_is_refused(trailing):
    with pytest.raises(GeometryError, match="k_pe"):
        SlotSpec("k_pe", trailing)


@pytest.mark.parametrize("trailing", [(True,), (64.0,), (None,), ("64",), "64", b"64", 64, None])
def test_a_slot_of_something_else_than_integers_is_refused(trailing):
    with pytest.raises(ArgumentTypeError, match="k_pe"):
        SlotSpec("k_pe", trailing)


def test_the_name_and_the_tag_of_a_slot_are_strings():
    with pytest.raises(ArgumentTypeError, match="name"):
        SlotSpec(3, (4,))
    with pytest.raises(ArgumentTypeError, match="tag"):
        SlotSpec("k", (4,), None)
    with pytest.raises(GeometryError, match="name"):
        SlotSpec("", (4,))


def test_the_short_form_names_the_slots_by_number():
    assert slot_specs([(512,), (64,)]) == (SlotSpec("slot0", (512,)), SlotSpec("slot1", (64,)))
    assert slot_specs([[]]) == (SlotSpec("slot0", ()),)


def test_the_long_form_is_taken_as_it_is():
    specs = (SlotSpec("c_kv", (512,)), SlotSpec("k_pe", (64,), tag="rope:interleaved"))
    assert slot_specs(slots=list(specs)) == specs


def test_slots_come_in_exactly_one_form():
    for both in ({}, {"slot_trailing": [(1,)], "slots": [SlotSpec("a", (1,))]}):
        with pytest.raises(ArgumentTypeError, match="either slot_trailing or slots"):
            slot_specs(**both)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"slot_trailing": []}, GeometryError),
        ({"slots": ()}, GeometryError),
        ({"slots": [SlotSpec("a", (1,)), SlotSpec("a", (2,))]}, GeometryError),
        ({"slot_trailing": [(512,), (0,)]}, GeometryError),
        ({"slot_trailing": [512, 64]}, ArgumentTypeError),
        ({"slot_trailing": 512}, ArgumentTypeError),
        ({"slot_trailing": "ab"}, ArgumentTypeError),
        ({"slots": [("a", (1,))]}, ArgumentTypeError),
    ],
    ids=named,
)
def test_unusable_slots_are_refused(arguments, error):
    with pytest.raises(error, match="slot"):
        slot_specs(**arguments)


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_anything_with_an_index_is_an_integer(value):
    assert check_index(value, 4, "layer") == 3
    assert type(check_count(value, "n")) is int


@pytest.mark.parametrize("value", NO_INTEGERS, ids=named)
def test_bools_floats_and_strings_are_no_integers(value):
    for check in (lambda: check_index(value, 4, "layer"), lambda: check_count(value, "layer")):
        with pytest.raises(ArgumentTypeError, match=r"^layer: expected an integer, got ") as caught:
            check()
        assert caught.value.actual is value


@pytest.mark.parametrize("value", [-1, 4, 2**70])
def test_an_index_out_of_range_says_the_range(value):
    with pytest.raises(LayerIndexError, match=f"^layer: expected 0 <= layer < 4, got {value}$") as caught:
        check_index(value, 4, "layer")
    assert (caught.value.expected, caught.value.actual) == (4, value)


def test_nothing_can_be_indexed_in_an_empty_range():
    with pytest.raises(LayerIndexError, match="got 0"):
        check_index(0, 0, "layer")


@pytest.mark.parametrize("value", [-1, 0, 2**63])
def test_a_count_out_of_range_is_a_geometry_error_unless_said_otherwise(value):
    with pytest.raises(GeometryError, match=f"^n_layers: expected 1 to .*, got {value}$"):
        check_count(value, "n_layers", 1)
    with pytest.raises(CapacityError):
        check_count(value, "n_layers", 1, error=CapacityError)
