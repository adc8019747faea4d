"""Held CUDA plans over caches on the device: everything but the capture itself, which needs a GPU."""

import numpy as np
import pytest
from helpers.cuda import needs_cuda

from lkv import KvCache, LatentKvCache
from lkv.plan import CudaGraphPlan, DecodeSession, PlanValidity, RebindRefusal, RebindRefused

pytestmark = needs_cuda


def latent(device="cuda:0", rows=8):
    cache = LatentKvCache.with_capacity(2, rows, [(4,), (2,)], "float32", device)
    with cache.step(1) as step:
        for layer in range(2):
            step.append(layer, [np.ones((1, 4), "f4"), np.ones((1, 2), "f4")])
    return cache


def held(cache):
    plan = CudaGraphPlan(lambda buffers, inputs: None)
    return DecodeSession(plan, cache, seq=1, shape_key=0), plan


def addresses(plan):
    return [array.data.ptr for layer in plan.buffers for array in layer]


def storages(cache):
    return [cache.slot_storage(layer, slot).address for layer in range(2) for slot in range(2)]


def test_a_plan_holds_the_cache_s_own_addresses():
    cache = latent()
    _, plan = held(cache)
    assert addresses(plan) == storages(cache)
    assert not plan.captured


def test_a_rebound_plan_holds_the_other_cache_s_addresses():
    first, second = latent(), latent()
    session, plan = held(first)
    plan._graph = object()  # as if captured
    session.rebind_kv(second)
    assert not plan.captured
    assert addresses(plan) == storages(second)
    assert not set(addresses(plan)) & set(storages(first))


def test_more_steps_keep_a_plan_and_new_memory_does_not():
    cache = latent()
    session, _ = held(cache)

    def validity():
        return session.validity_for(1, cache.max_seq_len, cache.n_layers, cache.dtype, 0, cache.alloc_id)

    cache.append(0, [np.ones((1, 4), "f4"), np.ones((1, 2), "f4")])
    cache.truncate_to(0)
    cache.wipe()
    assert validity() is PlanValidity.VALID
    cache.repopulate()
    assert validity() is PlanValidity.ALLOCATION_CHANGED


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_cache_elsewhere_is_refused_and_the_plan_stays_as_it_was(device):
    cache = latent()
    session, plan = held(cache)
    before = addresses(plan)
    with pytest.raises(RebindRefused) as caught:
        session.rebind_kv(latent(device))
    assert caught.value.reason is RebindRefusal.RESIDENCY_DIFFERS
    assert addresses(plan) == before


def test_another_capacity_is_refused():
    session, _ = held(latent())
    with pytest.raises(RebindRefused) as caught:
        session.rebind_kv(latent(rows=16))
    assert caught.value.reason is RebindRefusal.STORAGE_DIFFERS


def test_a_session_keeps_device_memory_of_a_cache_that_is_gone():
    cache = KvCache.with_capacity(1, 2, 4, 8, "float16", "cuda:0")
    session, plan = held(cache)
    kept = [cache.slot_storage(0, slot).address for slot in range(2)]
    cache.clear()
    del cache
    assert addresses(plan) == kept and session.plan is plan
