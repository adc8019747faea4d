"""How a persistent cache shows itself in a notebook."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest

from lkv import KvCache, LatentKvCache, SlotSpec

VOID = {"br", "hr", "img"}


class Checker(HTMLParser):
    """Collects tags and text; fails on tags that do not close."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.texts = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def parsed(cache):
    checker = Checker()
    checker.feed(cache._repr_html_())
    checker.close()
    assert checker.open == []
    return checker


def filled(rows, capacity=8, **more):
    cache = LatentKvCache.with_capacity(2, capacity, dtype="float32", **{"slot_trailing": [(4,), (2,)], **more})
    for layer in range(2):
        if cache.layers[layer] is not None:
            cache.append(layer, [np.ones((rows, *spec.trailing), "f4") for spec in cache.slots])
    cache.advance_by(rows)
    return cache


def test_it_tells_geometry_fill_id_and_versions():
    cache = filled(2)
    cache.bump_version(1, 1)
    texts = parsed(cache).texts
    facts = {texts[i]: texts[i + 1] for i in range(len(texts) - 1)}
    assert texts[0] == "LatentKvCache"
    assert facts["layers"] == "2" and facts["rows"] == "2 of 8 (25.0 %)" and facts["dtype"] == "float32"
    assert facts["device"] == "cpu" and facts["allocation id"] == str(int(cache.alloc_id))
    assert facts["layout"] == "separate" and facts["bytes"] == "96 B of 384 B, 48 B per token"
    assert texts[-6:] == ["0", "1", "1", "1", "1", "2"]


@pytest.mark.parametrize(("rows", "width"), [(0, "0.00%"), (2, "25.00%"), (8, "100.00%")])
def test_the_bar_is_as_wide_as_the_cache_is_full(rows, width):
    styles = [attrs.get("style", "") for tag, attrs in parsed(filled(rows)).seen if tag == "div"]
    assert [re.search(r"^width:([\d.]+%)", style)[1] for style in styles if "background" in style] == [width]


def test_names_and_tags_are_escaped():
    slots = [SlotSpec('<script>"x"&', (4,), tag="<img src=x onerror=alert(1)>"), SlotSpec("b", (2,))]
    cache = LatentKvCache.with_capacity(1, 8, dtype="float32", slots=slots)
    checker = parsed(cache)
    assert '<script>"x"&' in checker.texts and "<img src=x onerror=alert(1)>" in checker.texts
    assert not {"script", "img"} & {tag for tag, _ in checker.seen}


def test_it_reaches_for_nothing_outside():
    html = filled(2)._repr_html_()
    assert not re.search(r"https?:|<script|<link|<style|url\(|@import|\bon\w+=", html)


def test_caches_of_every_shape_show_themselves():
    part = filled(3, layers=[1])
    assert "2, 1 populated" in parsed(part).texts
    assert "packed" in parsed(filled(1, layout="packed")).texts
    kv = KvCache.with_capacity(20, 2, 4, 8, "bfloat16")
    assert parsed(kv).texts[0] == "KvCache" and ("details", {}) in parsed(kv).seen
    empty = KvCache.with_dims(2, 2, 4)
    texts = parsed(empty).texts
    assert "0 of 0 (0.0 %)" in texts and "unknown" in texts and "2, 0 populated" in texts


def test_it_takes_no_lease():
    cache = filled(2)
    step = cache.step(1)
    with cache.read(0):
        assert "2 of 8" in cache._repr_html_()
    step.abandon()
