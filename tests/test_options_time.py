"""Options in continuous time against quadrature (Bradtke & Duff 1995): rewards exp(-b tau), bootstraps exp(-b dt)."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial
from scipy.integrate import quad

from forethought.algos.smdp import Config, learn
from forethought.envs.hosted import Hosted
from forethought.envs.tabular import Tabular
from forethought.ops.dynamic import Tables, action_values, option_model, policy_iteration
from forethought.option_env import OptionEnv
from forethought.option_host import HostOptions
from forethought.options import TabularOption, primitives
from forethought.types import PerTime
from sojourns import AT_END, AT_START, EXPONENTIAL, GAMMA, SOJOURNS, UNIFORM, Lasting, known, nodes, row

B = 0.7
RULE = PerTime(B)
KEY = jax.random.key(0)


def expected(law, what):
    return quad(lambda t: what(t) * law.pdf(t), *law.support(), epsabs=1e-12)[0]


def discounted(law):
    """E exp(-b T): what a value after the sojourn is multiplied with, and what a reward of 1 on arrival is worth."""
    return expected(law, lambda t: np.exp(-B * t))


def flowed(law):
    """E of a flow of 1 a second during the sojourn, discounted to where it began."""
    return expected(law, lambda t: quad(lambda u: np.exp(-B * u), 0, t)[0])


FLOW = Partial(lambda reward, s, took: (RULE.flow(reward, took), 0 * took))


def walk(length, stop=()):
    return TabularOption(np.ones(length, bool), np.eye(2)[np.ones(length, int)], np.isin(np.arange(length), stop) * 1.0)


def targets(durations, pays, reward=1.0):
    """Reward, factor and duration of one option over steps that last [..., steps] seconds."""
    steps = durations.shape[-1]
    table = row(steps + 2, reward=reward)

    def one(each):
        over = OptionEnv(Lasting(table, known(each), pays), [walk(steps + 2, [steps])], RULE)
        state, _ = over.reset(key=KEY)
        _, arrived = over.step(state, jnp.int32(0), key=KEY)
        return *RULE(arrived), arrived.duration

    return [np.asarray(x, float) for x in jax.jit(jax.vmap(one))(jnp.asarray(durations, jnp.float32))]


@pytest.mark.parametrize("law", SOJOURNS)
def test_one_sojourn_is_discounted_by_the_integral_over_its_distribution(law):
    points, weight = nodes(law)
    durations = points[:, None]
    reward, factor, took = targets(durations, AT_END)
    assert weight @ factor == pytest.approx(discounted(law), rel=2e-6)
    assert weight @ reward == pytest.approx(discounted(law), rel=2e-6)
    assert weight @ took == pytest.approx(law.mean(), rel=2e-4)  # of a straight integrand: the tail counts for more
    assert (targets(durations, AT_START)[0] == 1).all()
    assert weight @ targets(durations, FLOW)[0] == pytest.approx(flowed(law), rel=2e-6)


def test_the_integrals_by_hand():
    # 1 / (1 + b theta), its power, and a mean of exponentials; of a flow, (1 - E exp(-b T)) / b.
    by_hand = [1 / 1.35, 1.28**-2.5, (np.exp(-B * 0.3) - np.exp(-B * 1.2)) / (0.9 * B)]
    for law, factor in zip(SOJOURNS, by_hand, strict=True):
        assert discounted(law) == pytest.approx(factor, rel=1e-9)
        assert flowed(law) == pytest.approx((1 - factor) / B, rel=1e-9)


@pytest.mark.parametrize(("pays", "worth"), [(AT_END, discounted), (FLOW, flowed), (AT_START, lambda law: 1.0)])
def test_several_sojourns_of_different_distributions_within_one_option(pays, worth):
    points, weights = zip(*(nodes(law, 40) for law in SOJOURNS), strict=True)
    durations = np.stack([x.ravel() for x in np.meshgrid(*points, indexing="ij")], -1)
    weight = np.einsum("i,j,k->ijk", *weights).ravel()
    reward, factor, _ = targets(durations, pays)
    # Independent, so each sojourn's worth is multiplied with the expected factors of those before it.
    factors = [discounted(law) for law in SOJOURNS]
    ahead = np.concatenate([[1], np.cumprod(factors)[:-1]])
    # 40 nodes are good for 1e-5.
    assert weight @ factor == pytest.approx(np.prod(factors), rel=1e-5)
    assert weight @ reward == pytest.approx(ahead @ [worth(law) for law in SOJOURNS], rel=1e-5)


def test_a_flow_is_the_same_in_one_step_or_in_many():
    cuts = np.array([[0.4, 0.1, 1.3, 0.05, 0.15]])
    whole = quad(lambda t: 3 * np.exp(-B * t), 0, 2)[0]
    assert targets(cuts, FLOW, reward=3.0)[0][0] == pytest.approx(whole, rel=1e-6)
    assert float(RULE.flow(3.0, 2.0)) == pytest.approx(whole, rel=1e-6)
    assert float(PerTime(0.0).flow(3.0, 2.0)) == 6 and float(PerTime(1e-9).flow(3.0, 2.0)) == pytest.approx(6, rel=1e-6)


def test_on_the_host_it_is_the_same():
    durations = jnp.array([0.3, 1.1, 0.2])
    env = Lasting(row(5), known(durations), FLOW)
    host = HostOptions(Hosted(env, 2, key=KEY), [walk(5, [3]), walk(5, [1])], RULE, key=KEY)
    host.reset(seed=0)
    host.send(np.array([0, 1]))
    reward, factor = RULE(host.recv())
    np.testing.assert_allclose(reward, [quad(lambda t: np.exp(-B * t), 0, t)[0] for t in (1.6, 0.3)], rtol=1e-6)
    np.testing.assert_allclose(factor, np.exp(-B * np.array([1.6, 0.3])), rtol=1e-6)


def test_smdp_q_learning_in_continuous_time_finds_the_values_by_quadrature():
    """State 0 is left for 1 after an exponential time during which 1 a second flows, or a gamma time that pays 1.5 on
    arrival; 1 is left for 0 after a uniform time with a flow of 0.2. A third option goes round."""
    arrives = np.array([[1, 1], [0, 0]])
    paid = np.broadcast_to(np.array([[1.0, 1.5], [0.2, 0.2]])[..., None], (2, 2, 2))
    table = Tabular(np.eye(2)[arrives], paid, start=np.array([1.0, 0]), terminal=np.zeros(2, bool), name="round")

    def drawn(s, a, key):
        each = [
            jax.random.exponential(key) * 0.5,
            jax.random.gamma(key, 2.5) * 0.4,
            jax.random.uniform(key) * 0.9 + 0.3,
        ]
        return jnp.stack(each)[jnp.where(s == 1, 2, a)]

    def pays(reward, s, took):  # the lump is what pays 1.5
        lump = reward == 1.5
        return jnp.where(lump, reward, RULE.flow(reward, took)), jnp.where(lump, took, 0.0)

    laws, worth = np.array([[EXPONENTIAL, GAMMA], [UNIFORM] * 2]), np.zeros((2, 2))
    arrival = np.zeros((2, 2, 2))
    for s, a in itertools.product(range(2), range(2)):
        arrival[s, a, 1 - s] = discounted(laws[s, a])
        worth[s, a] = paid[s, a, 0] * (discounted if (s, a) == (0, 1) else flowed)(laws[s, a])
    actions = Tables(worth, arrival, np.ones((2, 2), bool), np.zeros(2, bool))
    turn = TabularOption(np.array([True, False]), np.eye(2)[[0, 0]], np.array([1.0, 0.0]))
    model = actions.beside(option_model(actions, turn.initiation, turn.policy, turn.stop))
    value, _ = policy_iteration(model)
    exact = action_values(model, value)

    env = Lasting(table, Partial(drawn), Partial(pays))
    over = OptionEnv(env, [*primitives(env.spec), turn], RULE)
    cfg = Config(alpha=0.01, epsilon=0.6)
    state, _ = jax.jit(jax.vmap(lambda k: learn(cfg, over, RULE, 20_000, key=k)))(jax.random.split(KEY, 32))
    q = np.asarray(state.q, float)
    error = q.std(0) / np.sqrt(32)
    may = np.isfinite(exact)
    # 4 standard errors of the mean over 32 seeds, at most 0.04: alpha is constant, so that values move for ever.
    assert (error < 0.01).all() and (np.abs(q.mean(0) - np.where(may, exact, 0)) < 4 * error)[may].all()
