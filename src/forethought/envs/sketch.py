"""Stick figures of MuJoCo states, without rendering: every geom is a line segment with a radius."""

from __future__ import annotations

from typing import Any

import numpy as np

SPHERE, CAPSULE, ELLIPSOID, CYLINDER, BOX, MESH = 2, 3, 4, 5, 6, 7  # mjtGeom; planes and height fields are ground
FREE, BALL, SLIDE, HINGE = range(4)  # mjtJoint
LAST_VISIBLE_GROUP = 2  # MuJoCo's viewer hides geom groups 3 to 5


def stick_figure(model: Any, data: Any) -> np.ndarray:
    """The geoms of a MuJoCo state as segments [n, 5]: x0, y0, x1, y1, radius, in metres.

    Capsules and cylinders are their axis, spheres a segment without length, and boxes, ellipsoids and meshes their
    longest axis with the middle half-size as radius. Seen from the side (x, z), or from above (x, y) where nothing
    moves out of that plane. Ground (planes, height fields) and what the viewer hides is left out.
    """
    kinds = np.asarray(model.geom_type)
    visible = (
        (kinds >= SPHERE)
        & (np.asarray(model.geom_group) <= LAST_VISIBLE_GROUP)
        & (np.asarray(model.geom_rgba)[:, 3] > 0)
    )
    shown = np.flatnonzero(visible)
    centre = np.asarray(data.geom_xpos)[shown]
    turn = np.asarray(data.geom_xmat).reshape(-1, 3, 3)[shown]
    half = np.zeros((len(shown), 3))
    radius = np.zeros(len(shown))
    for row, geom in enumerate(shown):
        size, kind = np.asarray(model.geom_size[geom]), kinds[geom]
        if kind == SPHERE:
            radius[row] = size[0]
        elif kind in (CAPSULE, CYLINDER):
            half[row], radius[row] = turn[row, :, 2] * size[1], size[0]
        else:
            axis, radius[row] = int(np.argmax(size)), np.sort(size)[1]
            half[row] = turn[row, :, axis] * max(size[axis] - radius[row], 0)
    seen = [0, 1] if flat(model, data) else [0, 2]
    return np.concatenate([(centre - half)[:, seen], (centre + half)[:, seen], radius[:, None]], axis=1).astype(
        np.float32
    )


def flat(model: Any, data: Any) -> bool:
    """Whether everything moves in the x-y plane: hinges turn about z, and slides go along x and y."""
    kinds, up = np.asarray(model.jnt_type), np.abs(np.asarray(data.xaxis)[:, 2])
    if np.isin(kinds, (FREE, BALL)).any():
        return False
    return bool(np.all(np.where(kinds == HINGE, up > 0.99, up < 0.01)))
