import copy
import pickle

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from helpers.hf_cache import Unchanged, dynamic, model_of, push, random_rows, rows_of, same  # noqa: E402
from helpers.hf_runs import one_thread  # noqa: E402, F401
from helpers.ids import named  # noqa: E402
from helpers.memory import resident_of  # noqa: E402

from lkv import DType, LatentKvCache  # noqa: E402
from lkv._storage import host_memory  # noqa: E402
from lkv.errors import (  # noqa: E402
    ArgumentTypeError,
    CapacityError,
    DeviceUnavailableError,
    DTypeMismatchError,
    GeometryError,
    OutOfMemoryError,
    ShapeMismatchError,
)
from lkv.integrations.transformers import LkvCache  # noqa: E402

LAYERS = 3
NO_INTEGERS = [True, False, 1.0, 2.5, None, "1", [1]]


@pytest.fixture(scope="module")
def model():
    return model_of("deepseek_v3")


@pytest.fixture
def cache(model):
    return LkvCache(model, 16)


@pytest.fixture
def both(model, cache):
    """The cache and transformers' own, with the same five rows of three sequences."""
    own = dynamic()
    for each in (cache, own):
        push(each, 5, batch=3)
    return cache, own


# ---- update ----


def test_update_returns_all_rows_of_the_layer_bit_for_bit(cache):
    own = dynamic()
    for seed, n in enumerate((4, 1, 3)):
        for ours, theirs in zip(push(cache, n, seed=seed), push(own, n, seed=seed), strict=True):
            same(ours, theirs)
    assert cache.get_seq_length() == own.get_seq_length() == 8


def test_update_returns_aliases_of_the_caches_own_memory(cache):
    push(cache, 4)
    (latents,) = cache.caches
    for index, (keys, values) in enumerate(push(cache, 2, seed=1)):
        for slot, rows in enumerate((keys, values)):
            storage = latents.slot_storage(index, slot)
            assert rows.data_ptr() == storage.address
            assert rows.shape == (2, 1, 6, (32, 8)[slot])
            assert rows.stride()[0] == rows.shape[3]
            assert rows.stride()[2] == 2 * rows.shape[3]  # a row is both sequences
            assert not rows.requires_grad
    before = cache.layers[1].keys[0, 0, 3, 5].item()
    with latents.slot_storage(1, 0).write(3, 4) as lease:
        lease.torch()[0, 0, 5] = before + 1
    assert cache.layers[1].keys[0, 0, 3, 5].item() == before + 1


def test_every_update_is_one_append_and_every_pass_one_advance(cache, monkeypatch):
    calls = []
    for name in ("append", "advance_by"):
        method = getattr(LatentKvCache, name)
        counted = lambda self, *args, name=name, method=method: (calls.append((name, args[0])), method(self, *args))[1]  # noqa: E731
        monkeypatch.setattr(LatentKvCache, name, counted)
    for seed in range(3):
        push(cache, 2, seed=seed)
    assert calls == 3 * [("append", 0), ("append", 1), ("append", 2), ("advance_by", 2)]
    assert len(cache.caches) == 1


def test_rows_of_one_layer_count_when_the_last_layer_has_them(cache):
    push(cache, 4)
    for layer in range(LAYERS):
        assert cache.get_seq_length() == cache.get_seq_length(layer) == cache.caches[0].cached_len == 4
        assert cache.get_mask_sizes(2, layer) == (6, 0)
        cache.update(*random_rows((32, 8), 2, seed=layer), layer)
        assert cache.layers[layer].get_seq_length() == 6
    assert cache.get_seq_length() == cache.caches[0].cached_len == 6


