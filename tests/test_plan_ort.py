"""A decode step of an MLA stack in ONNX Runtime, bound to a cache's own memory."""

import numpy as np
import pytest

from lkv import LatentKvCache, errors
from lkv.mla import PRESETS, MLAConfig
from lkv.mla.stack import MLAStack
from lkv.plan import DecodeSession, RebindRefusal, RebindRefused, RefreshCounters, refresh_session

pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from lkv.mla.onnx_step import decode_feeds, decode_model  # noqa: E402
from lkv.plan import OrtPlan  # noqa: E402

ROWS, LAYERS, VOCAB = 32, 3, 64
CONFIG = PRESETS["tiny"]
REQUEST_A, REQUEST_B = [3, 14, 15, 9, 26, 5], [27, 18, 28, 18, 28, 45]


def stack_of(config):
    stack = MLAStack(config, LAYERS, VOCAB, seed=1)
    list(stack.build())
    return stack


@pytest.fixture(scope="module")
def stack():
    return stack_of(CONFIG)


@pytest.fixture(scope="module")
def model(stack):
    return decode_model(stack, seq=1, max_seq_len=ROWS)


def new_cache(rows=ROWS, config=CONFIG, **more):
    return LatentKvCache.with_capacity(LAYERS, rows, config.slot_trailing, "float32", **more)


def new_session(model, cache, seq=1):
    return DecodeSession(OrtPlan(model, threads=1), cache, seq=seq, shape_key=0)


def decode(session, cache, tokens, config=CONFIG):
    """Run tokens through the plan, append what they leave behind, and return the logits."""
    logits = []
    for at in range(0, len(tokens), session.seq):
        with cache.step(session.seq) as step:
            out = session.run(**decode_feeds(config, np.array(tokens[at : at + session.seq]), step.start))
            for layer in range(cache.n_layers):
                step.append(layer, [out[f"c_kv.{layer}"], out[f"k_pe.{layer}"]])
            logits.append(out["logits"].copy())
    return np.concatenate(logits)


def without_cache(stack, tokens):
    hidden = stack.forward(np.array(tokens), np.arange(len(tokens)), lambda layer, *rows: rows)
    return stack.logits(hidden)


@pytest.mark.parametrize("seq", [1, 2, 3])
@pytest.mark.parametrize("config", [CONFIG, MLAConfig(48, 3, 2, 16, 8, 4, 8)], ids=["q_lora", "direct"])
def test_the_step_equals_attention_without_a_cache(config, seq):
    stack = stack_of(config)
    cache = new_cache(config=config)
    session = new_session(decode_model(stack, seq=seq, max_seq_len=ROWS), cache, seq)
    got = decode(session, cache, REQUEST_A, config)
    np.testing.assert_allclose(got, without_cache(stack, REQUEST_A), rtol=0, atol=2e-5)
    assert cache.cached_len == len(REQUEST_A)


def test_the_plan_reads_the_caches_own_memory(model):
    first, second = new_cache(), new_cache()
    session = new_session(model, first)
    for cache in (first, second):
        session.rebind_kv(cache)
        for layer in range(LAYERS):
            for which in range(2):
                assert session.plan.address(layer, which) == cache.slot_storage(layer, which).address


def test_after_a_swap_the_logits_equal_those_of_a_plan_built_anew(model):
    first, second, beside = new_cache(), new_cache(), new_cache()
    held = new_session(model, first)
    decode(held, first, REQUEST_A)
    decode(new_session(model, second), second, REQUEST_B[:-1])
    decode(new_session(model, beside), beside, REQUEST_B[:-1])
    held.rebind_kv(second)
    rebound = decode(held, second, REQUEST_B[-1:])
    fresh = decode(new_session(model, beside), beside, REQUEST_B[-1:])
    assert np.abs(rebound - fresh).max() == 0


def test_control_with_the_rebind_gutted_the_logits_drift(model, monkeypatch):
    first, second, beside = new_cache(), new_cache(), new_cache()
    held = new_session(model, first)
    decode(held, first, REQUEST_A)
    decode(new_session(model, second), second, REQUEST_B[:-1])
    decode(new_session(model, beside), beside, REQUEST_B[:-1])
    monkeypatch.setattr(DecodeSession, "_switch", lambda self, incoming: None)
    held.rebind_kv(second)
    drift = np.abs(
        decode(held, second, REQUEST_B[-1:]) - decode(new_session(model, beside), beside, REQUEST_B[-1:])
    ).max()
    print(f"drift {drift:.3f}")
    assert drift > 0.1, f"the gutted re-bind went unnoticed: drift {drift}"


