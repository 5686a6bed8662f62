"""Two mechanical systems with the dynamics and rewards of their originals: pendulum and cart-pole swing-up."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from forethought.envs.pure import ObservedEnv, SketchedEnv, first_step, next_step, within_bounds
from forethought.types import Box, Spec, TimeStep


class MechanicalState(eqx.Module):
    """Where the joints are and how fast they move, in m and rad, and the decisions of the episode so far."""

    position: Float[Array, " joints"]
    velocity: Float[Array, " joints"]
    elapsed: Int[Array, ""]


class Pendulum(SketchedEnv, ObservedEnv):
    """A torque-limited pendulum that is to be swung up and held: Gymnasium's `Pendulum-v1`.

    Observation 'obs' [3]: cos(angle), sin(angle), angular velocity in rad/s; angle 0 is upright. The action
    [1] in [-1, 1] is a torque of [-2, 2] N m. With torque u at angle th (in [-pi, pi]) and velocity w,

        reward = -(th^2 + 0.1 w^2 + 0.001 u^2)
        w' = clip(w + (15 sin th + 3 u) dt, -8, 8),   th' = th + w' dt,   dt = 0.05 s

    An episode starts at th ~ U(-pi, pi), w ~ U(-1, 1), never terminates and is truncated after 200 decisions.
    The original computes in float64, this in float32, and an action outside [-1, 1], which the original clips,
    makes reward and observation NaN.
    """

    @property
    def spec(self) -> Spec:
        high = np.array([1, 1, 8], np.float32)
        return Spec(
            name="jax/pendulum",
            obs={"obs": Box((3,), low=-high, high=high)},
            action=Box((1,), low=-2.0, high=2.0),
            time_limit=200,
        )

    def reset(self, *, key: PRNGKeyArray) -> tuple[MechanicalState, TimeStep]:
        angle_key, velocity_key = jax.random.split(key)
        state = MechanicalState(
            jax.random.uniform(angle_key, (1,), minval=-jnp.pi, maxval=jnp.pi),
            jax.random.uniform(velocity_key, (1,), minval=-1.0, maxval=1.0),
            jnp.zeros((), jnp.int32),
        )
        return state, first_step(self._observe(state))

    def step(
        self, state: MechanicalState, action: Float[Array, " 1"], *, key: PRNGKeyArray
    ) -> tuple[MechanicalState, TimeStep]:
        torque = 2 * within_bounds(action)
        from_upright = jnp.mod(state.position + jnp.pi, 2 * jnp.pi) - jnp.pi
        reward = -(from_upright**2 + 0.1 * state.velocity**2 + 0.001 * torque**2)[0]
        velocity = jnp.clip(state.velocity + (15 * jnp.sin(state.position) + 3 * torque) * 0.05, -8, 8)
        state = MechanicalState(state.position + velocity * 0.05, velocity, state.elapsed + 1)
        return state, next_step(self._observe(state), reward, elapsed=state.elapsed, time_limit=self.spec.time_limit)

    def _observe(self, state: MechanicalState) -> dict[str, Float[Array, " 3"]]:
        parts = jnp.cos(state.position), jnp.sin(state.position), state.velocity
        return {"obs": jnp.concatenate(parts).astype(jnp.float32)}

    def state(self, obs: dict[str, Array]) -> MechanicalState:
        """The angle is in [-pi, pi]: whole turns are not observed, and nothing depends on them."""
        cos, sin, velocity = obs["obs"]
        return MechanicalState(jnp.arctan2(sin, cos)[None], velocity[None], jnp.zeros((), jnp.int32))

    def sketch(self, obs: dict[str, Array | np.ndarray]) -> Float[np.ndarray, "1 5"]:
        """Draws the rod; a positive angle leans to the left, as in Gymnasium's own picture."""
        cos, sin, _ = np.asarray(obs["obs"])
        return np.array([[0, 0, -sin, cos, 0.1]], np.float32)


# The numbers of DMControl's cartpole.xml, in kg, m, s; the pole is a capsule of uniform density that turns about
# one end of its axis.
CART_MASS, POLE_MASS, POLE_LENGTH, POLE_RADIUS = 1.0, 0.1, 1.0, 0.045
GRAVITY, GEAR, TIMESTEP = 9.81, 10.0, 0.01
SLIDER_DAMPING, HINGE_DAMPING = 5e-4, 2e-6
RAIL_END, LIMIT_TIME = 1.8, 0.08
# MuJoCo's default impedance of a limit: from 0.9 at the surface to 0.95 at a depth of 1 mm.
SOFT, STIFF, LIMIT_WIDTH = 0.9, 0.95, 1e-3