def test_keys_and_values_are_what_a_dynamic_cache_has(both):
    cache, own = both
    same(rows_of(cache), rows_of(own))
    assert [layer.keys.shape for layer in cache.layers] == LAYERS * [(3, 1, 5, 32)]
    assert [layer.values.shape for layer in cache.layers] == LAYERS * [(3, 1, 5, 8)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows_keep_their_element_type(cache, dtype):
    own = dynamic()
    for seed in range(2):
        for each in (cache, own):
            push(each, 3, dtype=dtype, seed=seed)
    assert cache.layers[0].keys.dtype == dtype
    same(rows_of(cache), rows_of(own))


def test_rows_may_be_of_any_strides(cache):
    latent, rope = random_rows((32, 8), 6)
    for layer in range(LAYERS):
        cache.update(latent.transpose(0, 2).contiguous().transpose(0, 2), torch.cat([rope, rope], -1)[..., 8:], layer)
    assert torch.equal(cache.layers[2].keys, latent)
    assert torch.equal(cache.layers[2].values, rope)


def test_a_pass_of_no_rows_changes_nothing(cache):
    push(cache, 0)
    assert cache.get_seq_length() == 0
    push(cache, 4)
    before = rows_of(cache)
    for keys, _ in push(cache, 0, seed=1):
        assert keys.shape == (2, 1, 4, 32)
    same(rows_of(cache), before)


def test_expanded_keys_and_values_are_refused(cache):
    push(cache, 3)
    with Unchanged(cache):
        with pytest.raises(ShapeMismatchError, match=r"c_kv.*32.*24"):
            cache.update(*random_rows((24, 16), 1, heads=4), 0)
        with pytest.raises(ShapeMismatchError, match="c_kv"):
            cache.update(*random_rows((32, 8), 1, heads=4), 0)
    fresh = LkvCache(model_of("deepseek_v3"), 16)
    with pytest.raises(ShapeMismatchError, match=r"layer 0, c_kv: expected \[batch, 1, n, 32\], got \[2, 4, 1, 24\]"):
        fresh.update(*random_rows((24, 16), 1, heads=4), 0)
    assert fresh.caches == ()


@pytest.mark.parametrize(
    ("error", "rows"),
    [
        (ShapeMismatchError, lambda: random_rows((31, 8), 1)),
        (ShapeMismatchError, lambda: random_rows((32, 9), 1)),
        (ShapeMismatchError, lambda: random_rows((32, 8), 1, batch=3)),
        (ShapeMismatchError, lambda: [rows[0] for rows in random_rows((32, 8), 1)]),
        (ShapeMismatchError, lambda: [random_rows((32,), 1)[0], random_rows((8,), 2)[0]]),
        (ShapeMismatchError, lambda: [random_rows((32,), 1)[0], random_rows((8,), 1, batch=1)[0]]),
        (DTypeMismatchError, lambda: random_rows((32, 8), 1, dtype=torch.bfloat16)),
        (CapacityError, lambda: random_rows((32, 8), 14)),
    ],
    ids=["wide latent", "wide key", "batch", "three dims", "rows differ", "batches differ", "dtype", "capacity"],
)
def test_rows_that_do_not_fit_are_refused_and_nothing_changes(cache, error, rows):
    push(cache, 3)
    with Unchanged(cache), pytest.raises(error):
        cache.update(*rows(), 0)
    push(cache, 13, seed=1)
    assert cache.get_seq_length() == 16
    with Unchanged(cache), pytest.raises(CapacityError):
        push(cache, 1)


def test_layers_of_one_pass_have_the_same_number_of_rows(cache):
    push(cache, 2)
    cache.update(*random_rows((32, 8), 3), 0)
    with pytest.raises(ShapeMismatchError, match="layer 1: expected 3 rows"):
        cache.update(*random_rows((32, 8), 2), 1)
    assert cache.get_seq_length() == 2


# ---- what transformers asks ----


def test_an_empty_cache_says_so(cache):
    assert cache.get_seq_length() == cache.get_seq_length(2) == cache.get_seq_length(99) == 0
    assert cache.get_mask_sizes(7, 0) == cache.get_mask_sizes(7, 99) == (7, 0)
    assert cache.caches == ()
    assert cache.nbytes == cache.nbytes_used == 0
    assert "not allocated" in repr(cache)
    for layer in cache.layers:
        assert layer.keys is None
        assert layer.values is None
        assert not layer.is_initialized
        assert not hasattr(layer, "batch_size")
    assert not hasattr(cache, "batch_size") or cache.batch_size == -1


def test_lengths_batch_and_bytes_are_told_from_the_first_rows_on(cache):
    push(cache, 5, batch=3)
    assert cache.batch_size == 3
    assert [layer.batch_size for layer in cache.layers] == LAYERS * [3]
    assert all(layer.is_initialized for layer in cache.layers)
    assert cache.nbytes == 16 * LAYERS * 3 * 40 * 4
    assert cache.nbytes_used == 5 * LAYERS * 3 * 40 * 4
    assert "batch 3" in repr(cache)
    assert "5/16 rows" in repr(cache)
    assert repr(cache.layers[0]) == "LkvLayer(5/16 rows)"


@pytest.mark.parametrize("name", ["get_max_length", "get_max_cache_shape"])
def test_both_names_of_the_capacity_tell_it(cache, name):
    assert getattr(cache, name)() == getattr(cache, name)(1) == getattr(cache.layers[0], name)() == 16


def test_the_flags_are_those_of_a_growing_cache(cache):
    own = dynamic()
    assert cache.is_compileable is False
    assert cache.is_sliding == own.is_sliding
    assert all(layer.is_croppable for layer in cache.layers)
    assert len(cache) == LAYERS


def test_early_initialization_leaves_the_layers_to_the_first_rows(cache):
    cache.early_initialization(2, 1, 32, torch.float32, torch.device("cpu"))
    assert cache.caches == ()
    push(cache, 3)
    assert cache.get_seq_length() == 3


def test_offload_and_prefetch_leave_rows_where_they_are(cache):
    push(cache, 3)
    with Unchanged(cache):
        for layer in cache.layers:
            layer.offload()
            layer.prefetch()


def test_verbs_of_a_single_layer_that_would_tear_steps_apart_are_refused(cache):
    push(cache, 3)
    calls = [
        lambda layer: layer.reset(),
        lambda layer: layer.crop(-1),
        lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
        lambda layer: layer.batch_repeat_interleave(2),
        lambda layer: layer.batch_select_indices([0]),
    ]
    with Unchanged(cache):
        for call in calls:
            with pytest.raises(GeometryError, match="layer 1 shares"):
                call(cache.layers[1])


# ---- crop, crop_to_prefix, reset ----


@pytest.mark.parametrize("count", [-1, -4, -5, -6, -1000, 0])
def test_crop_takes_back_as_many_positions_as_a_dynamic_cache(both, count):
    for each in both:
        each.crop(count)
    cache, own = both
    assert cache.get_seq_length() == max(0, 5 + count)
    if cache.get_seq_length():  # an emptied layer of transformers has lost its shape
        same(rows_of(cache), rows_of(own))
    for each in both:
        if each.get_seq_length():
            push(each, 2, batch=3, seed=7)
            same(rows_of(each)[:1], [rows_of(cache)[0]])


@pytest.mark.parametrize(("length", "kept"), [(1, 1), (4, 4), (5, 5), (6, 5), (2**70, 5)])
def test_crop_takes_a_positive_number_for_the_length_to_keep(both, length, kept):
    cache, _ = both
    before = rows_of(cache)
    cache.crop(length)
    assert cache.get_seq_length() == kept
    same(rows_of(cache), [rows[:, :, :kept] for rows in before])


def test_crop_takes_any_integer(both):
    cache, _ = both
    cache.crop(torch.tensor(-1))
    assert cache.get_seq_length() == 4


@pytest.mark.parametrize("count", [*NO_INTEGERS, torch.tensor(1.5)])
def test_crop_refuses_what_is_no_integer(both, count):
    cache, _ = both
    with Unchanged(cache), pytest.raises(ArgumentTypeError, match="crop"):
        cache.crop(count)


def test_crop_of_an_empty_cache_does_nothing(cache):
    for count in (0, -3, 3):
        cache.crop(count)
    assert cache.get_seq_length() == 0


def test_crop_in_the_middle_of_a_pass_forgets_it(cache):
    push(cache, 4)
    cache.update(*random_rows((32, 8), 2), 0)
    cache.crop(-1)
    assert cache.get_seq_length() == cache.layers[0].get_seq_length() == 3
    push(cache, 1, seed=5)
    assert cache.get_seq_length() == 4


@pytest.mark.parametrize(
    ("cached", "new", "kept"),
    [
        ([1, 2, 3, 4, 5], [1, 2, 3, 9, 9, 9], 3),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], 5),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 4),  # one token is left to compute
        ([1, 2, 3, 4, 5], [1, 2], 1),
        ([1, 2, 3, 4, 5], [9, 2, 3, 4, 5, 6], 0),
        ([1, 2, 3, 4, 5], [1], 0),
        ([1, 2, 3, 4, 5], [], 0),
        ([], [1, 2, 3], 0),
        ([1, 2, 3], [1, 2, 3, 4, 5, 6], 3),  # fewer ids than rows: no more can be known
        ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8], 5),  # the last token was never cached
    ],
)
def test_crop_to_prefix_keeps_the_longest_common_prefix(both, cached, new, kept):
    cache, _ = both
    before = rows_of(cache)
    assert cache.crop_to_prefix(3 * [cached], torch.tensor(3 * [new])) == kept
    assert cache.get_seq_length() == kept
    same(rows_of(cache), [rows[:, :, :kept] for rows in before])


