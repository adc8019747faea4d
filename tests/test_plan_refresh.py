import pytest
from helpers.plans import Source, Welded, content, held, latent, same
from helpers.scripts import run

from lkv import errors
from lkv.plan import DecodeSession, PlanValidity, RebindRefusal, RebindRefused, RefreshCounters, refresh_session


class Server:
    """Refreshes one session, as a server would, and counts."""

    def __init__(self):
        self.session = None
        self.counters = RefreshCounters()
        self.builds = 0

    def build(self, source):
        self.builds += 1
        return Welded()

    def refresh(self, source, seq=1, shape_key=7):
        self.session = refresh_session(
            self.session, source, self.build, seq=seq, shape_key=shape_key, counters=self.counters
        )
        return self.session

    def counted(self):
        return {name: n for name, n in self.counters.as_dict().items() if n}


def test_a_plan_is_built_once_kept_while_it_is_good_and_moved_when_the_memory_changes():
    server, first, second = Server(), latent(2, 1), latent(2, 2)
    session = server.refresh(first)
    assert server.refresh(first) is session
    first.truncate_to(1)
    assert server.refresh(first) is session
    for cache in (second, first, second):
        assert server.refresh(cache) is session
        assert same(session.run(), content(cache))
    assert server.builds == 1
    assert server.counted() == {"built": 1, "kept": 2, "rebound": 3}


def test_a_refused_rebind_and_a_stale_plan_end_in_a_new_plan():
    server, first, wider = Server(), latent(2, 1), latent(3, 2)
    session = server.refresh(first)
    replaced = server.refresh(wider)
    assert replaced is not session
    assert same(replaced.run(), content(wider))
    assert server.refresh(wider, seq=2) is not replaced
    assert server.refresh(wider, seq=2, shape_key=8).shape_key == 8
    assert server.builds == 4
    assert server.counted() == {"built": 1, "rebuilt": 3, "refused_unbaked_slot": 1}
    assert "rebuilt=3" in repr(server.counters)


def test_damaged_memory_is_neither_bound_nor_built_over():
    server, first, second = Server(), latent(2, 1), latent(2, 2)
    session = server.refresh(first)
    with pytest.raises(ValueError), second.slot_storage(0, 0).write():
        raise ValueError
    with pytest.raises(RebindRefused) as refused:
        server.refresh(second)
    assert refused.value.reason is RebindRefusal.POISONED
    with pytest.raises(errors.PoisonedError):
        server.refresh(second, seq=2)
    assert server.session is session
    assert server.builds == 1
    assert server.counted() == {"built": 1, "refused_poisoned": 1}
    second.slot_storage(0, 0).clear_poison()
    assert server.refresh(second) is session


def test_a_cleared_cache_is_no_reason_to_build():
    server, cache = Server(), latent()
    server.refresh(cache)
    cache.clear()
    with pytest.raises(errors.UnpopulatedLayerError):
        server.refresh(cache)
    assert server.builds == 1
    cache.repopulate()
    server.refresh(cache)
    assert server.counted() == {"built": 1, "rebound": 1, "refused_missing_slot": 1}


def test_without_counters_nothing_is_counted():
    cache = latent()
    session = refresh_session(None, cache, lambda source: Welded(), seq=1, shape_key=7)
    assert refresh_session(session, cache, None, seq=1, shape_key=7) is session
    with pytest.raises(errors.PoisonedError):
        other = latent(2, 2)
        with pytest.raises(ValueError), other.slot_storage(0, 0).write():
            raise ValueError
        refresh_session(None, other, None, seq=1, shape_key=7)


def test_a_plan_that_fails_to_bind_is_the_callers_to_see():
    server, first, second = Server(), latent(2, 1), latent(2, 2)
    session, _ = held(first, fail_at={6})
    server.session = session
    with pytest.raises(RuntimeError, match="bind 6"):
        server.refresh(second)
    assert server.counted() == {}
    assert same(session.run(), content(first))


def test_control_with_the_rebind_gutted_the_other_request_is_read(monkeypatch):
    server, first, second = Server(), latent(2, 1), latent(2, 2)
    server.refresh(first)
    monkeypatch.setattr(DecodeSession, "rebind_kv", lambda self, source: None)
    session = server.refresh(second)
    assert same(session.run(), content(first))


def test_control_a_session_that_is_always_stale_saves_nothing(monkeypatch):
    server, cache = Server(), latent()
    monkeypatch.setattr(DecodeSession, "validity_for", lambda self, *args: PlanValidity.STALE)
    for _ in range(5):
        server.refresh(cache)
    assert server.counted() == {"built": 1, "rebuilt": 4}


def test_a_geometry_that_changes_while_it_is_looked_at_is_never_valid():
    class Growing(Source):
        """Takes new, larger memory just before its id is read."""

        @property
        def alloc_id(self):
            if self.grow:
                self.grow = False
                self.storages = larger.storages
                self.max_seq_len = 16
                self._id += 1
            return self._id

        @alloc_id.setter
        def alloc_id(self, value):
            self._id = value

        grow = False

    from lkv import Storage

    where = latent().device_location
    larger = Source({(0, 0): Storage((16, 4), "float32")}, location=where)
    source = Growing({(0, 0): Storage((8, 4), "float32")}, location=where)
    server = Server()
    session = server.refresh(source)
    source.grow = True
    assert server.refresh(source) is not session
    assert server.counted() == {"built": 1, "rebuilt": 1, "refused_storage_differs": 1}


def test_counters_say_what_they_count():
    counters = RefreshCounters()
    with pytest.raises(errors.ArgumentTypeError, match=r"outcome: expected one of .*got 'x'"):
        counters.count("x")
    with pytest.raises(errors.ArgumentTypeError, match="reason: expected a RebindRefusal, got 'poisoned'"):
        counters.count_refusal("poisoned")
    assert set(counters.as_dict().values()) == {0}


def test_a_forked_child_counts_on_and_waits_for_no_thread_of_its_parent():
    source = """
        import os
        from lkv.plan import RefreshCounters

        counters = RefreshCounters()
        counters.count("kept")
        with counters._lock:  # as a thread of the parent would hold it, which the child does not have
            child = os.fork()
            if child == 0:
                counters.count("kept")
                os._exit(counters.as_dict()["kept"])
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        counters.count("kept")
        print(counters.kept)
    """
    assert run(source, timeout=20) == "2\n2\n"
