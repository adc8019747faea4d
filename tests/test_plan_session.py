import gc

import numpy as np
import pytest
from helpers.plans import ROWS, Source, Welded, content, filled, held, kv, latent, locations, same, stepped, validity

from lkv import KvCache, KvLayer, LatentKvCache, Storage, errors
from lkv._storage import host_memory
from lkv.cache.persistent import PersistentCache
from lkv.ids import AllocId
from lkv.plan import DecodeSession, KvRebindSource, PlanValidity, RebindRefusal, RebindRefused
from lkv.plan import session as session_module

CACHES = {
    "one": lambda seed=0: latent(1, seed),
    "two": lambda seed=0: latent(2, seed),
    "three": lambda seed=0: latent(3, seed),
    "packed": lambda seed=0: latent(3, seed, layout="packed"),
    "kv": kv,
}
every_cache = pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)

CHANGES = {
    "clear": lambda cache: cache.clear(),
    "repopulate": lambda cache: cache.repopulate(),
    "clear and repopulate": lambda cache: (cache.clear(), cache.repopulate()),
}
KEEPS = {
    "truncate": lambda cache: cache.truncate_to(1),
    "wipe": lambda cache: cache.wipe(),
    "steps": lambda cache: stepped(cache, 2, 5),
    "versions": lambda cache: [cache.bump_version(0, slot) for slot in range(cache.n_slots)],
    "a reader": lambda cache: cache.read(0).release(),
}


def test_the_persistent_caches_are_sources():
    assert isinstance(latent(), KvRebindSource)
    assert isinstance(kv(), KvRebindSource)
    assert not isinstance(object(), KvRebindSource)


@every_cache
def test_a_session_reads_what_it_was_built_over(make):
    cache = make()
    session, plan = held(cache)
    assert validity(session, cache) is PlanValidity.VALID
    assert same(session.run(), content(cache))
    assert session.storages == {key: cache.slot_storage(*key) for key in content(cache)}
    assert (session.alloc_id, session.location) == (cache.alloc_id, cache.device_location)
    assert plan.events[0] == "invalidate"


@every_cache
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_new_memory_changes_the_allocation(make, change):
    cache = make()
    session, _ = held(cache)
    change(cache)
    assert validity(session, cache) is PlanValidity.ALLOCATION_CHANGED


@every_cache
@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
def test_the_same_memory_leaves_the_plan_valid(make, keep):
    cache = make()
    session, plan = held(cache)
    keep(cache)
    assert validity(session, cache) is PlanValidity.VALID
    before = len(plan.events)
    session.rebind_kv(cache)
    assert len(plan.events) == before, "a valid plan was touched"
    assert same(session.run(), content(cache))


@every_cache
def test_a_cache_of_the_same_geometry_changes_the_allocation_and_is_read_after_a_rebind(make):
    first, second = make(1), make(2)
    session, _ = held(first)
    assert validity(session, second) is PlanValidity.ALLOCATION_CHANGED
    assert not same(content(first), content(second))
    session.rebind_kv(second)
    assert validity(session, second) is PlanValidity.VALID
    assert validity(session, first) is PlanValidity.ALLOCATION_CHANGED
    assert same(session.run(), content(second))


@every_cache
def test_control_without_new_ids_the_plan_passes_for_valid_and_reads_another_request(make, monkeypatch):
    cache = make(1)
    session, _ = held(cache)
    before = cache.alloc_id
    monkeypatch.setattr(AllocId, "next", classmethod(lambda cls: before))
    cache.repopulate()
    filled(cache, 2)
    assert validity(session, cache) is PlanValidity.VALID
    assert not same(session.run(), content(cache))


@every_cache
def test_control_with_an_id_for_every_step_a_good_plan_is_thrown_away(make, monkeypatch):
    cache = make()
    session, _ = held(cache)
    monkeypatch.setattr(PersistentCache, "alloc_id", property(lambda self: AllocId.next()))
    assert validity(session, cache) is not PlanValidity.VALID


def test_set_layer_changes_the_allocation():
    cache = KvCache.with_capacity(2, 2, 4, ROWS, "float32")
    session, _ = held(cache)
    cache.set_layer(1, KvLayer.allocate(2, 4, ROWS, "float32"))
    assert validity(session, cache) is PlanValidity.ALLOCATION_CHANGED
    with pytest.raises(RebindRefused) as refused:
        session.rebind_kv(cache)
    assert refused.value.reason is RebindRefusal.RESIDENCY_UNKNOWN


@pytest.mark.parametrize(
    "changed",
    [{"seq": 2}, {"max_seq_len": 9}, {"n_layers": 3}, {"dtype": "int32"}, {"shape_key": 8}],
    ids=lambda changed: next(iter(changed)),
)
def test_another_geometry_is_stale_even_under_the_same_id(changed):
    cache = latent()
    session, _ = held(cache)
    wanted = {
        "seq": 1,
        "max_seq_len": ROWS,
        "n_layers": 2,
        "dtype": "f32",
        "shape_key": 7,
        "alloc_id": cache.alloc_id,
    }
    assert session.is_valid_for(**wanted)
    assert session.validity_for(**wanted | changed) is PlanValidity.STALE
    assert not session.is_valid_for(**wanted | changed)