def test_crop_to_prefix_keeps_what_all_sequences_share_and_takes_one_without_a_batch(cache):
    push(cache, 5)
    cached = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]])
    assert cache.crop_to_prefix(cached, torch.tensor([[1, 2, 3, 4, 9], [1, 2, 9, 4, 9]])) == 2
    assert cache.crop_to_prefix(torch.tensor([1, 2, 3]), [1, 7, 8]) == 1
    assert cache.get_seq_length() == 1


@pytest.mark.parametrize("new", [[[1, 2, 3]], [[[1], [2]]], 3 * [[1, 2, 3]], 4])
def test_crop_to_prefix_refuses_another_batch(cache, new):
    push(cache, 3)
    with Unchanged(cache), pytest.raises(ShapeMismatchError, match="input_ids"):
        cache.crop_to_prefix([[1, 2, 3], [1, 2, 3]], new)


def test_crop_to_prefix_of_an_empty_cache_keeps_nothing(cache):
    assert cache.crop_to_prefix([1, 2, 3], [1, 2, 3, 4]) == 0


def test_reset_keeps_the_memory_and_takes_rows_again(cache):
    push(cache, 5)
    latents = cache.caches[0]
    before = latents.alloc_id, latents.slot_storage(0, 0).address
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.layers[0].keys.shape == (2, 1, 0, 32)
    push(cache, 4, seed=3)
    assert cache.caches[0] is latents
    assert (latents.alloc_id, latents.slot_storage(0, 0).address) == before
    own = dynamic()
    push(own, 4, seed=3)
    same(rows_of(cache), rows_of(own))


