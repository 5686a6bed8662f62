"""Trials, episodes and models whose numbers a test can see through: a point x [2] that every action moves along
SLOPE."""

import numpy as np

from forethought.auditing.reality import Future
from forethought.auditing.subject import HostModel, Prediction
from forethought.auditing.trial import Quantity, Trial, quantities
from forethought.types import Box, Spec, Step, TimeStep

SPEC = Spec("line", {"x": Box((2,))}, Box((1,), low=-1.0, high=1.0))
SLOPE = np.array([1.0, -2.0], np.float32)


def episode(actions, *, start=(0.0, 0.0), slope=SLOPE, noise=0.0, seed=0, terminates=False) -> Step:
    """x[t + 1] = x[t] + slope a[t] + noise, reward x[t + 1, 0]; its last row terminates or truncates it."""
    a, count = np.asarray(actions, np.float32), len(actions) + 1
    moves = slope * a[:, None] + noise * np.random.default_rng(seed).normal(size=(len(a), 2))
    x = np.concatenate([[start], np.asarray(start) + np.cumsum(moves, 0)]).astype(np.float32)
    t = np.arange(count)
    last, zero = t == count - 1, np.zeros(count, np.float32)
    discount = np.where(last & terminates, 0, 1).astype(np.float32)
    reward = np.where(t == 0, 0, x[:, 0]).astype(np.float32)
    step = TimeStep({"x": x}, reward, discount, t == 0, last, zero + 1, zero)
    return Step(step, np.append(a, np.float32(0))[:, None], None, zero.astype(np.int32), zero.astype(np.int32))


def line(*, bias=0.0, reward_bias=0.0, noise=0.0, discount=None, says=("obs", "reward")) -> HostModel:
    """The exact model of `episode` without noise, but for what is added to every predicted x and reward."""

    def step(x, action, rng):
        x = x + SLOPE * action + bias + noise * rng.normal(size=x.shape)
        told = {"obs": {"x": x}, "reward": x[:, 0] + reward_bias}
        chance = {} if discount is None else {"discount": np.full(len(x), discount)}
        return x, {name: told[name] for name in says} | chance

    return HostModel(lambda n: np.zeros((n, 2)), lambda x, action, obs, first: obs["x"].astype(np.float64), step)


def trial(model, real, *, episode=None, valid=None, limit=None, discount=None, survived=None, now=None) -> Trial:
    """Of rewards alone: model [N, K, H] with discounts alike, real [N, R, H]; one start per episode if nothing is
    said."""
    model, real = np.asarray(model, float), np.asarray(real, float)
    num, _, horizon = model.shape
    survived = np.ones(real.shape) if survived is None else np.asarray(survived, float)
    going = np.concatenate([np.ones_like(survived[..., :1]), survived[..., :-1]], -1)
    valid = np.ones((num, horizon), bool) if valid is None else np.asarray(valid, bool)
    limit = np.zeros((num, horizon), bool) if limit is None else np.asarray(limit, bool)
    places = np.stack([np.arange(num) if episode is None else np.asarray(episode), np.zeros(num, int)], -1)
    future = Future({}, real, going, survived, np.ones(real.shape, bool))
    found = Prediction(None, model, None if discount is None else np.asarray(discount, float))
    now = np.zeros(num) if now is None else np.asarray(now, float)
    return Trial(places, valid, limit, np.zeros((num, horizon, 1)), {}, now, found, future, real.shape[1] > 1)


def rewards(trial: Trial, mean=0.0, deviation=1.0) -> Quantity:
    """The reward of a trial, scaled by real rows of this mean and standard deviation."""
    two = np.array([mean - deviation, mean + deviation])
    zero, no = np.zeros(2), np.zeros(2, bool)
    (found,) = quantities(SPEC, trial, TimeStep({"x": np.zeros((2, 2))}, two, zero + 1, no, no, zero, zero))
    return found
