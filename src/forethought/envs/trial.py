"""Three small environments on which an audit is judged: what they show is all there is, and all that ends can end.

Each has noise in its transitions, an end for good, a time limit, two observation keys of equal shape and actions that
push in opposite directions.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from forethought.envs.control import MechanicalState
from forethought.envs.pure import ObservedEnv, first_step, next_step, within_bounds
from forethought.protocols import AbstractPolicy
from forethought.types import Box, Decision, Discrete, Spec, TimeStep

EDGE = 2.5
"""Hover ends where a coordinate of the position is farther from 0 than this."""


class Hover(ObservedEnv):
    """A point in the plane, blown about by wind, that is to stay at the origin.

    Observations: 'position' x [2], 'velocity' v [2]. With action a [2] in [-1, 1] and e ~ N(0, noise^2) per dimension,

        v' = 0.9 v + 0.25 a + e,   x' = x + 0.25 v',   reward = exp(-|x'|^2) - 0.05 |a|^2

    It terminates where a coordinate of x' is beyond +-2.5, with -1 in place of exp(-|x'|^2), and is truncated after 60
    decisions. An episode starts at x ~ U(-1.5, 1.5), v ~ U(-0.1, 0.1) per dimension.
    An action outside [-1, 1] makes reward and observations NaN.
    """

    noise: Float[Array, ""] | float = 0.2
    """Standard deviation of the wind's push at each decision."""

    @property
    def spec(self) -> Spec:
        return Spec(
            name="jax/hover",
            obs={"position": Box((2,)), "velocity": Box((2,))},
            action=Box((2,), low=-1.0, high=1.0),
            time_limit=60,
        )

    def reset(self, *, key: PRNGKeyArray) -> tuple[MechanicalState, TimeStep]:
        position_key, velocity_key = jax.random.split(key)
        position = jax.random.uniform(position_key, (2,), minval=-1.5, maxval=1.5)
        velocity = jax.random.uniform(velocity_key, (2,), minval=-0.1, maxval=0.1)
        state = MechanicalState(position, velocity, jnp.zeros((), jnp.int32))
        return state, first_step(_observe(state))

    def step(
        self, state: MechanicalState, action: Float[Array, " 2"], *, key: PRNGKeyArray
    ) -> tuple[MechanicalState, TimeStep]:
        push = within_bounds(action)
        velocity = 0.9 * state.velocity + 0.25 * push + self.noise * jax.random.normal(key, (2,))
        state = MechanicalState(state.position + 0.25 * velocity, velocity, state.elapsed + 1)
        lost = jnp.any(jnp.abs(state.position) > EDGE)
        reward = jnp.where(lost, -1.0, jnp.exp(-jnp.sum(state.position**2))) - 0.05 * jnp.sum(push**2)
        limit = self.spec.time_limit
        return state, next_step(_observe(state), reward, elapsed=state.elapsed, time_limit=limit, terminated=lost)

    def state(self, obs: dict[str, Array]) -> MechanicalState:
        return MechanicalState(obs["position"], obs["velocity"], jnp.zeros((), jnp.int32))


# The numbers of Gymnasium's CartPole-v1, in kg, m, s; the pole's length is that from the hinge to its centre.
CART_MASS, POLE_MASS, POLE_LENGTH = 1.0, 0.1, 0.5
GRAVITY, FORCE, TIMESTEP = 9.8, 10.0, 0.02
FALLEN, RAIL_END = 12 * 2 * np.pi / 360, 2.4