def test_an_emptied_cache_takes_another_batch_size_and_element_type(cache):
    push(cache, 5)
    cache.reset()
    push(cache, 4, batch=5, dtype=torch.bfloat16)
    assert cache.batch_size == 5
    assert cache.layers[0].keys.dtype == torch.bfloat16
    cache.crop(-4)
    push(cache, 3, batch=1)
    assert cache.layers[2].keys.shape == (1, 1, 3, 32)
    own = dynamic()
    push(own, 3, batch=1)
    same(rows_of(cache), rows_of(own))


# ---- the batch ----


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 1, 0], [2, 2, 2]])
def test_reorder_cache_moves_sequences_as_a_dynamic_cache_does(both, order):
    cache, own = both
    where = cache.caches[0].alloc_id
    for each in both:
        each.reorder_cache(torch.tensor(order))
    same(rows_of(cache), rows_of(own))
    assert cache.caches[0].alloc_id == where
    for each in both:
        push(each, 2, batch=3, seed=4)
    same(rows_of(cache), rows_of(own))


def test_reorder_cache_may_change_the_number_of_sequences(both):
    cache, own = both
    for each in both:
        each.reorder_cache(torch.tensor([2, 0]))
        push(each, 1, batch=2, seed=9)
    same(rows_of(cache), rows_of(own))


