"""Each reason for a refusal: reached where no other guard refuses, and what happens without it."""

import numpy as np
import pytest
from helpers.plans import ROWS, Source, content, filled, held, latent, locations, same

from lkv import KvCache, KvLayer, LatentKvCache, SlotSpec, Storage
from lkv.plan import RebindRefusal, RebindRefused
from lkv.plan import compare as compare_module
from lkv.plan.allocation import take


def refused(baked, incoming, guard, reason, layer=None, which=None):
    """Check that this guard alone refuses, and with what; return a session that was not touched by it."""
    session, plan = held(baked)
    fired = [check.__name__ for check in compare_module.CHECKS if check(take(baked), take(incoming)) is not None]
    assert fired == [guard], "the case does not reach this guard alone"
    before = dict(plan.addresses)
    with pytest.raises(RebindRefused) as caught:
        session.rebind_kv(incoming)
    error = caught.value
    assert (error.reason, error.layer, error.which) == (reason, layer, which)
    assert reason.name in str(error)
    assert plan.addresses == before
    assert session.alloc_id == baked.alloc_id
    return session, plan, error


def without(monkeypatch, guard):
    left = tuple(check for check in compare_module.CHECKS if check.__name__ != guard)
    assert len(left) == len(compare_module.CHECKS) - 1
    monkeypatch.setattr(compare_module, "CHECKS", left)


def test_another_width_of_the_same_length_and_type(monkeypatch):
    first, second = latent(slots=[(8,), (3,)], seed=1), latent(slots=[(8,), (4,)], seed=2)
    session, _, error = refused(first, second, "storages_alike", RebindRefusal.STORAGE_DIFFERS, 0, 1)
    assert (error.baked, error.incoming) == (first.slot_storage(0, 1), second.slot_storage(0, 1))
    assert "shape: expected (8, 3), got (8, 4)" in str(error)
    without(monkeypatch, "storages_alike")
    session.rebind_kv(second)
    read = session.run()[0, 1]
    assert not np.array_equal(read[:3], content(second)[0, 1][:3, :3]), "rows are read at the wrong stride"


def test_another_type_of_the_same_size(monkeypatch):
    where = latent().device_location
    first = Source({(0, 0): Storage((ROWS, 4), "float32")}, location=where)
    second = Source({(0, 0): Storage.wrap(np.full((ROWS, 4), 7, np.int32))}, location=where)
    session, _, error = refused(first, second, "storages_alike", RebindRefusal.STORAGE_DIFFERS, 0, 0)
    assert "dtype: expected DType(float32), got DType(int32)" in str(error)
    without(monkeypatch, "storages_alike")
    session.rebind_kv(second)
    assert (session.run()[0, 0] != 7).all(), "integers are read as floats"


@pytest.mark.parametrize("side", ["packed columns", "tag", "row axis", "access", "foreign"])
def test_another_encoding_of_the_same_bytes(side):
    where = latent().device_location
    storage = Storage((4, 4), "float32")
    if side == "packed columns":
        first = latent(slots=[(4,), (12,)], layout="packed")
        second = latent(slots=[(12,), (4,)], layout="packed")
    elif side == "tag":
        first, second = (
            LatentKvCache.with_capacity(1, ROWS, slots=[SlotSpec("k_pe", (4,), tag)], dtype="float32")
            for tag in ("rope:interleaved", "rope:halves")
        )
    elif side == "row axis":
        first = Source({(0, 0): storage}, location=where, max_seq_len=4)
        second = Source({(0, 0): Storage((4, 4), "float32", axis=1)}, location=where, max_seq_len=4)
    elif side == "access":
        first = Source({(0, 0): storage}, location=where, max_seq_len=4)
        array = np.zeros((4, 4), np.float32)
        second = Source({(0, 0): Storage.wrap(array, readonly=True)}, location=where, max_seq_len=4)
    else:
        first = latent(1)
        second = Source({(layer, 0): Storage((ROWS, 5), "float32") for layer in range(2)}, location=where)
    refused(first, second, "storages_alike", RebindRefusal.STORAGE_DIFFERS, 0, 0)


def test_packed_columns_in_another_order_are_read_as_each_other_without_the_guard(monkeypatch):
    first = latent(slots=[(4,), (12,)], seed=1, layout="packed")
    second = latent(slots=[(12,), (4,)], seed=2, layout="packed")
    session, _, _ = refused(first, second, "storages_alike", RebindRefusal.STORAGE_DIFFERS, 0, 0)
    without(monkeypatch, "storages_alike")
    session.rebind_kv(second)
    with second.read(0) as view:
        assert not np.array_equal(session.run()[0, 0][:3, 4:], view.numpy()[0])


