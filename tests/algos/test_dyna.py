import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forethought.algos import dyna
from forethought.algos.dyna import Config, Transition
from forethought.envs import mazes, tabular
from forethought.studies.dyna import ARMS, CHANGES, expected_steps, first_within, lengths
from forethought.types import TimeStep

KEY = jax.random.key(0)
update, dream = (jax.jit(x, static_argnums=0) for x in (dyna.update, dyna.dream))


def step(state, action, reward, discount, arrived):
    return Transition(*(jnp.asarray(x, d) for x, d in zip((state, action), "ii", strict=True)),
                      jnp.float32(reward), jnp.float32(discount), jnp.int32(arrived))  # fmt: skip


def chance(cfg):
    return jax.random.uniform(KEY, dyna.draws(cfg))


def told(cfg, states, actions, *steps):
    state = dyna.init(cfg, states, actions)
    for each in steps:
        state = update(cfg, state, each, chance(cfg))
    return state


def many(cfg, env, steps, seeds):
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(lambda key: dyna.run(cfg, env, steps, key=key)))(keys))


def test_the_update_by_hand():
    cfg, q = Config(alpha=0.25, gamma=0.9), jnp.array([[1.0, 2], [3, 8], [50, 60]])
    # 2 + 0.25 * (5 + 0.9 * 8 - 2) = 4.55; and where the episode ends, the value of the state arrived in does not count.
    assert dyna.backup(cfg, q, step(0, 1, 5, 1, 1))[0].tolist() == pytest.approx([1, 4.55])
    assert dyna.backup(cfg, q, step(0, 1, 5, 0, 2))[0].tolist() == pytest.approx([1, 2 + 0.25 * 3])


def test_real_and_imagined_transitions_update_alike():
    """Bit for bit: from the same values, a transition that happened and the model's account of it."""
    cfg = Config(alpha=0.3, planning=1)
    q = jax.random.normal(KEY, (5, 3))
    known = told(dataclasses.replace(cfg, planning=0), 5, 3, step(1, 2, 0.7, 1, 3))
    known = dataclasses.replace(known, q=q)
    alone = dataclasses.replace(cfg, planning=0)
    real = jax.jit(lambda s: dyna.update(alone, s, step(1, 2, 0.7, 1, 3), chance(alone)))(known)
    imagined = jax.jit(lambda s: dyna.plan(cfg, s, chance(cfg)))(known)
    assert (np.asarray(real.q) == np.asarray(imagined.q)).all() and (real.q != q).sum() == 1
    assert (int(real.real), int(real.imagined)) == (2, 0) and (int(imagined.real), int(imagined.imagined)) == (1, 1)


def test_without_planning_it_is_q_learning():
    env, cfg, steps = tabular.corridor(5), Config(planning=0, alpha=0.3, epsilon=0.5), 200
    (state, _), record = jax.jit(lambda: dyna.run(cfg, env, steps, key=KEY))()
    world, (begin_key, steps_key) = dyna.World.of(env), jax.random.split(KEY)
    place = dyna.begin(cfg, env, key=begin_key)[1]

    @jax.jit
    def act(row, place, t):
        with jax.threefry_partitionable(False):
            numbers = jax.random.uniform(jax.random.fold_in(steps_key, t), (2 + 1 + 2,))
        return world.move(place, dyna.choose(row, cfg.epsilon, numbers[:3]), t, numbers[3:])

    q = np.zeros((5, 2))
    for t in range(steps):
        place, (s, a, r, d, p), _ = act(jnp.float32(q[int(place.state)]), place, jnp.int32(t))
        q[s, a] += 0.3 * (float(r) + 0.95 * float(d) * q[p].max() - q[s, a])
    assert record.reward.sum() > 5 and q[0, 1] > 0.1
    np.testing.assert_allclose(state.q, q, atol=1e-5)  # float32 against float64


def test_updates_are_counted_apart():
    _, record = jax.jit(lambda: dyna.run(Config(planning=7), mazes.dyna_maze(), 40, key=KEY))()
    assert record.real.tolist() == list(range(1, 41)) and record.imagined.tolist() == list(range(7, 281, 7))
    _, swept = jax.jit(lambda: dyna.run(Config(method="sweeping", planning=7), mazes.dyna_maze(), 4000, key=KEY))()
    assert not swept.real.any() and 0 < swept.imagined[-1] < 7 * 4000
    reached = int(swept.reward.argmax())
    assert swept.reward[reached] == 1 and swept.imagined[reached - 1] == 0  # nothing surprises before the first reward


def test_only_what_was_seen_is_planned():
    cfg = Config(planning=200)
    steps = step(0, 1, 0, 1, 2), step(2, 0, 1, 0, 3), step(0, 1, 0, 1, 2)
    known = told(cfg, 4, 3, *steps)
    assert int(known.num_pairs) == 2
    dreamt = dream(cfg, known, chance(cfg))
    assert set(zip(dreamt.state.tolist(), dreamt.action.tolist(), dreamt.arrived.tolist(), strict=True)) == {
        (0, 1, 2),
        (2, 0, 3),
    }
    assert 70 < int((dreamt.state == 0).sum()) < 130  # each with probability a half: 100 +- 7