@pytest.mark.parametrize("order", [[0, 1, 3], [0, -4, 1], [0.0, 1.0, 2.0], [[0, 1, 2]]])
def test_reorder_cache_refuses_sequences_that_are_not_there(both, order):
    cache, _ = both
    with Unchanged(cache), pytest.raises((IndexError, ShapeMismatchError)):
        cache.reorder_cache(torch.tensor(order))


def test_batch_repeat_interleave_repeats_every_sequence(both):
    cache, own = both
    for each in both:
        each.batch_repeat_interleave(2)
    assert cache.batch_size == 6
    same(rows_of(cache), rows_of(own))
    for each in both:
        push(each, 1, batch=6, seed=1)
    same(rows_of(cache), rows_of(own))


@pytest.mark.parametrize(
    "indices",
    [[0, 2], (2, 0), torch.tensor([1]), torch.tensor([True, False, True]), [False, True, False], [-1], [0, 0]],
)
def test_batch_select_indices_keeps_the_sequences_chosen(both, indices):
    cache, own = both
    cache.batch_select_indices(indices)
    own.batch_select_indices(torch.as_tensor(indices))
    assert cache.batch_size == len(own.layers[0].keys)
    same(rows_of(cache), rows_of(own))


@pytest.mark.parametrize("indices", [[3], [0, -4], [], [False, False, False], [True, False], [0.5], "a", None])
def test_batch_select_indices_refuses_what_is_not_there(both, indices):
    cache, _ = both
    with Unchanged(cache), pytest.raises((IndexError, ValueError, TypeError, RuntimeError)):
        cache.batch_select_indices(indices)


@pytest.mark.parametrize("repeats", [*NO_INTEGERS, 0, -1])
def test_batch_repeat_interleave_refuses_what_is_no_count(both, repeats):
    cache, _ = both
    with Unchanged(cache), pytest.raises((ArgumentTypeError, GeometryError), match="repeats"):
        cache.batch_repeat_interleave(repeats)


def test_the_batch_of_an_empty_cache_can_be_changed(cache):
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices([0])
    assert cache.caches == ()
    cache.open(2)
    cache.batch_repeat_interleave(3)
    assert cache.batch_size == 6


# ---- construction ----


@pytest.mark.parametrize("rows", NO_INTEGERS)
def test_a_capacity_that_is_no_integer_is_refused(model, rows):
    with pytest.raises(ArgumentTypeError, match="max_seq_len"):
        LkvCache(model, rows)


@pytest.mark.parametrize("rows", [0, -1, 2**63, -(2**70)])
def test_a_capacity_out_of_range_is_refused(model, rows):
    with pytest.raises(GeometryError, match="max_seq_len"):
        LkvCache(model, rows)


def test_a_million_rows_are_not_resident_before_they_are_written(model):
    cache = LkvCache(model, 1_000_000)
    push(cache, 10, batch=1)
    assert cache.nbytes == 1_000_000 * LAYERS * 40 * 4
    latents = cache.caches[0]
    storages = [latents.slot_storage(layer, slot) for layer in range(LAYERS) for slot in range(2)]
    assert sum(resident_of(storage) for storage in storages) < 1_000_000
    own = dynamic()
    push(own, 10, batch=1)
    same(rows_of(cache), rows_of(own))