@pytest.mark.parametrize("reuse", ["new", "repopulate", "wipe"])
def test_a_retired_requests_rows_never_reach_the_next_one(model, reuse):
    counters, cache = RefreshCounters(), new_cache()
    session = None
    outputs = []
    for tokens in (REQUEST_A, REQUEST_B, REQUEST_A):
        session = refresh_session(
            session, cache, lambda source: OrtPlan(model, threads=1), seq=1, shape_key=0, counters=counters
        )
        outputs.append(decode(session, cache, tokens))
        if reuse == "new":
            cache = new_cache()
        else:
            getattr(cache, reuse)()
    assert np.array_equal(outputs[0], outputs[2])
    alone = new_cache()
    assert np.array_equal(outputs[1], decode(new_session(model, alone), alone, REQUEST_B))
    saved = {"built": 1, "kept": 2} if reuse == "wipe" else {"built": 1, "rebound": 2}
    assert {name: n for name, n in counters.as_dict().items() if n} == saved


def test_rows_behind_the_length_weigh_nothing(model):
    clean, dirty = new_cache(), new_cache()
    expected = decode(new_session(model, clean), clean, REQUEST_A[:3])
    session = new_session(model, dirty)
    decode(session, dirty, REQUEST_B)
    dirty.truncate_to(0)
    assert np.array_equal(decode(session, dirty, REQUEST_A[:3]), expected)


def test_a_session_outlives_its_cache(model):
    cache = new_cache()
    session = new_session(model, cache)
    decode(session, cache, REQUEST_A)
    feeds = decode_feeds(CONFIG, np.array([1]), cache.cached_len)
    expected = session.run(**feeds)["logits"].copy()
    del cache
    others = [new_cache() for _ in range(10)]
    for other in others:
        decode(new_session(model, other), other, REQUEST_B[:1])
    assert np.array_equal(session.run(**feeds)["logits"], expected)


@pytest.mark.parametrize("rows", [16, 64])
def test_another_capacity_is_refused(model, rows):
    first = new_cache()
    session = new_session(model, first)
    expected = decode(session, first, REQUEST_A[:2])
    with pytest.raises(RebindRefused) as refused:
        session.rebind_kv(new_cache(rows))
    assert refused.value.reason is RebindRefusal.STORAGE_DIFFERS
    first.truncate_to(0)
    assert np.array_equal(decode(session, first, REQUEST_A[:2]), expected)


def test_a_plan_takes_only_what_its_model_takes(model):
    with pytest.raises(errors.ShapeMismatchError, match=r"cache\.0\.0: expected \(32, 64\), got \(16, 64\)"):
        new_session(model, new_cache(16))
    with pytest.raises(errors.DTypeMismatchError, match="expected tensor\\(float\\), got tensor\\(bfloat16\\)"):
        new_session(model, LatentKvCache.with_capacity(LAYERS, ROWS, CONFIG.slot_trailing, "bfloat16"))
    with pytest.raises(errors.LayerIndexError, match="no input"):
        new_session(model, LatentKvCache.with_capacity(LAYERS + 1, ROWS, CONFIG.slot_trailing, "float32"))
    session = new_session(model, new_cache())
    feeds = decode_feeds(CONFIG, np.array([1]), 0)
    with pytest.raises(errors.ArgumentTypeError, match="no input 'tokens'"):
        session.run(tokens=[1])
    with pytest.raises(errors.DTypeMismatchError, match="token_ids"):
        session.run(**feeds | {"token_ids": np.array([1], np.int32)})
    with pytest.raises(errors.ShapeMismatchError, match="token_ids"):
        session.run(**feeds | {"token_ids": np.array([1, 2])})


def test_plans_may_share_one_runtime_session(model):
    shared = OrtPlan(model, threads=1).session
    first, second = new_cache(), new_cache()
    one = DecodeSession(OrtPlan(shared), first, seq=1, shape_key=0)
    two = DecodeSession(OrtPlan(shared), second, seq=1, shape_key=0)
    got = [], []
    for a, b in zip(REQUEST_A, REQUEST_B, strict=True):
        got[0].append(decode(one, first, [a]))
        got[1].append(decode(two, second, [b]))
    for tokens, logits in zip((REQUEST_A, REQUEST_B), got, strict=True):
        alone = new_cache()
        assert np.array_equal(np.concatenate(logits), decode(new_session(model, alone), alone, tokens))


def test_a_provider_that_captures_by_itself_is_refused(model, monkeypatch):
    class Capturing(ort.InferenceSession):
        def get_provider_options(self):
            return {"CUDAExecutionProvider": {"enable_cuda_graph": "1"}}

    with pytest.raises(errors.ArgumentTypeError, match="enable_cuda_graph"):
        OrtPlan(Capturing(model, providers=["CPUExecutionProvider"]))


def test_a_model_without_fixed_shapes_is_refused():
    import onnx

    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n"])
    out = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n"])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Neg", ["x"], ["y"])], "g", [value], [out])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    with pytest.raises(errors.GeometryError, match="x: expected a fixed shape"):
        OrtPlan(model.SerializeToString())