def test_another_device_of_the_same_type(monkeypatch):
    where = locations()
    first, second = latent(2, 1, device=where["planned:0"]), latent(2, 2, device=where["planned:1"])
    session, plan, error = refused(first, second, "residency_same", RebindRefusal.RESIDENCY_DIFFERS)
    assert (str(error.baked), str(error.incoming)) == ("planned:0", "planned:1")
    without(monkeypatch, "residency_same")
    session.rebind_kv(second)
    on_second = {storage.address for storage in second._storages()}
    assert set(plan.addresses.values()) == on_second, "the plan of one device holds addresses of another"


def test_a_storage_on_another_device_than_its_source_says(monkeypatch):
    where = locations()
    shape = (ROWS, 4)
    first = Source({(0, 0): Storage(shape, "float32", where["planned:0"])}, location=where["planned:0"])
    second = Source({(0, 0): Storage(shape, "float32", where["planned:1"])}, location=where["planned:0"])
    session, plan, error = refused(first, second, "residency_same", RebindRefusal.RESIDENCY_DIFFERS, 0, 0)
    assert str(error.incoming) == "planned:1"
    without(monkeypatch, "residency_same")
    session.rebind_kv(second)
    assert plan.addresses[0, 0] == second.storages[0, 0].address


def unproven(seed):
    cache = KvCache.with_dims(1, 2, 4)
    cache.set_layer(0, KvLayer.allocate(2, 4, ROWS, "float32"))
    return filled(cache, seed)


@pytest.mark.parametrize("side", ["incoming", "baked", "both"])
def test_residency_that_cannot_be_proven(side, monkeypatch):
    proven = filled(KvCache.with_capacity(1, 2, 4, ROWS, "float32"), 1)
    first = proven if side == "incoming" else unproven(1)
    second = unproven(2) if side != "baked" else proven
    session, _, _ = refused(first, second, "residency_known", RebindRefusal.RESIDENCY_UNKNOWN)
    without(monkeypatch, "residency_known")
    session.rebind_kv(second)
    assert None in (first.rebind_location(), session.location), "a plan has moved on nobody's word"


def test_a_missing_third_slot(monkeypatch):
    first, second = latent(3, 1), latent(2, 2)
    session, _, error = refused(first, second, "slots_present", RebindRefusal.MISSING_SLOT, 0, 2)
    assert (error.baked, error.incoming) == (first.slot_storage(0, 2), None)
    without(monkeypatch, "slots_present")
    session.rebind_kv(second)
    read = session.run()
    assert np.array_equal(read[0, 0], content(second)[0, 0])
    assert np.array_equal(read[0, 2], content(first)[0, 2]), "the third slot is still the other request's"


def test_a_slot_that_the_plan_never_reads(monkeypatch):
    first, second = latent(2, 1), latent(3, 2)
    session, _, error = refused(first, second, "slots_baked", RebindRefusal.UNBAKED_SLOT, 0, 2)
    assert (error.baked, error.incoming) == (None, second.slot_storage(0, 2))
    without(monkeypatch, "slots_baked")
    bind = session.plan.bind
    session.plan.bind = lambda layer, which, storage: which < 2 and bind(layer, which, storage)
    session.rebind_kv(second)
    assert session.run().keys() < content(second).keys(), "a third of the context is left out"


def test_a_poisoned_storage(monkeypatch):
    first, second = latent(2, 1), latent(2, 2)
    last = second.slot_storage(1, 1)
    whole = content(second)
    with pytest.raises(ValueError), last.write() as lease:
        lease.numpy()[:1] = -1
        raise ValueError("half-way")
    session, _, error = refused(first, second, "unpoisoned", RebindRefusal.POISONED, 1, 1)
    assert error.incoming == last
    with monkeypatch.context() as patch:
        without(patch, "unpoisoned")
        session.rebind_kv(second)
        assert not same(session.run(), whole), "half-written rows are read"
    session.rebind_kv(first)
    last.clear_poison()
    session.rebind_kv(second)
    assert same(session.run(), content(second))


def test_a_source_whose_claims_do_not_fit_the_plan(monkeypatch):
    where = latent().device_location
    first = Source({(0, 0): Storage((ROWS, 4), "float32")}, location=where)
    second = Source({(0, 0): Storage((ROWS, 4), "float32")}, location=where, n_layers=2)
    session, _, error = refused(first, second, "geometry_same", RebindRefusal.STORAGE_DIFFERS)
    assert (error.baked[1], error.incoming[1]) == (1, 2)
    without(monkeypatch, "geometry_same")
    session.rebind_kv(second)
    assert session.n_layers == 2, "a plan of one layer passes for one of two"


def test_every_reason_has_its_case_here():
    assert {reason.name for reason in RebindRefusal} == {
        "RESIDENCY_UNKNOWN",
        "RESIDENCY_DIFFERS",
        "MISSING_SLOT",
        "UNBAKED_SLOT",
        "STORAGE_DIFFERS",
        "POISONED",
    }