def _capsule_inertia(mass: float, length: float, radius: float) -> float:
    """The moment of inertia of a solid capsule about an axis through its centre, across its own."""
    cylinder, caps = length * radius**2, 4 / 3 * radius**3  # volumes over pi
    cylinder, caps = mass * cylinder / (cylinder + caps), mass * caps / (cylinder + caps)
    across = cylinder * (3 * radius**2 + length**2) / 12
    return across + caps * (2 / 5 * radius**2 + length**2 / 4 + 3 / 8 * length * radius)


TOTAL_MASS = CART_MASS + POLE_MASS
LEVER = POLE_MASS * POLE_LENGTH / 2
HINGE_INERTIA = _capsule_inertia(POLE_MASS, POLE_LENGTH, POLE_RADIUS) + LEVER * POLE_LENGTH / 2
# The slider's mobility with the pole upright; MuJoCo scales a limit's softness by it in every pose.
UPRIGHT_MOBILITY = HINGE_INERTIA / (TOTAL_MASS * HINGE_INERTIA - LEVER**2)


def _limit_force(
    x: Float[Array, ""], speed: Float[Array, ""], free: Float[Array, ""], mobility: Float[Array, ""]
) -> Float[Array, ""]:
    """The force on the cart from the soft limits at both ends of the rail (MuJoCo's docs, 'Computation').

    Past an end by r, with outward speed v and the outward acceleration a that it would have without the limit,
    the cart is pushed back by max(0, a + b v + k d r) / (mobility + (1 - d) / d * upright mobility), where d(r) is
    the limit's impedance, b = 2 / (0.95 tau), k = 1 / (0.95 tau)^2, tau = 0.08 s.
    """
    side, depth = jnp.sign(x), jnp.abs(x) - RAIL_END
    share = jnp.clip(depth / LIMIT_WIDTH, 0, 1)
    share = jnp.where(share < 0.5, 2 * share**2, 1 - 2 * (1 - share) ** 2)
    impedance = SOFT + share * (STIFF - SOFT)
    damping, stiffness = 2 / (STIFF * LIMIT_TIME), 1 / (STIFF * LIMIT_TIME) ** 2
    pushed = side * free + damping * side * speed + stiffness * impedance * depth
    force = jnp.maximum(pushed, 0) / (mobility + (1 - impedance) / impedance * UPRIGHT_MOBILITY)
    return jnp.where(depth > 0, -side * force, 0)


def _acceleration(
    position: Float[Array, " 2"], velocity: Float[Array, " 2"], push: Float[Array, ""]
) -> Float[Array, " 2"]:
    """Solves the cart-pole's equations of motion for the accelerations (m/s^2, rad/s^2) under a push (N).

    With M the total mass, c the pole's mass times the distance of its centre from the hinge, J its inertia about
    the hinge and th = 0 upright:

        M x'' + c cos(th) th'' = push + c sin(th) th'^2 - damping_x x'
        c cos(th) x'' + J th'' = g c sin(th) - damping_th th'
    """
    x, angle = position
    speed, spin = velocity
    coupling = LEVER * jnp.cos(angle)
    determinant = TOTAL_MASS * HINGE_INERTIA - coupling**2
    slide = push + LEVER * jnp.sin(angle) * spin**2 - SLIDER_DAMPING * speed
    turn = GRAVITY * LEVER * jnp.sin(angle) - HINGE_DAMPING * spin
    free = (HINGE_INERTIA * slide - coupling * turn) / determinant
    slide = slide + _limit_force(x, speed, free, HINGE_INERTIA / determinant)
    return jnp.stack([HINGE_INERTIA * slide - coupling * turn, TOTAL_MASS * turn - coupling * slide]) / determinant


def _runge_kutta(
    position: Float[Array, " 2"], velocity: Float[Array, " 2"], push: Float[Array, ""]
) -> tuple[Float[Array, " 2"], Float[Array, " 2"]]:
    """Moves position and velocity on by one time step: the classical fourth order, the push held."""
    half = TIMESTEP / 2
    v1, a1 = velocity, _acceleration(position, velocity, push)
    v2, a2 = velocity + half * a1, _acceleration(position + half * v1, velocity + half * a1, push)
    v3, a3 = velocity + half * a2, _acceleration(position + half * v2, velocity + half * a2, push)
    v4, a4 = velocity + TIMESTEP * a3, _acceleration(position + TIMESTEP * v3, velocity + TIMESTEP * a3, push)
    sixth = TIMESTEP / 6
    return position + sixth * (v1 + 2 * (v2 + v3) + v4), velocity + sixth * (a1 + 2 * (a2 + a3) + a4)


