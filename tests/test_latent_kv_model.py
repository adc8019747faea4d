"""The cache verbs against a model of plain lists."""

import itertools

import numpy as np
import pytest
from helpers.caches import pattern, same_rows
from helpers.places import arrays_of, latent_cache, put_in
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lkv.errors import CapacityError, IncompleteStepError

pytestmark = pytest.mark.usefixtures("everywhere")

CAPACITY, LAYERS = 7, 3
SLOT_SETS = [[(5,)], [(5,), (3,)], [(4,), (2,), (3,)], [(2, 3), ()], [(i % 3 + 1,) for i in range(9)]]
rows_to_add = st.integers(1, 4)


class Boom(Exception):
    pass


class CacheVerbs(RuleBasedStateMachine):
    """`rows[layer]` is the model: one list of published rows per slot, a row being an array."""

    @initialize(
        slots=st.sampled_from(SLOT_SETS),
        layout=st.sampled_from(["separate", "packed"]),
        dtype=st.sampled_from(["f32", "bf16", "u8", "f64", "bool", "f8_e5m2"]),
        layers=st.sampled_from([[0, 1, 2], [1], [2, 0]]),
    )
    def make(self, slots, layout, dtype, layers):
        self.seeds = itertools.count(1)
        self.cache = latent_cache(LAYERS, CAPACITY, slots, dtype, layout=layout, layers=layers)
        self.layers = sorted(layers)
        self.ids = [self.cache.alloc_id]
        self.forget()

    def forget(self):
        self.rows = {layer: [] for layer in self.layers}
        self.pending = {layer: [] for layer in self.layers}

    @property
    def length(self):
        return len(self.rows[self.layers[0]])

    def new_rows(self, n):
        """Per layer a list of n rows, each one array per slot; never the same twice."""
        return {
            layer: [
                [pattern(s.trailing, self.cache.dtype, next(self.seeds)) for s in self.cache.slots] for _ in range(n)
            ]
            for layer in self.layers
        }

    def arrays(self, rows):
        return [
            np.array([row[s] for row in rows], self.cache.dtype.numpy).reshape(len(rows), *spec.trailing)
            for s, spec in enumerate(self.cache.slots)
        ]

    def versions(self):
        return [self.cache.slot_version(layer, s) for layer in self.layers for s in range(self.cache.n_slots)]

    # ---- steps ----

    @rule(n=rows_to_add, how=st.sampled_from(["append", "append_layers", "stacked", "reserve", "mixed"]))
    def step(self, n, how):
        if self.length + n > CAPACITY:
            with pytest.raises(CapacityError):
                self.cache.step(n)
            return
        new = self.new_rows(n)
        before = self.versions()
        with self.cache.step(n) as step:
            given = [self.arrays(new[layer]) for layer in self.layers]
            if how == "append_layers":
                step.append_layers(given)
            elif how == "stacked":
                step.append_layers([np.stack(arrays) for arrays in zip(*given, strict=True)])
            else:
                for layer, arrays in zip(self.layers, given, strict=True):
                    if how == "append" or (how == "mixed" and layer % 2):
                        step.append(layer, arrays)
                    else:
                        for view, array in zip(step.reserve(layer), arrays, strict=True):
                            put_in(view, array)
                        step.note_write(layer)
                    assert same_rows(arrays_of(step.view(layer)), self.arrays(self.rows[layer] + new[layer]))
        assert self.versions() == [version + 1 for version in before]
        for layer in self.layers:
            self.rows[layer] += new[layer]
            self.pending[layer] = []

    @rule(n=rows_to_add, written=st.integers(0, LAYERS), fails=st.booleans())
    def step_that_does_not_come_through(self, n, written, fails):
        if self.length + n > CAPACITY:
            return
        written = min(written, len(self.layers) - (not fails))
        new = self.new_rows(n)
        with pytest.raises(Boom if fails else IncompleteStepError), self.cache.step(n) as step:
            for layer in self.layers[:written]:
                step.append(layer, self.arrays(new[layer]))
            if fails:
                raise Boom
        self.pending = {layer: [] for layer in self.layers}

    # ---- the same verbs without a block ----

    @rule(n=st.integers(0, 4), data=st.data())
    def append(self, n, data):
        layer = data.draw(st.sampled_from(self.layers))
        new = self.new_rows(n)[layer]
        if self.length + n > CAPACITY:
            with pytest.raises(CapacityError):
                self.cache.append(layer, self.arrays(new))
            return
        self.cache.append(layer, self.arrays(new))
        if n:
            self.pending[layer] = new

    @rule(n=rows_to_add)
    def append_to_every_layer(self, n):
        if self.length + n <= CAPACITY:
            self.pending = self.new_rows(n)
            for layer in self.layers:
                self.cache.append(layer, self.arrays(self.pending[layer]))

    @rule(n=st.integers(0, 5))
    def advance_by(self, n):
        if self.length + n > CAPACITY:
            with pytest.raises(CapacityError):
                self.cache.advance_by(n)
        elif any(len(rows) < n for rows in self.pending.values()):
            with pytest.raises(IncompleteStepError):
                self.cache.advance_by(n)
        else:
            assert self.cache.advance_by(n) == self.length + n
            for layer in self.layers:
                self.rows[layer] += self.pending[layer][:n]
                self.pending[layer] = self.pending[layer][n:]

    @rule(new_len=st.integers(0, CAPACITY + 2))
    def truncate_to(self, new_len):
        shorter = new_len < self.length
        assert self.cache.truncate_to(new_len) == min(new_len, self.length)
        for layer in self.layers:
            del self.rows[layer][new_len:]
            if shorter:
                self.pending[layer] = []

    # ---- memory ----

    @rule()
    def wipe(self):
        self.cache.wipe()
        self.forget()
        for layer in self.layers:
            assert not any(self.cache.slot_storage(layer, 0).read_host())

    @rule(clears=st.booleans())
    def repopulate(self, clears):
        if clears:
            self.cache.clear()
            self.ids.append(self.cache.alloc_id)
            assert self.cache.nbytes == self.cache.cached_len == 0
        self.cache.repopulate()
        self.ids.append(self.cache.alloc_id)
        self.forget()
        assert self.versions() == [0] * len(self.versions())

    # ---- reading ----

    @precondition(lambda self: self.length)
    @rule(data=st.data())
    def gather(self, data):
        layer = data.draw(st.sampled_from(self.layers))
        chosen = data.draw(st.lists(st.integers(0, self.length - 1), max_size=6))
        assert same_rows(
            arrays_of(self.cache.gather(layer, chosen)), self.arrays([self.rows[layer][row] for row in chosen])
        )

    @rule(data=st.data())
    def read(self, data):
        layer = data.draw(st.sampled_from(self.layers))
        with self.cache.read(layer) as view:
            assert same_rows(arrays_of(view), self.arrays(self.rows[layer]))

    @invariant()
    def everything_agrees(self):
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        assert cache.cached_len == self.length
        assert cache.alloc_id == self.ids[-1]
        assert self.ids == sorted(set(self.ids))
        for layer in range(LAYERS):
            populated = layer in self.layers
            assert (cache.layers[layer] is not None) == populated
            pending = len(self.pending[layer]) if populated else 0
            assert cache.written_len(layer) == (self.length + pending if populated else 0)
            if populated:
                with cache.read(layer) as view:
                    assert view.hi == self.length
                    assert same_rows(arrays_of(view), self.arrays(self.rows[layer]))
        assert f" {self.length}/{CAPACITY} rows," in repr(cache)


def test_the_verbs_agree_with_plain_lists():
    quiet = settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(CacheVerbs, settings=quiet)
