"""Markup for one self-contained page: escaped tags, figures, curves thinned so that spikes and gaps survive."""

from __future__ import annotations

import html
import importlib.resources
import json
import os
import string
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from plotly.offline import get_plotlyjs

POINTS = 2000
"""The most points drawn of one curve."""


class Html(str):
    """Text that is markup already. Every other string is escaped on its way into a page."""


def tag(name: str, *children: str, **attributes: str | int) -> Html:
    """An element; in attribute names `_` stands for `-`, and a trailing one is dropped (`class_`)."""
    pairs = ((key.rstrip("_").replace("_", "-"), html.escape(str(value))) for key, value in attributes.items())
    opening = " ".join([name, *(f'{key}="{value}"' for key, value in pairs)])
    return Html(f"<{opening}>{join(children)}</{name}>")


def join(children: Iterable[str]) -> Html:
    return Html("".join(child if isinstance(child, Html) else html.escape(child) for child in children))


def render(title: str, header: Html, sections: Mapping[str, Html]) -> str:
    """The whole page: a header, a table of contents, and one section per title. It asks the network for nothing."""
    names = {name: name.lower().replace(" ", "-") for name in sections}
    links = [tag("li", tag("a", name, href=f"#{anchor}")) for name, anchor in names.items()]
    assets = importlib.resources.files("forethought") / "assets"
    text = {kind: (assets / f"report.{kind}").read_text("utf-8") for kind in ("html", "css", "js")}
    return string.Template(text["html"]).substitute(
        title=html.escape(title),
        style=text["css"],
        header=header,
        contents=tag("nav", tag("ul", *links), aria_label="Contents"),
        body=join(tag("section", tag("h2", name), sections[name], id=names[name]) for name in sections),
        plotly=get_plotlyjs(),
        script=text["js"],
    )


def write(path: Path, text: str) -> Path:
    """Writes a page; an older one stays until the new one is whole."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
    return path


def missing(what: str) -> Html:
    return tag("p", f"Not measured: {what}.", class_="missing")


def lead(sentence: str) -> Html:
    """What a section says, in a sentence before its figures."""
    return tag("p", sentence, class_="lead")


def fold(summary: str, body: Html) -> Html:
    """Something that is opened by who wants to see it; a wide table scrolls in it."""
    return tag("details", tag("summary", summary), tag("div", body, class_="wide"))


def data(kind: str, value: Mapping[str, Any]) -> Html:
    """An element of class `kind` that the page's script fills from `value`: JSON that cannot close its own tag."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return tag("div", tag("script", Html(text), type="application/json"), class_=kind)


def plot(traces: list[dict[str, Any]], *, x: str, y: str = "", title: str = "", **layout: Any) -> Html:
    """One set of axes. `layout`: shade [from, to] in x, levels {name: y}, range [low, high] of y, legend True where
    the figure's legend says what the places of x are."""
    heading = [tag("h4", title)] if title else []
    return tag("div", *heading, data("plot", {"traces": traces, "x": x, "y": y, **layout}))


def figure(title: str, plots: Iterable[Html], caption: str, legend: Mapping[str, str] | None = None) -> Html:
    """Plots under one heading, with a caption that says how to read them; `legend` maps names to roles."""
    keys = [tag("li", name, class_=f"key {role}") for name, role in (legend or {}).items()]
    lists = [tag("ul", *keys, class_="legend")] if keys else []
    return tag("figure", tag("h3", title), *lists, tag("div", *plots, class_="panels"), tag("figcaption", caption))


def table(rows: Iterable[tuple[str, ...]], head: tuple[str, ...] = ()) -> Html:
    top = [tag("thead", tag("tr", *(tag("th", cell) for cell in head)))] if head else []
    return tag("table", *top, tag("tbody", *(tag("tr", *(tag("td", cell) for cell in row)) for row in rows)))


def trace(name: str, role: str, x: np.ndarray, y: np.ndarray, **style: Any) -> dict[str, Any]:
    """A curve; `role` names its colour and dash. `style`: faint True, stack True, band (low, high), points True for
    separate points, whose band is drawn as bars."""
    keep = thin(y)
    if "band" in style:
        style["band"] = [numbers(edge[keep]) for edge in style["band"]]
    return {"name": name, "role": role, "x": numbers(x[keep], 12), "y": numbers(y[keep]), **style}


def thin(y: np.ndarray) -> np.ndarray:
    """Indices of at most POINTS points: each bucket of neighbours keeps its lowest, its highest and a gap (NaN)
    if it has one."""
    if len(y) <= POINTS:
        return np.arange(len(y))
    keep = {0, len(y) - 1}
    for bucket in np.array_split(np.arange(len(y)), POINTS // 3 - 1):
        gap = np.isnan(y[bucket])
        keep.update(bucket[gap][:1].tolist())
        if not gap.all():
            keep.update((int(bucket[np.nanargmin(y[bucket])]), int(bucket[np.nanargmax(y[bucket])])))
    return np.array(sorted(keep))


def smooth(y: np.ndarray, width: int) -> np.ndarray:
    """The mean of the finite values among about `width` neighbours, as many before as after, so that a straight
    line stays one at its ends too; a gap stays a gap."""
    there, index = np.isfinite(y), np.arange(len(y))
    reach = np.minimum(width // 2, np.minimum(index, index[::-1]))
    total, count = (np.concatenate([[0.0], np.cumsum(values)]) for values in (np.where(there, y, 0), there))
    first, after = index - reach, index + reach + 1
    return np.where(there, (total[after] - total[first]) / np.maximum(count[after] - count[first], 1), np.nan)


def numbers(values: np.ndarray, digits: int = 5) -> list[float | None]:
    """Rounded to significant digits; what is not finite becomes None, which a plot shows as a gap."""
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values.tolist()]


def show(value: float) -> str:
    if not np.isfinite(value):
        return "not finite"
    text = f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
    return text.replace("-", "\N{MINUS SIGN}")


def brief(value: float | None, digits: int = 3) -> str:
    """A number in a sentence or table; None, which is JSON's not finite or not measured, says that there is none."""
    return "no number" if value is None or not np.isfinite(value) else show(float(f"{value:.{digits}g}"))


def percent(share: float | None) -> str:
    if share is not None and 0 < abs(share) < 0.0005:
        return "under 0.1 %"
    return "no number" if share is None or not np.isfinite(share) else f"{brief(100 * share, 2)} %"


def show_time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