def test_plus_looks_at_what_was_not_tried_for_long():
    cfg = Config(method="plus", planning=300, kappa=0.5)
    known = told(cfg, 4, 2, step(0, 1, 0, 1, 2), step(2, 0, 1, 0, 3), step(0, 1, 0, 1, 2), step(0, 1, 0, 1, 2))
    dreamt = dream(cfg, known, chance(cfg))
    said = set(zip(*(np.asarray(x, float).round(4).tolist() for x in dreamt), strict=True))
    # Four steps were taken. Tried now: no bonus; at step 2: 0.5 sqrt(2); never: it stays, for 0.5 sqrt(4).
    assert said == {(0, 1, 0, 1, 2), (2, 0, 1.7071, 0, 3), (0, 0, 1, 1, 0), (2, 1, 1, 1, 2)}
    assert int(known.num_pairs) == 4


def test_sweeping_goes_backwards_from_what_surprised():
    cfg = Config(method="sweeping", planning=10, alpha=1.0, gamma=0.5, theta=1e-4)
    steps = step(0, 1, 0, 1, 1), step(1, 1, 0, 1, 2), step(2, 1, 1, 0, 3)
    swept = told(cfg, 4, 2, *steps)
    np.testing.assert_allclose(swept.q[:, 1], [0.25, 0.5, 1, 0])
    assert int(swept.imagined) == 3 and int(swept.real) == 0 and not swept.priority.any()
    # An error of 0.5 is not worth it; two turns do not suffice, and what is left waits with its error.
    assert told(dataclasses.replace(cfg, theta=0.5), 4, 2, *steps).q[:, 1].tolist() == [0, 0, 1, 0]
    waiting = told(dataclasses.replace(cfg, planning=2), 4, 2, *steps)
    assert waiting.q[:, 1].tolist() == [0, 0.5, 1, 0] and waiting.priority[0, 1] == 0.25
    # The larger error goes first.
    queue = dataclasses.replace(waiting, priority=jnp.zeros((4, 2)).at[1, 1].set(0.1))
    queue = update(dataclasses.replace(cfg, planning=1), queue, step(3, 0, 4, 0, 3), chance(cfg))
    assert queue.q[3, 0] == 4 and queue.priority[1, 1] == pytest.approx(0.1)


def test_a_time_limit_is_no_end_of_the_return():
    env, cfg = tabular.truncated_reward(5), Config(alpha=1.0, gamma=0.9, planning=0)
    (state, _), record = dyna.run(cfg, env, 300, key=KEY)
    assert state.q[0, 0] == pytest.approx(10, rel=1e-5)  # 1 / (1 - 0.9); taken for an end it would be 4.0951
    assert (
        record.elapsed.tolist() == [1, 2, 3, 4, 5] * 60
        and record.last.tolist() == [False] * 4 * 1 + [True] + record.last.tolist()[5:]
    )


@pytest.mark.parametrize("method", ["q", "plus", "sweeping"])
def test_what_is_terminal_is_worth_nothing(method):
    (state, _), record = jax.jit(
        lambda: dyna.run(Config(method=method, planning=10), tabular.corridor(5), 500, key=KEY)
    )()
    assert not state.q[4].any() and record.reward.sum() > 20
    if method != "plus":
        np.testing.assert_allclose(state.q[:4, 1], 0.95 ** np.arange(3, -1, -1), atol=0.02)


def test_seeds_at_once_are_seeds_alone_and_a_run_goes_on_as_it_would_have():
    env, cfg = mazes.dyna_maze(), Config(planning=5)
    held, record = many(cfg, env, 1000, 3)

    @jax.jit
    def halves(key):
        return dyna.run(cfg, env, 500, key=key, held=dyna.run(cfg, env, 500, key=key)[0])

    for seed in range(3):
        whole, rest = halves(jax.random.key(seed))
        for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(held), strict=True):
            np.testing.assert_array_equal(one, other[seed])
        np.testing.assert_array_equal(rest.elapsed, record.elapsed[seed, 500:])


def test_the_dyna_maze_is_learned_as_fast_as_is_published():
    """First episode whose mean over 30 seeds is at most 1.25 * 15.88: 29 / 6 / 3 (ten other sets of 30 seeds: 27 to 30,
    5 to 7, and 3)."""
    env = mazes.dyna_maze()
    for planning, steps, low, high in ((0, 15_000, 26, 32), (5, 8_000, 5, 7), (50, 6_000, 3, 3)):
        length = lengths(many(Config(planning=planning), env, steps, 30)[1], 40)
        assert low <= first_within(length, 1.25 * 15.88) <= high, planning
        assert length[:, 0].mean() == pytest.approx(868.7, abs=4 * 868.7 / 30**0.5)  # geometric tail: spread = mean
    assert 15.5 < length[:, 20:].mean() < 17.5  # n = 50; 15.88 at best


