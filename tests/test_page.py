"""Curves are thinned and smoothed without losing what matters, and text cannot become markup."""

import numpy as np
import pytest

from forethought import page


def test_thinning_keeps_spikes_gaps_and_ends() -> None:
    y = np.zeros(100_000)
    y[[31_234, 77_001]] = 9.0, -5.0
    y[50_500] = np.nan
    keep = page.thin(y)
    assert len(keep) <= page.POINTS
    assert {0, 31_234, 50_500, 77_001, 99_999} <= set(keep.tolist())
    assert np.all(np.diff(keep) > 0)


def test_thinning_survives_a_curve_of_gaps_and_leaves_short_ones() -> None:
    assert len(page.thin(np.full(5000, np.nan))) <= page.POINTS
    for length in (0, 1, page.POINTS):
        np.testing.assert_array_equal(page.thin(np.zeros(length)), np.arange(length))


def test_smoothing() -> None:
    line = 3.0 * np.arange(7) - 4
    np.testing.assert_allclose(page.smooth(line, 5), line, atol=1e-12)
    # the middle of five: (1 + 2 + 3 + 10) / 4 around the gap; beside an end only as many as the end leaves
    y = np.array([1.0, 2, 3, np.nan, 10])
    np.testing.assert_allclose(page.smooth(y, 5), [1, 2, 4, np.nan, 10])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (-0.25, "\u22120.25"), (1234567.0, "1,234,567"), (-1203.4, "\u22121,203"), (3e-7, "3e\u221207")],
)
def test_show(value: float, text: str) -> None:
    assert page.show(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(1234.5, "1,230"), (-0.98765, "\u22120.988"), (None, "no number"), (float("inf"), "no number")]
)
def test_brief(value: float | None, text: str) -> None:
    assert page.brief(value) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0 %"),
        (0.0004, "under 0.1 %"),
        (0.0512, "5.1 %"),
        (0.875, "88 %"),
        (-0.03, "\u22123 %"),
        (None, "no number"),
    ],
)
def test_percent(share: float | None, text: str) -> None:
    assert page.percent(share) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.9, "59.9 s"), (60.0, "1 min 00 s"), (3599.6, "1 h 00 min"), (7384.0, "2 h 03 min")],
)
def test_show_time(seconds: float, text: str) -> None:
    assert page.show_time(seconds) == text


def test_only_markup_is_markup() -> None:
    assert page.tag("p", "<b>", page.tag("i", "&"), title='"') == '<p title="&quot;">&lt;b&gt;<i>&amp;</i></p>'
    # an f-string of markup is text again
    assert page.tag("p", f"{page.tag('i', 'x')}") == "<p>&lt;i&gt;x&lt;/i&gt;</p>"
    data = page.data("plot", {"name": "</script><img>"})
    assert data.startswith('<div class="plot"><script type="application/json">{"name":"\\u003c/script\\u003e')