class Balance(ObservedEnv):
    """A cart that balances its pole while both are knocked: Gymnasium's `CartPole-v1` with a continuous, costly force.

    Observations: 'position' [2] = x in m, angle in rad, 'velocity' [2] = their rates; angle 0 is upright. With the
    force F = 10 N times the action a [1] in [-1, 1], the masses M of both, m of the pole, l = 0.5 m, w the pole's rate,

        p = (F + m l w^2 sin th) / M
        th'' = (g sin th - cos th p) / (l (4/3 - m cos^2 th / M)),   x'' = p - m l th'' cos th / M

    taken with one Euler step of 0.02 s, after which e ~ N(0, noise^2) is added to both rates. The reward is
    1 - 0.1 x'^2 - 0.01 a^2. The episode terminates, without the 1, where |th'| > 12 degrees or |x'| > 2.4, and is
    truncated after 100 decisions. All four numbers start at U(-0.05, 0.05).
    With noise 0 and actions -1 and 1 the states are the original's. An action outside [-1, 1] makes reward and
    observations NaN.
    """

    noise: Float[Array, ""] | float = 0.1
    """Standard deviation of the knocks, in m/s and rad/s."""

    @property
    def spec(self) -> Spec:
        return Spec(
            name="jax/balance",
            obs={"position": Box((2,)), "velocity": Box((2,))},
            action=Box((1,), low=-1.0, high=1.0),
            time_limit=100,
        )

    def reset(self, *, key: PRNGKeyArray) -> tuple[MechanicalState, TimeStep]:
        start = jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)
        state = MechanicalState(start[:2], start[2:], jnp.zeros((), jnp.int32))
        return state, first_step(_observe(state))

    def step(
        self, state: MechanicalState, action: Float[Array, " 1"], *, key: PRNGKeyArray
    ) -> tuple[MechanicalState, TimeStep]:
        push = within_bounds(action)[0]
        position = state.position + TIMESTEP * state.velocity
        velocity = state.velocity + TIMESTEP * _cartpole_acceleration(
            state.position[1], state.velocity[1], FORCE * push
        )
        state = MechanicalState(position, velocity + self.noise * jax.random.normal(key, (2,)), state.elapsed + 1)
        x, angle = state.position
        fell = (jnp.abs(x) > RAIL_END) | (jnp.abs(angle) > FALLEN)
        reward = jnp.where(fell, 0.0, 1.0) - 0.1 * x**2 - 0.01 * push**2
        limit = self.spec.time_limit
        return state, next_step(_observe(state), reward, elapsed=state.elapsed, time_limit=limit, terminated=fell)

    def state(self, obs: dict[str, Array]) -> MechanicalState:
        return MechanicalState(obs["position"], obs["velocity"], jnp.zeros((), jnp.int32))


def _cartpole_acceleration(
    angle: Float[Array, ""], spin: Float[Array, ""], force: Float[Array, ""]
) -> Float[Array, " 2"]:
    """Accelerations of cart and pole (m/s^2, rad/s^2) of `Balance` (Florian 2007, as Gymnasium has them)."""
    mass, lever = CART_MASS + POLE_MASS, POLE_MASS * POLE_LENGTH
    pushed = (force + lever * spin**2 * jnp.sin(angle)) / mass
    turn = (GRAVITY * jnp.sin(angle) - jnp.cos(angle) * pushed) / (
        POLE_LENGTH * (4 / 3 - POLE_MASS * jnp.cos(angle) ** 2 / mass)
    )
    return jnp.stack([pushed - lever * turn * jnp.cos(angle) / mass, turn])


def _observe(state: MechanicalState) -> dict[str, Float[Array, " 2"]]:
    return {"position": state.position, "velocity": state.velocity}


MOVES = np.array([[-1, 0], [1, 0], [0, -1], [0, 1]], np.int32)
"""What each action of Grid adds to (row, column): up, down, left, right."""
SIDE, GOAL, PITS = 8, (3, 7), ((1, 4), (4, 4), (6, 6))


class GridState(eqx.Module):
    """Where one stands, and the decisions of the episode so far."""

    row: Int[Array, ""]
    column: Int[Array, ""]
    elapsed: Int[Array, ""]


