import numpy as np
import pytest
from helpers.plans import content, filled, held, kv, latent, same

from lkv import Storage, errors
from lkv.plan import CallablePlan, DecodeSession, Plan, RebindRefused, TorchPlan


def read_all(buffers):
    return {
        (layer, which): np.from_dlpack(array).copy()
        for layer, slots in enumerate(buffers)
        for which, array in enumerate(slots)
        if array is not None
    }


@pytest.mark.parametrize("make", [lambda seed: latent(1, seed), lambda seed: latent(3, seed), kv], ids=["1", "3", "kv"])
@pytest.mark.parametrize("kind", [CallablePlan, TorchPlan])
def test_a_function_reads_whatever_its_plan_is_bound_to(kind, make):
    if kind is TorchPlan:
        pytest.importorskip("torch")
    first, second = make(1), make(2)
    plan = kind(read_all)
    assert isinstance(plan, Plan)
    session = DecodeSession(plan, first, seq=1, shape_key=0)
    assert same(session.run(), content(first))
    session.rebind_kv(second)
    assert same(session.run(), content(second))
    second.wipe()
    filled(second, 3)
    assert same(session.run(), content(second)), "the arrays are aliases"


def test_arguments_go_through_and_layers_without_storage_are_none():
    from lkv import LatentKvCache

    stage = LatentKvCache.with_capacity(3, 4, [(2,)], "float32", layers=[1])
    plan = CallablePlan(lambda buffers, a, *, b: (buffers, a, b))
    buffers, a, b = DecodeSession(plan, stage, seq=1, shape_key=0).run(1, b=2)
    assert (a, b) == (1, 2)
    assert buffers[0] == (None,)
    assert buffers[1][0].shape == (4, 2)
    assert CallablePlan(len).run() == 0


def attention(buffers, query, length):
    import torch

    (c_kv, k_pe) = buffers[0]
    scores = query[:8] @ c_kv.T + query[8:] @ k_pe.T
    hidden = torch.arange(c_kv.shape[0]) >= length
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), 0) @ c_kv


def test_a_torch_step_over_a_swapped_cache_equals_a_fresh_one(monkeypatch):
    torch = pytest.importorskip("torch")
    first, second = latent(2, 1, layers=1), latent(2, 2, layers=1)
    query, length = torch.linspace(-1, 1, 11), torch.tensor(3)
    session = DecodeSession(TorchPlan(attention), first, seq=1, shape_key=0)
    before = session.run(query, length)
    fresh = DecodeSession(TorchPlan(attention), second, seq=1, shape_key=0).run(query, length)
    assert session.plan.buffers[0][0].data_ptr() == first.slot_storage(0, 0).address
    with monkeypatch.context() as patch:
        patch.setattr(DecodeSession, "_switch", lambda self, incoming: None)
        session.rebind_kv(second)
        assert (session.run(query, length) - fresh).abs().max() > 1, "the drift is not shown"
    session.rebind_kv(second)
    assert session.plan.buffers[0][0].data_ptr() == second.slot_storage(0, 0).address
    assert torch.equal(session.run(query, length), fresh)
    assert not torch.equal(before, fresh)
    with pytest.raises(RebindRefused):
        session.rebind_kv(latent(1, 1, layers=1))
    assert torch.equal(session.run(query, length), fresh)


def test_a_compiled_step_is_rebound_without_compiling_again():
    torch = pytest.importorskip("torch")
    compiled = []

    def count(module, examples):
        compiled.append(1)
        return module.forward

    first, second = latent(2, 1, layers=1), latent(2, 2, layers=1)
    query, length = torch.linspace(-1, 1, 11), torch.tensor(3)
    eager = DecodeSession(TorchPlan(attention), second, seq=1, shape_key=0).run(query, length)
    session = DecodeSession(TorchPlan(attention, compile={"backend": count}), first, seq=1, shape_key=0)
    session.run(query, length)
    session.rebind_kv(second)
    assert torch.equal(session.run(query, length), eager)
    assert compiled == [1]


def test_a_plan_that_is_run_by_hand_is_seen_by_its_session():
    session, plan = held(latent(2, 1))
    assert same(plan.run(), session.run())


def test_only_storages_are_bound_at_layers_and_slots():
    plan, storage = CallablePlan(lambda buffers: buffers), Storage(4)
    with pytest.raises(errors.ArgumentTypeError, match="storage: expected a Storage, got NoneType"):
        plan.bind(0, 0, None)
    with pytest.raises(errors.GeometryError, match="layer: expected"):
        plan.bind(-1, 0, storage)
    with pytest.raises(errors.ArgumentTypeError, match="which: expected"):
        plan.bind(0, "k", storage)
    assert plan.run() == ()