def test_a_session_keeps_the_memory_of_a_cache_that_is_gone():
    cache = latent(3, 1)
    expected = content(cache)
    session, _ = held(cache)
    gc.collect()
    live = host_memory()["live_buffers"]
    del cache
    gc.collect()
    assert host_memory()["live_buffers"] == live
    others = [latent(3, seed) for seed in range(2, 20)]
    assert same(session.run(), expected)
    del others


def test_control_a_session_that_holds_no_storages_loses_the_memory():
    cache = latent(3, 1)
    session, _ = held(cache)
    session._baked = session._baked._replace(slots={})
    gc.collect()
    live = host_memory()["live_buffers"]
    del cache
    gc.collect()
    assert host_memory()["live_buffers"] == live - 6


def test_a_rebound_session_lets_the_old_memory_go():
    first, second = latent(2, 1), latent(2, 2)
    session, _ = held(first)
    session.rebind_kv(second)
    gc.collect()
    live = host_memory()["live_buffers"]
    del first
    gc.collect()
    assert host_memory()["live_buffers"] == live - 4


def test_memory_that_a_session_holds_is_not_handed_out_again():
    where = locations()["recycling:0"]
    cache = latent(2, 1, device=where)
    session, plan = held(cache)
    del cache
    gc.collect()
    again = latent(2, 2, device=where)
    assert {s.address for s in again._storages()}.isdisjoint(plan.addresses.values())
    assert validity(session, again) is PlanValidity.ALLOCATION_CHANGED


def test_a_cache_made_again_at_the_same_addresses_is_another_allocation():
    where = locations()["recycling:0"]
    cache = latent(2, 1, device=where)
    session, plan = held(cache)
    session._baked = session._baked._replace(slots={})  # nobody holds the memory: the worst case
    before = {storage.id for storage in cache._storages()}
    del cache
    gc.collect()
    again = latent(2, 2, device=where)
    assert {s.address for s in again._storages()} == set(plan.addresses.values()), "the case is not reached"
    assert before.isdisjoint(storage.id for storage in again._storages())
    assert validity(session, again) is PlanValidity.ALLOCATION_CHANGED


def test_a_capture_is_invalidated_before_the_first_pointer_moves():
    first, second = latent(2, 1), latent(2, 2)
    session, plan = held(first, capture=True)
    session.run()
    plan.events.clear()
    session.rebind_kv(second)
    assert plan.events == ["invalidate", *["bind"] * 4]
    assert same(session.run(), content(second))


def test_a_capture_is_invalidated_also_when_the_rebind_is_then_refused():
    session, plan = held(latent(2, 1), capture=True)
    session.run()
    before = dict(plan.addresses)
    plan.events.clear()
    with pytest.raises(RebindRefused):
        session.rebind_kv(latent(3, 2))
    assert plan.events == ["invalidate"]
    assert plan.captured is None
    assert plan.addresses == before


def test_control_a_capture_that_survives_a_rebind_replays_the_old_rows(monkeypatch):
    first, second = latent(2, 1), latent(2, 2)
    session, plan = held(first, capture=True)
    session.run()
    monkeypatch.setattr(DecodeSession, "_invalidate", lambda self: None)
    session.rebind_kv(second)
    assert plan.addresses == {key: storage.address for key, storage in session.storages.items()}
    assert same(session.run(), content(first)), "the contamination is not shown"


def almost(cache):
    """The cache's slots with a storage too wide in the last place."""
    storages = {
        (layer, which): cache.slot_storage(layer, which)
        for layer in range(cache.n_layers)
        for which in range(cache.n_slots)
    }
    return Source(storages | {(2, 1): Storage((ROWS, 4), "float32")}, location=cache.device_location)


def plain(cache):
    return Source(
        {
            (layer, which): cache.slot_storage(layer, which)
            for layer in range(cache.n_layers)
            for which in range(cache.n_slots)
        },
        location=cache.device_location,
    )


def test_a_refusal_at_the_last_slot_of_the_last_layer_leaves_every_binding():
    first, second = latent(2, 1, layers=3), latent(2, 2, layers=3)
    source = plain(first)
    session, plan = held(source)
    before, alloc_id = dict(plan.addresses), session.alloc_id
    with pytest.raises(RebindRefused) as refused:
        session.rebind_kv(almost(second))
    assert (refused.value.layer, refused.value.which) == (2, 1)
    assert (plan.addresses, session.alloc_id) == (before, alloc_id)
    assert validity(session, source) is PlanValidity.VALID
    assert same(session.run(), content(first))