class Grid(ObservedEnv):
    """Eight by eight cells to be crossed from the upper left to the goal, past pits, with slippery moves.

        S S S . . . . .      S: an episode starts on one of these nine, equally likely
        S S S . o . . .      o: pit, terminates, reward -1
        S S S . . . . .      G: goal, terminates, reward 1
        . . . . . . . G      every other step is rewarded with -0.02
        . . . . o . . .
        . . . . . . . .      row 0 is the upper one, column 0 the left one
        . . . . . . o .
        . . . . . . . .

    Observations: 'row' and 'column', 0 .. 7. Actions 0 .. 3 go up, down, left and right; with probability `noise` each
    the move slips to one of the two directions across. A move against the border stays. The episode is truncated after
    60 decisions. An action that is not in 0 .. 3 makes the reward NaN.
    """

    noise: Float[Array, ""] | float = 0.1
    """Probability of slipping to either side, so at most 0.5."""

    @property
    def spec(self) -> Spec:
        return Spec(
            name="jax/grid",
            obs={"row": Discrete(SIDE), "column": Discrete(SIDE)},
            action=Discrete(len(MOVES)),
            time_limit=60,
        )

    def reset(self, *, key: PRNGKeyArray) -> tuple[GridState, TimeStep]:
        row, column = jax.random.randint(key, (2,), 0, 3, dtype=jnp.int32)
        state = GridState(row, column, jnp.zeros((), jnp.int32))
        return state, first_step(_observe_cell(state))

    def step(self, state: GridState, action: Int[Array, ""], *, key: PRNGKeyArray) -> tuple[GridState, TimeStep]:
        luck = jax.random.uniform(key)
        across = jnp.where(action < 2, 2, 0)  # the first of the two directions across
        slipped = jnp.where(luck < self.noise, across, across + 1)
        move = jnp.asarray(MOVES)[jnp.where(luck < 2 * self.noise, slipped, action)]
        cell = jnp.clip(jnp.stack([state.row, state.column]) + move, 0, SIDE - 1)
        state = GridState(cell[0], cell[1], state.elapsed + 1)
        won, lost = jnp.all(cell == jnp.asarray(GOAL)), jnp.any(jnp.all(cell == jnp.asarray(PITS), axis=1))
        reward = jnp.where(won, 1.0, jnp.where(lost, -1.0, -0.02))
        exists = (action >= 0) & (action < len(MOVES))  # an index beyond the table would be clamped
        return state, next_step(
            _observe_cell(state),
            jnp.where(exists, reward, jnp.nan),
            elapsed=state.elapsed,
            time_limit=self.spec.time_limit,
            terminated=won | lost,
        )

    def state(self, obs: dict[str, Array]) -> GridState:
        return GridState(obs["row"], obs["column"], jnp.zeros((), jnp.int32))


def _observe_cell(state: GridState) -> dict[str, Int[Array, ""]]:
    return {"row": state.row, "column": state.column}


class Controller(AbstractPolicy):
    """A simple controller of one of the three: hovers at the origin, balances the pole, walks to the goal."""

    name: str = eqx.field(static=True)
    """Of the environment, as its spec says it."""

    def initial(self) -> None:
        return None

    def __call__(self, carry: None, time_step: TimeStep, *, key: PRNGKeyArray) -> tuple[None, Decision]:
        obs = jax.tree.map(jnp.asarray, time_step.obs)
        if self.name == "jax/hover":
            action = jnp.clip(-obs["position"] - 1.5 * obs["velocity"], -1, 1)
        elif self.name == "jax/balance":
            push = obs["position"] @ jnp.array([0.3, 8.0]) + obs["velocity"] @ jnp.array([0.5, 1.5])
            action = jnp.clip(push[None], -1, 1)
        else:
            vertical = jnp.where(obs["row"] < 3, 1, 0)  # down or up to the goal's row, once in its column
            action = jnp.where(obs["row"] < 2, 1, jnp.where(obs["column"] < 7, 3, vertical)).astype(jnp.int32)
        return None, Decision(action, jnp.zeros(()))