class CartPoleSwingUp(SketchedEnv, ObservedEnv):
    """A cart that swings its pole up and holds it in the middle: DMControl's `cartpole-swingup`.

    Observations: 'position' [3] = x in m, cos(angle), sin(angle); 'velocity' [2] = m/s, rad/s; angle 0 is upright.
    The action [1] in [-1, 1] pushes the cart with up to 10 N for one time step of 0.01 s. With u the action and
    the rest as it is after the step,

        reward = (1 + cos th) / 2  *  (1 + 0.1^(x/2)^2) / 2  *  (5 - u^2) / 5  *  (1 + 0.1^(w/5)^2) / 2

    An episode starts hanging and nearly at rest in the middle (normal noise of 0.01 on each coordinate), never
    terminates and is truncated after 1000 decisions. The dynamics are those of DMControl's MuJoCo model (suite/
    cartpole.xml: joint damping, fourth-order Runge-Kutta), the soft ends of the rail included, for which MuJoCo's
    solver has a closed form here because at most one of them acts. In float64 the two agree to rounding; this
    environment computes in float32, which parts them by up to 1e-4 in 200 steps and, where the pole tumbles
    (its motion is chaotic), altogether in 1000.
    An action outside [-1, 1], which the original clips, makes reward and observations NaN.
    """

    @property
    def spec(self) -> Spec:
        return Spec(
            name="jax/cartpole-swingup",
            obs={"position": Box((3,)), "velocity": Box((2,))},
            action=Box((1,), low=-1.0, high=1.0),
            time_limit=1000,
        )

    def reset(self, *, key: PRNGKeyArray) -> tuple[MechanicalState, TimeStep]:
        position_key, velocity_key = jax.random.split(key)
        position = jnp.array([0, jnp.pi]) + 0.01 * jax.random.normal(position_key, (2,))
        velocity = 0.01 * jax.random.normal(velocity_key, (2,))
        state = MechanicalState(position, velocity, jnp.zeros((), jnp.int32))
        return state, first_step(self._observe(state))

    def step(
        self, state: MechanicalState, action: Float[Array, " 1"], *, key: PRNGKeyArray
    ) -> tuple[MechanicalState, TimeStep]:
        push = within_bounds(action)[0]
        position, velocity = _runge_kutta(state.position, state.velocity, GEAR * push)
        state = MechanicalState(position, velocity, state.elapsed + 1)
        upright = (1 + jnp.cos(position[1])) / 2
        centred = (1 + 0.1 ** (position[0] / 2) ** 2) / 2
        calm = (1 + 0.1 ** (velocity[1] / 5) ** 2) / 2
        reward = upright * centred * (5 - push**2) / 5 * calm
        return state, next_step(self._observe(state), reward, elapsed=state.elapsed, time_limit=self.spec.time_limit)

    def _observe(self, state: MechanicalState) -> dict[str, Float[Array, " size"]]:
        x, angle = state.position
        position = jnp.stack([x, jnp.cos(angle), jnp.sin(angle)])
        return {"position": position.astype(jnp.float32), "velocity": state.velocity.astype(jnp.float32)}

    def state(self, obs: dict[str, Array]) -> MechanicalState:
        """The angle is in [-pi, pi]: whole turns are not observed, and nothing depends on them."""
        x, cos, sin = obs["position"]
        return MechanicalState(jnp.stack([x, jnp.arctan2(sin, cos)]), obs["velocity"], jnp.zeros((), jnp.int32))

    def sketch(self, obs: dict[str, Array | np.ndarray]) -> Float[np.ndarray, "3 5"]:
        """Draws rail, cart and pole; the rail is 1 m above the ground."""
        x, cos, sin = np.asarray(obs["position"])
        rail, cart = [-2, 1, 2, 1, 0.02], [x - 0.2, 1, x + 0.2, 1, 0.1]
        return np.array([rail, cart, [x, 1, x + sin, 1 + cos, POLE_RADIUS]], np.float32)