def test_control_switching_while_comparing_mixes_two_requests(monkeypatch):
    first, second = latent(2, 1, layers=3), latent(2, 2, layers=3)
    session, plan = held(plain(first))
    real = session_module.refusal

    def eager(baked, incoming):
        for key, slot in incoming.slots.items():
            if slot.form == baked.slots[key].form:
                plan.bind(*key, slot.storage)
        return real(baked, incoming)

    monkeypatch.setattr(session_module, "refusal", eager)
    with pytest.raises(RebindRefused):
        session.rebind_kv(almost(second))
    seen = session.run()
    assert not same(seen, content(first))
    assert np.array_equal(seen[2, 1], content(first)[2, 1])
    assert np.array_equal(seen[0, 0], content(second)[0, 0])


@pytest.mark.parametrize("fail_at", [5, 6, 8])
def test_a_bind_that_fails_is_undone(fail_at):
    first, second = latent(2, 1), latent(2, 2)
    session, _ = held(first, fail_at={fail_at})
    with pytest.raises(RuntimeError, match=f"bind {fail_at} failed"):
        session.rebind_kv(second)
    assert validity(session, first) is PlanValidity.VALID
    assert same(session.run(), content(first))
    session.rebind_kv(second)
    assert same(session.run(), content(second))


def test_control_without_the_undoing_the_plan_reads_two_requests(monkeypatch):
    first, second = latent(2, 1), latent(2, 2)
    session, _ = held(first, fail_at={7})
    monkeypatch.setattr(DecodeSession, "_undo", lambda *args: None)
    with pytest.raises(RuntimeError):
        session.rebind_kv(second)
    seen = session.run()
    assert np.array_equal(seen[0, 0], content(second)[0, 0])
    assert np.array_equal(seen[1, 1], content(first)[1, 1])


def test_a_session_whose_switch_cannot_be_undone_never_runs_again():
    first, second = latent(2, 1), latent(2, 2)
    session, _ = held(first, fail_at={7, 8})
    with pytest.raises(RuntimeError):
        session.rebind_kv(second)
    assert validity(session, first) is validity(session, second) is PlanValidity.STALE
    with pytest.raises(errors.PoisonedError):
        session.run()
    with pytest.raises(RebindRefused) as refused:
        session.rebind_kv(second)
    assert refused.value.reason is RebindRefusal.POISONED
    assert "mixed" in repr(session)


def test_a_session_may_be_taken_and_moved_inside_a_step_of_the_same_thread():
    first, second = latent(2, 1), latent(2, 2)
    with first.step(1) as step:
        session, _ = held(first)
        step.abandon()
    with second.step(1) as step:
        session.rebind_kv(second)
        assert same(session.run(), content(second))
        step.abandon()


def test_a_pipeline_stage_binds_only_its_layers():
    stage = LatentKvCache.with_capacity(4, ROWS, [(8,), (3,)], "float32", layers=[1, 2])
    session, plan = held(stage)
    assert set(plan.addresses) == {(1, 0), (1, 1), (2, 0), (2, 1)}
    other = LatentKvCache.with_capacity(4, ROWS, [(8,), (3,)], "float32", layers=[2, 3])
    with pytest.raises(RebindRefused) as refused:
        session.rebind_kv(other)
    assert refused.value.reason is RebindRefusal.MISSING_SLOT
    assert refused.value.layer == 1


def test_bad_arguments_are_named():
    cache = latent()
    with pytest.raises(errors.ArgumentTypeError, match="plan: expected bind"):
        DecodeSession(object(), cache, seq=1, shape_key=0)
    with pytest.raises(errors.ArgumentTypeError, match="source: expected a cache"):
        DecodeSession(Welded(), object(), seq=1, shape_key=0)
    with pytest.raises(errors.GeometryError, match="seq"):
        DecodeSession(Welded(), cache, seq=0, shape_key=0)
    with pytest.raises(errors.ArgumentTypeError, match="shape_key"):
        DecodeSession(Welded(), cache, seq=1, shape_key="a")
    with pytest.raises(errors.ArgumentTypeError, match="source"):
        held(cache)[0].rebind_kv(None)


def test_no_plan_is_built_over_nothing_or_over_damage():
    cache = latent()
    cache.clear()
    with pytest.raises(errors.UnpopulatedLayerError, match="got none"):
        held(cache)
    cache.repopulate()
    with pytest.raises(ValueError), cache.slot_storage(1, 1).write():
        raise ValueError
    with pytest.raises(errors.PoisonedError, match="layer 1, slot 1"):
        held(cache)


def test_a_session_tells_its_state():
    cache = latent()
    session, _ = held(cache)
    assert repr(session) == (
        f"DecodeSession(Welded, seq 1, 2 layers, 4 slots, 8 rows, float32, cpu, alloc {int(cache.alloc_id)})"
    )
