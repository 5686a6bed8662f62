"""The rings: which rows they hold, which windows they give, what they refuse."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forethought.ops.returns import lambda_returns, n_step_returns
from forethought.replay import Replay, Ring, announce, nbytes, staleness
from forethought.types import PerStep, Step, TimeStep


def make_rows(start, stop, streams=1, length=5, **changes):
    """Rows [T, B] of episodes of `length` rows; obs 'at' is (row number, stream), 'episode' counts episodes."""
    row = np.broadcast_to(np.arange(start, stop)[:, None], (stop - start, streams))
    first, last = row % length == 0, row % length == length - 1
    real = np.ones(row.shape, np.float32)
    stream = np.broadcast_to(np.arange(streams), row.shape)
    fields = {
        "obs": {"at": np.stack([row, stream], -1).astype(np.float32), "episode": (row // length).astype(np.uint8)},
        "reward": (row + 0.5).astype(np.float32),
        "discount": real,
        "first": first,
        "last": last,
        "duration": real,
        "reward_delay": 0 * real,
    }
    step = {"action": -row.astype(np.float32)[..., None], "log_prob": -real, "depth": 0 * row.astype(np.int32)}
    step |= {"policy_version": (row // 2).astype(np.int32), "extras": None}
    step |= {key: value for key, value in changes.items() if key in step}
    fields |= {key: value for key, value in changes.items() if key in fields}
    return Step(time_step=TimeStep(**fields), **step)


def example(rows):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), rows)


EXAMPLE = example(make_rows(0, 1))


add = jax.jit(Ring.add)
add_seeds = jax.jit(jax.vmap(Ring.add))
windows = jax.jit(Ring.windows, static_argnums=3)
sample = jax.jit(Ring.sample, static_argnums=(1, 2))
n_step_targets = jax.jit(n_step_returns, static_argnums=4)
lambda_targets = jax.jit(lambda_returns)


def ring_of(kind, capacity, *chunks, streams=1):
    ring = Ring.empty(EXAMPLE, capacity, streams) if kind is Ring else Replay(EXAMPLE, capacity, streams)
    for rows in chunks:
        ring = add(ring, rows) if isinstance(ring, Ring) else ring.add(rows) or ring
    return ring


def filled(kind, capacity, count, streams=1, chunk=3, length=5):
    starts = range(0, count, chunk)
    chunks = (make_rows(start, min(start + chunk, count), streams, length) for start in starts)
    return ring_of(kind, capacity, *chunks, streams=streams)


def draw(ring, batch, length, seed=0):
    if isinstance(ring, Ring):
        return sample(ring, batch, length, key=jax.random.key(seed))
    return ring.sample(batch, length, rng=np.random.default_rng(seed))


def numbers(rows):
    return np.asarray(rows.time_step.obs["at"][..., 0]).astype(int)


both = pytest.mark.parametrize("kind", [Ring, Replay])


@both
@pytest.mark.parametrize(("capacity", "count", "length"), [(8, 8, 3), (8, 5, 5), (8, 10, 3), (7, 23, 7), (9, 40, 1)])
def test_every_stored_row_is_drawn_and_no_window_spans_the_write_head(kind, capacity, count, length):
    rows = draw(filled(kind, capacity, count, streams=2), 600, length)
    row, oldest = numbers(rows), max(0, count - capacity)
    assert set(row.ravel()) == set(range(oldest, count))
    assert np.all(np.diff(row, axis=1) == 1)
    stream = np.asarray(rows.time_step.obs["at"][..., 1])
    assert np.all(stream == stream[:, :1]) and set(stream[:, 0]) == {0, 1}
    # Every field is of the same row: reward = row + 0.5, action = -row, last on row 4 of 5.
    np.testing.assert_array_equal(rows.time_step.reward, row + 0.5)
    np.testing.assert_array_equal(rows.action[..., 0], -row)
    np.testing.assert_array_equal(rows.time_step.last, row % 5 == 4)


@both
def test_windows_are_drawn_uniformly(kind):
    # 2 streams x (8 - 3 + 1) starts = 12 windows, 12,000 draws: 1000 each, standard deviation 30; five of them: 150.
    rows = draw(filled(kind, 8, 21, streams=2), 12_000, 3)
    at = np.asarray(rows.time_step.obs["at"][:, 0]).astype(int)
    counts = np.unique(at, axis=0, return_counts=True)[1]
    assert len(counts) == 12 and np.all(np.abs(counts - 1000) < 150)


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_host_and_device_give_the_same_windows(chunk):
    device, host = filled(Ring, 7, 38, 3, chunk), filled(Replay, 7, 38, 3, chunk)
    stream, start = np.array([0, 2, 1, 1]), np.array([31, 34, 33, 32])
    ours, theirs = windows(device, stream, start, 4), host.windows(stream, start, 4)
    assert eqx.tree_equal(jax.device_get(ours), theirs)
    np.testing.assert_array_equal(numbers(theirs), start[:, None] + [0, 1, 2, 3])
    assert eqx.tree_equal(jax.device_get(device.data), host.data)


def test_host_refuses_windows_that_leave_the_stored_rows():
    host = filled(Replay, 8, 20)
    for start in (11, 18):  # stored are 12..19; rows 11..13 and 18..20 are not all there
        with pytest.raises(ValueError, match=r"3 rows leaves the stored rows 12\.\.19"):
            host.windows(np.array([0]), np.array([start]), 3)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_fewer_rows_than_a_window_on_the_host_is_an_error_with_both_numbers(count):
    with pytest.raises(ValueError, match=rf"windows of 8 rows, but only {count} rows"):
        draw(filled(Replay, 10, count), 4, 8)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_fewer_rows_than_a_window_in_jit_go_round_behind_a_truncation(count):
    rows = draw(filled(Ring, 10, count), 200, 8)
    row, last, first = numbers(rows), np.asarray(rows.time_step.last), np.asarray(rows.time_step.first)
    assert set(row[:, 0]) == set(range(count))
    np.testing.assert_array_equal(row, (row[:, :1] + np.arange(8)) % count)
    # Where the rows start again, an episode was cut: never a termination, and what follows is a first row.
    np.testing.assert_array_equal(last, (row == count - 1) | (row % 5 == 4))
    assert np.all(first[:, 1:][last[:, :-1]])
    assert np.all(np.asarray(rows.time_step.discount) == 1)


def test_an_empty_ring_gives_no_transition():
    rows = draw(filled(Ring, 10, 0), 4, 3)
    assert np.all(rows.time_step.last)


@both
def test_a_window_longer_than_the_capacity_is_refused(kind):
    with pytest.raises(ValueError, match="9 rows"):
        draw(filled(kind, 8, 20), 4, 9)


@both
def test_episodes_of_one_step_are_sampled(kind):
    # An episode of one step has two rows: first, then last.
    window = draw(filled(kind, 12, 12, length=2), 300, 8)
    assert set(numbers(window).ravel()) == set(range(12))
    np.testing.assert_array_equal(np.asarray(window.time_step.first), ~np.asarray(window.time_step.last))


@both
@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize(("gamma", "bootstrap"), [(0.9, 10.0), (0.8, 7.0)])
def test_targets_stop_at_a_truncation_wherever_the_ring_wraps(kind, offset, gamma, bootstrap):
    # Episode A: rewards 1, 1, truncated at an observation of value `bootstrap`. Episode B: rewards 100.
    reward = np.array([0, 1, 1, 0, 100, 100, 100, 100], np.float32)[:, None]
    last = np.array([0, 0, 1, 0, 0, 0, 0, 1], bool)[:, None]
    first = np.array([1, 0, 0, 1, 0, 0, 0, 0], bool)[:, None]
    episodes = make_rows(8 + offset, 16 + offset, reward=reward, last=last, first=first)
    ring = ring_of(kind, 8, make_rows(0, 8), make_rows(8, 8 + offset), episodes)
    start = np.array([8 + offset])
    take = ring.windows if kind is Replay else functools.partial(windows, ring)
    window = jax.tree.map(lambda x: jnp.asarray(x[0]), take(np.array([0]), start, 8))
    value = jnp.array([-50.0, -60.0, bootstrap, 1000.0, 1000.0, 1000.0, 1000.0, 0.0])
    valued, factor = PerStep(gamma)(window.time_step)
    expected = [1 + gamma + gamma**2 * bootstrap, 1 + gamma * bootstrap, 0.0]
    for targets in (
        n_step_targets(valued, factor, value, window.time_step.last, 3),
        lambda_targets(valued, factor, value, window.time_step.last, 1.0),
    ):
        np.testing.assert_allclose(targets[:3], expected, rtol=1e-5)


@both
@pytest.mark.parametrize(("trajectory", "length"), [(12, 4), (30, 7)])
def test_the_end_of_a_slice_is_no_termination(kind, trajectory, length):
    window = draw(filled(kind, trajectory, trajectory, length=1000), 50, length)
    assert not np.any(window.time_step.last) and np.all(window.time_step.discount == 1)
    # The cut acts as a truncation: with value 40 everywhere the final target is reward + 0.9 * 40.
    valued, factor = PerStep(0.9)(jax.tree.map(jnp.asarray, window.time_step))
    value, last = jnp.full((50, length), 40.0), jnp.asarray(window.time_step.last)
    targets = jax.jit(jax.vmap(lambda_returns, (0, 0, 0, 0, None)))(valued, factor, value, last, 0.25)
    np.testing.assert_allclose(targets[:, -1], window.time_step.reward[:, -1] + 36, rtol=1e-5)


@both
@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_stack_of_frames_cut_at_first_holds_one_episode(kind, length):
    window = draw(filled(kind, 11, 26, length=length), 200, 6)
    episode, first = np.asarray(window.time_step.obs["episode"]).astype(int), np.asarray(window.time_step.first)
    # The stack at t holds the frames t - 1 and t, or t twice where the episode began at t.
    earlier = np.where(first[:, 1:], episode[:, 1:], episode[:, :-1])
    np.testing.assert_array_equal(earlier, episode[:, 1:])
    np.testing.assert_array_equal(first[:, 1:], np.diff(episode, axis=1) == 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("time_step/reward", lambda r, v: dataclasses.replace(r, time_step=_put(r.time_step, "reward", v))),
        ("time_step/obs/at", lambda r, v: dataclasses.replace(r, time_step=_put_obs(r.time_step, v))),
        ("action", lambda r, v: _put(r, "action", v)),
        ("log_prob", lambda r, v: _put(r, "log_prob", v)),
    ],
)
def test_values_that_are_not_finite_are_refused_by_name_and_place(bad, name, change):
    host, rows = filled(Replay, 8, 6, 2), change(make_rows(6, 9, 2), bad)
    before = jax.tree.map(np.copy, host.data)
    with pytest.raises(ValueError, match=rf"'{name}' is not finite at row 7 of stream 1"):
        host.add(rows)
    assert host.count == 6 and eqx.tree_equal(before, host.data)
    device = add(filled(Ring, 8, 6, 2), rows)
    with pytest.raises(ValueError, match=rf"'{name}' is not finite at row 7 of stream 1"):
        device.since(6)


def _put(tree, field, value):
    array = np.copy(getattr(tree, field))
    array[1, 1] = value
    return dataclasses.replace(tree, **{field: array})


def _put_obs(time_step, value):
    array = np.copy(time_step.obs["at"])
    array[1, 1, 0] = value
    return dataclasses.replace(time_step, obs={**time_step.obs, "at": array})


@both
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (make_rows(0, 3, log_prob=None), "'log_prob' is missing"),
        (make_rows(0, 3, extras={"value": np.zeros((3, 1))}), "'extras/value' was not declared"),
        (make_rows(0, 3, action=np.zeros((3, 1, 2), np.float32)), r"'action' is float32\[3, 1, 2\], .*\[3, 1, 1\]"),
        (make_rows(0, 3, reward=np.zeros((3, 1), np.float16)), r"'time_step/reward' is float16.*float32\[3, 1\]"),
        (make_rows(0, 3, streams=2), r"\[3, 2.*\[3, 1"),
        (make_rows(0, 9), "9 rows at once do not fit into a capacity of 8"),
    ],
)
def test_rows_of_another_kind_are_refused_by_name(kind, rows, message):
    ring = filled(kind, 8, 0)
    with pytest.raises(ValueError, match=message):
        add(ring, rows) if isinstance(ring, Ring) else ring.add(rows)


def test_capacity_is_announced_and_refused_where_it_cannot_fit():
    # A row: obs 2 x 4 + 1, five floats (reward, discount, duration, delay, log_prob) 20, first and last 2,
    # action 4, depth and version 8: 43 bytes.
    assert nbytes(EXAMPLE, 1000, 4) == 43 * 4000
    assert announce(EXAMPLE, 1000, 4).startswith("replay of 1,000 rows x 4 streams, 43 bytes a row: 0.00 GiB of ")
    for build in (Ring.empty, Replay, announce):
        with pytest.raises(ValueError, match=r"needs 160,187\.\d\d GiB, this machine has \S+ GiB available") as error:
            build(EXAMPLE, 10**12, 4)  # 43 * 4e12 / 2**30
        assert "\n" not in str(error.value)
        with pytest.raises(ValueError, match="at least 1"):
            build(EXAMPLE, 0, 4)


def test_capacity_that_would_fit_is_named(monkeypatch):
    monkeypatch.setattr("forethought.replay._free_bytes", lambda device: 43 * 4 * 77 + 1)
    Replay(EXAMPLE, 77, 4)
    with pytest.raises(ValueError, match="a capacity of 77 would fit"):
        Replay(EXAMPLE, 78, 4)


def test_staleness_is_the_mean_age_over_rows_that_acted():
    rows = make_rows(3, 7)  # versions 1, 2, 2, 3; row 4 is last and its action void
    assert float(staleness(rows, 10)) == pytest.approx((9 + 8 + 7) / 3)
    assert float(staleness(make_rows(4, 5), 10)) == 0.0


@both
@pytest.mark.parametrize(("since", "expected"), [(0, (30, 38)), (33, (33, 38)), (37, (37, 38)), (38, (38, 38))])
def test_rows_since_a_number(kind, since, expected):
    rows = filled(kind, 8, 38, 2).since(since)
    assert eqx.tree_equal(rows, jax.tree.map(np.asarray, make_rows(*expected, 2)))


@pytest.mark.parametrize("count", [3, 9, 21])
def test_a_ring_of_many_seeds_goes_to_the_host_and_back(count):
    empty = jax.vmap(lambda _: Ring.empty(EXAMPLE, 9, 2))(jnp.arange(3))
    ring = empty
    for start in range(0, count, 3):
        rows = [make_rows(start, start + 3, 2, length=4 + seed) for seed in range(3)]
        ring = add_seeds(ring, jax.tree.map(lambda *x: np.stack(x), *rows))
    host = Replay(EXAMPLE, 9, 6, count=max(0, count - 9))
    host.add(ring.since(0))
    assert eqx.tree_equal(empty.holding(host), ring)
    # Stream 5 of the host is stream 1 of seed 2, whose episodes last 6 rows.
    window = host.windows(np.array([5]), np.array([count - 3]), 3)
    np.testing.assert_array_equal(window.time_step.first[0], np.arange(count - 3, count) % 6 == 0)
    uneven = eqx.tree_at(lambda r: r.count, ring, jnp.array([3, 3, 6]))
    with pytest.raises(ValueError, match="different numbers of rows"):
        uneven.since(0)


def test_a_scan_over_seeds_equals_a_loop_and_copies_no_ring():
    capacity = 5000

    def run(ring, key):
        def body(ring, xs):
            index, key = xs
            base = make_rows(0, 3, 2)
            number = ring.count + jnp.arange(3)[:, None] + 1000.0 * jax.random.key_data(key)[0]
            rows = dataclasses.replace(base, action=jnp.broadcast_to(number, (3, 2))[..., None].astype(jnp.float32))
            ring = ring.add(jax.tree.map(jnp.asarray, rows))
            return ring, ring.sample(4, 5, key=jax.random.fold_in(key, index)).action

        return jax.lax.scan(body, ring, (jnp.arange(6), jax.random.split(key, 6)))

    keys = jax.random.split(jax.random.key(0), 3)
    rings = jax.vmap(lambda _: Ring.empty(EXAMPLE, capacity, 2))(jnp.arange(3))
    compiled = jax.jit(jax.vmap(run), donate_argnums=0).lower(rings, keys).compile()
    size = sum(x.nbytes for x in jax.tree.leaves(rings))
    assert compiled.memory_analysis().temp_size_in_bytes < size / 10
    together = compiled(rings, keys)
    for seed in range(3):
        alone = jax.jit(run)(Ring.empty(EXAMPLE, capacity, 2), keys[seed])
        assert eqx.tree_equal(jax.tree.map(lambda x, seed=seed: x[seed], together), alone)