@pytest.mark.parametrize("rows", [2**62, 2**50])
def test_more_rows_than_there_can_be_are_refused_and_nothing_stays_allocated(model, rows):
    cache = LkvCache(model, rows)
    before = host_memory()
    with pytest.raises((GeometryError, OutOfMemoryError)):
        push(cache, 1)
    assert cache.caches == ()
    assert cache.get_seq_length() == 0
    with pytest.raises((GeometryError, OutOfMemoryError)):
        cache.open(4)
    assert host_memory() == before


def test_a_configuration_is_as_good_as_a_model(model):
    cache, other = LkvCache(model.config, 16), LkvCache(model, 16)
    for each in (cache, other):
        push(each, 3)
    same(rows_of(cache), rows_of(other))


def test_rows_may_be_asked_to_be_in_huge_pages_and_on_a_named_device(model):
    cache, own = LkvCache(model, 16, device="cpu", huge_pages=True), dynamic()
    for each in (cache, own):
        push(each, 3)
    same(rows_of(cache), rows_of(own))


def test_a_device_that_is_not_there_is_refused_by_the_first_rows(model):
    cache = LkvCache(model, 16, device="cuda:99")
    with pytest.raises(DeviceUnavailableError):
        push(cache, 3)
    assert cache.caches == ()
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("model", [None, 7, "deepseek", torch.nn.Linear(1, 1), {}, object()], ids=named)
def test_what_is_no_model_is_refused(model):
    with pytest.raises(ArgumentTypeError, match="model"):
        LkvCache(model, 16)


@pytest.mark.parametrize("name", ["LlamaConfig", "MambaConfig", "BertConfig", "T5Config"])
def test_a_model_without_latents_is_refused(name):
    config = getattr(transformers, name)()
    with pytest.raises(GeometryError):
        LkvCache(config, 16)


def test_open_allocates_before_any_rows(model, cache):
    (latents,) = cache.open(2)
    assert latents is cache.caches[0]
    assert [spec.name for spec in latents.slots] == ["c_kv", "k_pe"]
    assert latents.dtype == DType.of("float32")
    push(cache, 3)
    assert cache.caches[0] is latents
    with Unchanged(cache), pytest.raises(GeometryError, match="open"):
        cache.open(2)
    bare = LkvCache(model.config, 16)
    with pytest.raises(ArgumentTypeError, match="dtype"):
        bare.open()
    (latents,) = bare.open(dtype=torch.bfloat16)
    assert latents.dtype == DType.of("bfloat16")


@pytest.mark.parametrize("batch", [*NO_INTEGERS, 0, -1])
def test_open_refuses_a_batch_that_is_no_count(cache, batch):
    with pytest.raises((ArgumentTypeError, GeometryError), match="batch_size"):
        cache.open(batch)
    assert cache.caches == ()


# ---- copies ----


def test_a_deep_copy_has_the_rows_and_goes_its_own_way(both):
    cache, own = both
    other = copy.deepcopy(cache)
    assert other.caches[0].alloc_id != cache.caches[0].alloc_id
    assert other.layers[0].rows is other.layers[1].rows
    same(rows_of(other), rows_of(own))
    with Unchanged(cache):
        push(other, 4, batch=3, seed=8)
    push(own, 4, batch=3, seed=8)
    same(rows_of(other), rows_of(own))
    other.reset()
    assert cache.get_seq_length() == 5


def test_a_deep_copy_of_an_empty_cache_is_empty(cache):
    other = copy.deepcopy(cache)
    push(other, 3)
    assert cache.caches == ()
    cache.open(2)
    again = copy.deepcopy(cache)
    assert again.batch_size == 2
    assert again.get_seq_length() == 0


def test_a_cache_cannot_be_pickled(both):
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(both[0])