def test_plus_finds_the_shortcut_and_plain_planning_does_not():
    found = {}
    for arm, cfg in ARMS.items():
        record = many(cfg, CHANGES["shortcut"], 6000, 5)[1]
        found[arm] = (record.last & (record.elapsed < 16) & (np.arange(6000) >= 3000)).any(1).sum()
        assert not (record.last & (record.elapsed < 16))[:, :3000].any()
    assert found["Dyna-Q+"] == 5 and found["Dyna-Q"] <= 1


def test_the_world_is_the_environment():
    """Outcomes, starts and rewards come as often as the tables say."""
    env = mazes.maze(mazes.Layout(("...", ".#.")), start=None, goal=(1, 2), slip=0.3, name="slippery")
    world, numbers = dyna.World.of(env), jnp.stack([jnp.tile((jnp.arange(1000) + 0.5) / 1000, 2)] * 2, 1)
    assert world.arrived.shape == (1, 5, 4, 3)  # no pair has more than three outcomes
    move = jax.jit(jax.vmap(lambda s, a, x: world.move(dyna.TabularState(s, jnp.int32(6)), a, jnp.int32(0), x)))
    for s in range(4):
        for a in range(4):
            at = jnp.full(2000, s), jnp.full(2000, a)
            later, seen, last = jax.tree.map(np.asarray, move(*at, numbers))
            np.testing.assert_allclose(np.bincount(seen.arrived, minlength=5) / 2000, env.transition[s, a], atol=2e-3)
            assert (seen.reward == (seen.arrived == 4)).all() and (seen.discount == 1.0 - last).all()
            assert (last == (seen.arrived == 4)).all() and (later.state[~last] == seen.arrived[~last]).all()
            assert (later.elapsed == np.where(last, 0, 7)).all() and not (later.state == 4).any()


def test_walls_move_with_the_steps_of_all_episodes():
    env = CHANGES["blocking"]
    below, world = env.layout.index(4, 8), dyna.World.of(env)
    assert env.at(999) is env.mazes[0] and env.at(1000) is env.mazes[1] and env.at(10**6) is env.mazes[1]
    place = dataclasses.replace(dyna.begin(Config(), env, key=KEY)[1], state=jnp.int32(below))
    up = lambda steps: int(world.move(place, jnp.int32(0), jnp.int32(steps), jnp.zeros(2))[0].state)  # noqa: E731
    assert up(999) == env.layout.index(3, 8) and up(1000) == below
    within = env.layout.index(3, 8)
    assert env.mazes[1].transition[within, 1].argmax() == below  # who stands where the wall appears walks off it
    best = [
        expected_steps(each, (lambda q: np.eye(4)[q.argmax(1)])(each.optimal_values(0.95)[1])) for each in env.mazes
    ]
    assert best == pytest.approx([10, 16])
    with pytest.raises(ValueError, match=r"since is \(1, 5\)"):
        mazes.Changing((mazes.WALLED_LEFT, mazes.OPEN_BOTH), (1, 5), start=(5, 3), goal=(0, 8), name="late")


def test_dyna_plans_with_counts_where_moves_slip():
    env = mazes.maze(mazes.Layout(("...", ".#.")), start=(1, 0), goal=(1, 2), slip=0.3, name="slippery")
    cfg = Config(model="counts", planning=20, alpha=0.05, epsilon=0.2, gamma=0.9)
    (state, _), _ = many(cfg, env, 4000, 4)
    exact, _ = env.optimal_values(0.9)
    # One sample's spread is below 0.2 and a step size of 0.05 averages over about 20 of them: 0.2 / 39^0.5 = 0.03.
    np.testing.assert_allclose(state.q.max(2).mean(0)[~env.terminal], exact[~env.terminal], atol=0.06)


def test_a_policy_says_how_likely_it_was():
    q = jnp.array([[1.0, 3, 3, 0]])
    state = dataclasses.replace(dyna.init(Config(epsilon=0.2), 1, 4), q=q)
    one = jnp.zeros(())
    seen = TimeStep({"state": jnp.int32(0)}, one, one, jnp.bool_(True), jnp.bool_(False), one, one)
    acting = dyna.policy(Config(epsilon=0.2), state)
    decide = jax.jit(jax.vmap(lambda key: acting(None, seen, key=key)[1]))
    decisions = decide(jax.random.split(KEY, 4000))
    chance = np.array([0.05, 0.45, 0.45, 0.05])  # 0.2 / 4, and half of the other 0.8
    np.testing.assert_allclose(np.bincount(decisions.action, minlength=4) / 4000, chance, atol=0.03)  # 4 x 0.008
    np.testing.assert_allclose(np.exp(decisions.log_prob), chance[np.asarray(decisions.action)], rtol=1e-5)
    greedy = dyna.policy(Config(epsilon=0.2), state, greedy=True)
    assert int(greedy(None, seen, key=KEY)[1].action) in (1, 2)


@pytest.mark.parametrize(
    "wrong, what",
    [
        (dict(alpha=1.5), "alpha is 1.5"),
        (dict(epsilon=-0.1), "epsilon is -0.1"),
        (dict(planning=-1), "planning is -1"),
        (dict(kappa=float("inf")), "kappa is inf"),
        (dict(method="sweeping", model="counts"), "needs model 'deterministic'"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, what):
    with pytest.raises(ValueError, match=what):
        Config(**wrong)
