"""An irreversible action passes on real evidence only, whatever it hides in; every decision is on record before."""

import dataclasses
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from forethought import collect, envs
from forethought.envs.hosted import Hosted
from forethought.gate import Ask, Check, Evidence, Gate, Gated, Refused, Rule
from forethought.protocols import AbstractEnv, AbstractPolicy, HostEnv
from forethought.types import Decision, Outcome, Region, Step, describe, spec_from
from silo import CORRIDOR, KEY, LAUNCH, Dial, Silo, done, guarded, lines, silo, verdicts, yes
from silo import record as record

# What is irreversible


def test_a_declaration_is_part_of_the_spec_and_passes_through_json():
    for action, declared in (
        (spaces.Discrete(5), (0, 3)),
        (spaces.Box(-1, 1, (2,)), (Region((-np.inf, 0.1), (np.inf, 1.0)), Region((1 / 3, -1.0), (1.0, 1.0)))),
    ):
        env = envs.make(lambda action=action: type("Any", (Silo,), {"action_space": action})([]))
        spec = dataclasses.replace(env.spec, irreversible=declared)
        back = spec_from(json.loads(json.dumps(describe(spec), allow_nan=False)))
        assert back.irreversible == declared and back == spec and hash(back) == hash(spec)
        assert spec != env.spec and env.spec.irreversible == () and "irreversible" not in describe(env.spec)
        env.close()


@pytest.mark.parametrize("declared", [(2, 1), (1, 1), (-1,), (4,), (True,)])
def test_indices_that_no_action_has_are_refused(declared):
    with pytest.raises(ValueError, match="irreversible"):
        dataclasses.replace(silo(1)[0].spec, irreversible=declared)


@pytest.mark.parametrize(
    "low, high, why",
    [
        ((0.0,), (1.0,), "2 bounds"),
        ((0.5, 0.0), (0.4, 1.0), "no action lies"),
        ((0.5, float("nan")), (1.0, 1.0), "no action lies"),
        ((9.0, -1.0), (10.0, 1.0), "as a policy acts"),
    ],
)
def test_regions_in_which_no_action_lies_are_refused(low, high, why):
    with pytest.raises(ValueError, match=why):
        dataclasses.replace(silo(1, Dial)[0].spec, irreversible=(Region(low, high),))


def test_a_gate_that_would_guard_nothing_is_refused_unless_it_is_meant(record):
    gate = Gate([], record)
    for env in (silo(1)[0], CORRIDOR):
        with pytest.raises(ValueError, match="would guard nothing"):
            Gated(env, gate)
        assert Gated(env, gate, irreversible=()).spec.irreversible == ()
    with pytest.raises(ValueError, match="Silo is neither"):
        Gated(Silo([]), gate)


def test_a_declaration_adds_to_the_specs_own_and_takes_nothing_away(record):
    gate = Gate([], record)
    once = Gated(CORRIDOR, gate, irreversible=(1,))
    assert Gated(once, gate, irreversible=(0,)).spec.irreversible == (0, 1)
    assert Gated(once, gate, irreversible=()).spec.irreversible == (1,)
    assert Gated(once, gate).spec == dataclasses.replace(CORRIDOR.spec, irreversible=(1,))


# Evidence


def test_every_source_must_allow_and_they_are_asked_in_order_until_one_refuses(record):
    asked = []

    def says(name, answer):
        return Check(name, lambda act: asked.append(name) or answer)

    gated, world = guarded(record, says("a", True), says("b", (False, "no key")), says("c", True), num=1)
    with pytest.raises(Refused, match=r"environment 0, episode 0, step 0: .* 2 is refused: check 'b' .*: no key"):
        gated.send(np.array([LAUNCH]))
    assert asked == ["a", "b"] and done(gated, world) == []
    evidence = lines(record)[0]["evidence"]
    assert [(e["source"], e["allows"], e["text"]) for e in evidence] == [("a", True, ""), ("b", False, "no key")]


def test_rule_check_and_person_are_shown_the_real_observation(record):
    shown = []
    sources = (
        Rule("late", lambda obs, action: obs["obs"][0] >= 2),  # a numpy bool
        Check("backup", lambda act: (True, "read back")),
        Ask(lambda act: shown.append(act) or (True, "go"), name="Ada"),
    )
    gated, world = guarded(record, *sources)
    before = time.time()
    for _ in range(2):
        gated.send(np.array([0, 3, 1]))
        gated.recv()
    gated.send(np.array([0, LAUNCH, 1]))
    assert done(gated, world)[-3:] == [0, LAUNCH, 1]
    (act,), (line,) = shown, lines(record)
    assert (act.environment, act.row, act.episode, act.step) == ("Silo", 1, 0, 2)
    assert act.obs["obs"].tolist() == [2.0] and act.action.tolist() == LAUNCH
    assert not act.action.flags.writeable and not act.obs["obs"].flags.writeable
    said = [(e["kind"], e["source"], e["allows"], e["text"], e["depth"]) for e in line["evidence"]]
    expected = [("rule", "late", True, "", 0), ("check", "backup", True, "read back", 0)]
    assert said == [*expected, ("person", "Ada", True, "go", 0)]
    assert all(before <= e["observed"] <= line["time"] <= time.time() for e in line["evidence"])
    found = [line[k] for k in ("environment", "row", "episode", "step", "action", "verdict", "why")]
    assert found == ["Silo", 1, 0, 2, LAUNCH, "allowed", None]


def raises(act):
    raise ConnectionError("token=hunter2")


@pytest.mark.parametrize(
    "answer, why",
    [
        (lambda act: None, "NoneType"),
        (lambda act: 1, "int"),
        (lambda act: "yes", "str"),
        (lambda act: jnp.ones((), bool), "ArrayImpl"),
        (lambda act: np.ones(3, bool), "ndarray"),
        (lambda act: (True, None), "tuple"),
        (lambda act: (1, "yes"), "tuple"),
        (lambda act: act, "Act"),
        (lambda act: False, "does not allow it"),
        (raises, "raised ConnectionError"),
    ],
)
def test_what_is_no_yes_is_a_refusal_and_recorded(record, answer, why):
    for source in (Check("c", answer), Ask(answer), Rule("r", lambda obs, action: answer(obs))):
        gated, world = guarded(record, source, num=1)
        with pytest.raises(Refused):
            gated.send(np.array([LAUNCH]))
        assert done(gated, world) == [] and lines(record)[-1]["verdict"] == "refused"
    assert why in lines(record)[0]["why"] and "hunter2" not in record.path.read_text()


def test_a_gate_without_sources_refuses(record):
    gated, world = guarded(record, num=1)
    with pytest.raises(Refused, match="no source"):
        gated.send(np.array([LAUNCH]))
    assert done(gated, world) == [] and verdicts(record) == ["refused"]


def test_an_interrupted_question_is_a_refusal_on_record_and_goes_on_as_an_interrupt(record):
    def interrupted(act):
        raise KeyboardInterrupt

    gated, world = guarded(record, Ask(interrupted))
    with pytest.raises(KeyboardInterrupt):
        gated.send(np.array([LAUNCH, 0, LAUNCH]))
    assert done(gated, world) == [] and verdicts(record) == ["refused", "withheld"]


def imagined(depth):
    one = jnp.ones(())
    step = collect.begin(CORRIDOR, collect.RandomPolicy(CORRIDOR.spec.action), 0, key=KEY).time_step
    if depth is None:
        return Outcome({"state": one}, one, one, one, one)
    return Step(step, jnp.int32(1), None, jnp.int32(depth), jnp.int32(0))


@pytest.mark.parametrize("depth", [None, 1, 3])
def test_what_was_imagined_is_no_evidence(record, depth):
    gated, world = guarded(record, Check("model", lambda act: imagined(depth)), num=1)
    with pytest.raises(Refused, match=f"imagined .depth {depth or 1}.; a prediction is not a permission"):
        gated.send(np.array([LAUNCH]))
    assert done(gated, world) == [] and lines(record)[0]["evidence"][0]["depth"] == (depth or 1)


def test_a_row_of_real_data_is_no_evidence_either(record):
    gated, world = guarded(record, Check("row", lambda act: imagined(0)), num=1)
    with pytest.raises(Refused, match="a Step"):
        gated.send(np.array([LAUNCH]))
    assert done(gated, world) == []


@dataclasses.dataclass
class Forger:
    """A source of one's own, which hands out what it is told to."""

    give: object
    kind: str = "check"
    name: str = "forger"

    def evidence(self, act):
        return self.give(Evidence(act.id, self.kind, self.name, True, "", time.time(), 0))


def test_a_source_of_ones_own_may_give_evidence_on_the_act_it_was_asked_about(record):
    gated, world = guarded(record, Forger(lambda own: own), num=1)
    gated.send(np.array([LAUNCH]))
    assert done(gated, world) == [LAUNCH]


@pytest.mark.parametrize(
    "give, why",
    [
        (lambda own: dataclasses.replace(own, depth=2), "imagined"),
        (lambda own: dataclasses.replace(own, act="of yesterday"), "not used twice"),
        (lambda own: dataclasses.replace(own, kind="person"), "in the name of person"),
        (lambda own: dataclasses.replace(own, source="Ada"), "'Ada'"),
        (lambda own: dataclasses.replace(own, allows=False), "does not allow"),
        (lambda own: True, "bool"),
        (lambda own: dataclasses.replace(own, observed=float("nan")), "raised"),
    ],
)
def test_forged_evidence_is_refused(record, give, why):
    gated, world = guarded(record, Forger(give), num=1)
    with pytest.raises(Refused, match=why):
        gated.send(np.array([LAUNCH]))
    assert done(gated, world) == [] and verdicts(record) == ["refused"]


def test_evidence_is_not_used_twice(record):
    """A source that keeps its first evidence is believed once: not in the next step, nor in another row."""
    kept = []
    source = Forger(lambda own: kept.append(own) or kept[0])
    gated, world = guarded(record, source, num=2)
    with pytest.raises(Refused, match="environment 1.*not used twice"):
        gated.send(np.array([LAUNCH, LAUNCH]))
    kept.clear()
    gated.send(np.array([LAUNCH, 0]))
    gated.recv()
    with pytest.raises(Refused, match="environment 0.*step 1.*not used twice"):
        gated.send(np.array([LAUNCH, 0]))
    assert done(gated, world) == [LAUNCH, 0]


# A batch


def test_one_irreversible_action_among_others_stops_all_of_the_batch(record):
    gated, world = guarded(record, Rule("row 2 never", lambda obs, action: False))
    with pytest.raises(Refused, match="environment 2"):
        gated.send(np.array([0, 1, LAUNCH]))
    assert done(gated, world) == [] and verdicts(record) == ["refused"]
    gated.send(np.array([0, 1, 3]))  # the batch is where it was, and another action may be sent
    assert gated.recv().obs["obs"].tolist() == [[1], [1], [1]] and world == [0, 1, 3]


def test_every_irreversible_row_is_decided_on_alone_and_an_allowed_one_is_withheld(record):
    asked = []
    gated, world = guarded(record, Ask(lambda act: asked.append(act.row) or act.row != 1), num=4)
    with pytest.raises(Refused, match="environment 1"):
        gated.send(np.array([LAUNCH, LAUNCH, 0, LAUNCH]))
    assert asked == [0, 1] and done(gated, world) == []
    assert [(line["row"], line["verdict"]) for line in lines(record)] == [
        (0, "withheld"), (1, "refused"), (3, "withheld"),
    ]  # fmt: skip
    gated.send(np.array([LAUNCH, 0, 0, LAUNCH]))
    assert done(gated, world) == [LAUNCH, 0, 0, LAUNCH] and asked == [0, 1, 0, 3]
    assert len({line["act"] for line in lines(record)}) == 5


def test_rows_outside_of_where_are_neither_judged_nor_sent(record):
    gated, world = guarded(record)
    gated.send(np.array([LAUNCH, 1, -7]), where=np.array([False, True, False]))
    gated.recv()
    assert done(gated, world) == [1] and lines(record) == ()


def test_the_void_of_a_row_outside_of_where_is_not_judged_even_where_0_is_irreversible(record):
    gated, world = guarded(record, declared=(0,))
    gated.send(np.array([0, 1, 0]), where=np.array([False, True, False]))
    assert done(gated, world) == [1] and lines(record) == ()


def test_a_row_outside_of_where_may_hold_anything(record):
    env, world = silo(2, Dial)
    gated = Gated(env, Gate([], record), irreversible=(Region((0.9, -1.0), (1.0, 1.0)),))
    gated.reset()
    gated.send(np.array([[1e300, np.nan], [0.5, 0.0]]), where=np.array([False, True]))
    assert done(gated, world) == [0] and lines(record) == ()


def test_a_source_cannot_change_what_is_sent(record):
    """Neither the array that was given nor the one that was shown leads to the environment."""
    action, where = np.array([LAUNCH, 0, 0]), np.array([True, True, False])

    def changed(act):
        action[:], where[:] = 3, True
        with pytest.raises(ValueError, match="read-only"):
            act.action[...] = 1
        return True

    gated, world = guarded(record, Ask(changed))
    gated.send(action, where)
    assert done(gated, world) == [LAUNCH, 0]


def test_a_rule_judges_by_what_the_environment_showed_not_by_what_was_made_of_it(record):
    gated, world = guarded(record, Rule("late", lambda obs, action: obs["obs"][0] > 0), num=1)
    time_step = gated.reset()
    time_step.obs["obs"][:] = 5
    with pytest.raises(Refused):
        gated.send(np.array([LAUNCH]))
    assert done(gated, world) == []


@pytest.mark.parametrize(
    "action",
    [
        np.array([2.0]), np.array([2], bool), np.array([True]), np.array([np.nan]), np.array([-2]),
        np.array([2**32 + LAUNCH]), np.array([2**64 - 2], np.uint64), np.array(LAUNCH), np.array([[LAUNCH]]),
        np.array(["2"]), np.array([LAUNCH], object), np.array([2 + 0j]), np.array([LAUNCH, LAUNCH]),
    ],
)  # fmt: skip
def test_nothing_is_rounded_wrapped_or_broadcast_into_an_action(record, action):
    gated, world = guarded(record, Ask(yes), num=1)
    with pytest.raises(ValueError):
        gated.send(action)
    assert done(gated, world) == [] and lines(record) == ()  # nobody was asked


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int64, np.uint64])
def test_an_integer_of_any_kind_is_the_action_that_it_is(record, kind):
    gated, world = guarded(record, num=1)
    with pytest.raises(Refused):
        gated.send(np.array([LAUNCH], kind))
    assert done(gated, world) == []


def dial(record, region):
    env, world = silo(1, Dial)
    gated = Gated(env, Gate([], record), irreversible=(region,))
    gated.reset()
    return gated, world


@pytest.mark.parametrize("action", [[0.9, 0.0], [1.0, -1.0], [1 - 1e-12, 1.0], [np.float64(np.float32(0.9)), 0.5]])
def test_a_region_holds_its_bounds_and_what_is_rounded_to_them(record, action):
    """0.9 is 0.89999998 in float32, and 1 - 1e-12 is 1."""
    low = 1.0 if action[0] == 1 - 1e-12 else 0.9
    gated, world = dial(record, Region((low, -np.inf), (1.0, np.inf)))
    with pytest.raises(Refused):
        gated.send(np.array([action]))
    with pytest.raises(Refused):
        gated.send(np.array([action], np.float32))
    assert done(gated, world) == []


def test_outside_of_a_region_nobody_is_asked(record):
    gated, world = dial(record, Region((0.9, 0.25), (1.0, 1.0)))
    for action in ([0.89, 1.0], [1.0, 0.24]):  # low in one element only
        gated.send(np.array([action], np.float32))
        gated.recv()
    assert done(gated, world) == [0, 1]


@pytest.mark.parametrize("action", [[np.nan, 0.0], [np.inf, 0.0], [1.0001, 0.0], [0.0, -2.0]])
def test_nothing_is_clipped_into_a_region(record, action):
    gated, world = dial(record, Region((0.9, -1.0), (1.0, 1.0)))
    with pytest.raises(ValueError, match="none of the space"):
        gated.send(np.array([action]))
    assert done(gated, world) == [] and lines(record) == ()


class Free(Silo):
    action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)


@pytest.mark.parametrize("action", [[np.nan, 0.0], [0.0, np.inf], [-np.inf, 0.0]])
def test_what_is_not_finite_is_refused_where_there_are_no_bounds(record, action):
    env, _ = silo(1, Free)
    gated = Gated(env, Gate([], record), irreversible=(Region((5.0, 5.0), (np.inf, np.inf)),))
    gated.reset()
    with pytest.raises(ValueError, match="none of the space"):
        gated.send(np.array([action]))
    with pytest.raises(Refused):
        gated.send(np.array([[5.0, 1e9]]))


# Options, plans, wrappers


def test_an_option_that_holds_it_stops_before_it_and_what_came_before_is_real(record):
    """A macro sends its primitive actions one by one, so each meets the gate; so does a plan that runs open loop."""
    gated, world = guarded(record, num=1)

    def macro(env, actions):
        for action in actions:
            env.send(np.array([action]))
            env.recv()

    with pytest.raises(Refused, match="step 3"):
        macro(gated, [0, 1, 3, LAUNCH, 0])
    assert done(gated, world) == [0, 1, 3]


def test_a_plan_is_not_allowed_as_a_whole(record):
    """Leave given for one launch does not serve the next one of the plan."""
    answers = iter([True, False])
    gated, world = guarded(record, Ask(lambda act: next(answers)), num=1)
    gated.send(np.array([LAUNCH]))
    gated.recv()
    with pytest.raises(Refused, match="step 1"):
        gated.send(np.array([LAUNCH]))
    assert done(gated, world) == [LAUNCH]


def test_no_public_name_leads_to_the_environment(record):
    """What a wrapper calls `env` is not there to be stepped by accident."""
    host, pure = guarded(record)[0], Gated(CORRIDOR, Gate([], record), irreversible=(1,))
    for gated in (host, pure):
        public = {name: getattr(gated, name) for name in dir(gated) if not name.startswith("_")}
        assert not any(isinstance(x, HostEnv | AbstractEnv | Gate) for x in public.values())
        with pytest.raises(AttributeError):
            gated.env  # noqa: B018
        with pytest.raises(AttributeError):
            gated.unwrapped  # noqa: B018


# The host interface


class Sequence(AbstractPolicy):
    """0 1 3 0 1 3 ..., by the count in its observation."""

    def initial(self):
        return None

    def __call__(self, carry, time_step, *, key):
        return None, Decision(jnp.array([0, 1, 3])[time_step.obs["obs"][0].astype(int) % 3], jnp.zeros(()))


def test_collected_rows_are_those_of_the_environment_itself(record):
    policy = Sequence()
    decide = jax.jit(lambda stream: collect.decide(policy, stream, jnp.int32(0)))

    def rows(env):
        stream = collect.begin_host(env, policy, seed=4, key=KEY)
        return collect.collect_host(env, decide, stream, 9)[1]

    plain, gated = silo(2)[0], Gated(silo(2)[0], Gate([Ask(yes)], record), irreversible=(LAUNCH, 3))
    assert isinstance(gated, HostEnv)
    found = rows(gated)
    jax.tree.map(np.testing.assert_array_equal, rows(plain), found)
    # Steps 2 and 5 of the first episode, and 9 ticks end at step 2 of the second.
    at = [(0, 0, 2), (1, 0, 2), (0, 0, 5), (1, 0, 5)]
    assert [(x["row"], x["episode"], x["step"]) for x in lines(record)] == at
    assert [x["action"] for x in lines(record)] == [3] * 4 == found.action[found.action == 3].tolist()[:4]


def test_it_may_only_be_stepped_where_it_stands(record):
    env, world = silo(2)
    env.reset()
    gated = Gated(env, Gate([Ask(yes)], record), irreversible=(LAUNCH,))
    act = np.array([LAUNCH, 0])
    with pytest.raises(ValueError, match="environment 0 is at no step: reset"):  # though the batch was reset before
        gated.send(act)
    gated.reset(where=np.array([True, False]))
    with pytest.raises(ValueError, match="environment 1 is at no step"):
        gated.send(act)
    with pytest.raises(ValueError, match="all reset"):
        gated.snapshot()
    gated.reset()
    gated.send(np.array([0, 0]))
    with pytest.raises(ValueError, match="twice"):
        gated.send(act)
    for _ in range(5):
        gated.recv()
        gated.send(np.array([0, 0]))
    assert gated.recv().last.all()
    with pytest.raises(ValueError, match="environment 0 is at no step: reset"):
        gated.send(act)
    with pytest.raises(ValueError, match="where is"):
        gated.reset(where=np.array([1, 0]))
    assert LAUNCH not in world and lines(record) == ()


def test_a_pure_environment_is_gated_on_the_host(record):
    gated = Gated(Hosted(CORRIDOR, 3, key=KEY), Gate([Rule("middle", lambda obs, action: obs["state"] == 0)], record),
                  irreversible=(1,))  # fmt: skip
    gated.reset()
    gated.send(np.array([1, 0, 1]))
    assert gated.recv().obs["state"].tolist() == [1, 0, 1]
    with pytest.raises(Refused, match="environment 2, episode 0, step 1"):
        gated.send(np.array([0, 1, 1]))
    assert verdicts(record) == ["allowed", "allowed", "withheld", "refused"]


# Snapshots


@pytest.mark.parametrize("hosted", [False, True])
def test_a_restored_environment_goes_on_and_asks_again(record, hosted):
    env, world = (Hosted(CORRIDOR, 2, key=KEY), []) if hosted else silo(2)
    launch = 1 if hosted else LAUNCH
    answers = iter([True, False])
    gated = Gated(env, Gate([Ask(lambda act: next(answers))], record), irreversible=(launch,))
    gated.reset()
    gated.send(np.array([0, 0]))
    before = gated.recv()
    snapshot = gated.snapshot()
    gated.send(np.array([launch, 0]))
    gated.recv()
    assert gated.snapshot() is None  # or the launch would be done again
    jax.tree.map(np.testing.assert_array_equal, gated.restore(snapshot), before)
    world.clear()
    with pytest.raises(Refused, match="environment 0, episode 0, step 1"):
        gated.send(np.array([launch, 0]))
    assert done(gated, world) == []
    gated.reset(where=np.array([True, False]))
    gated.recv()
    assert gated.snapshot() is not None


def test_a_reset_ends_the_episode_that_cannot_be_restored(record):
    gated, _ = guarded(record, Ask(yes), num=2)
    gated.send(np.array([0, LAUNCH]))
    gated.recv()
    gated.reset(where=np.array([True, False]))
    gated.recv()
    assert gated.snapshot() is None
    gated.reset(where=np.array([False, True]))
    gated.recv()
    assert gated.snapshot() is not None


def test_a_simulation_does_it_again_and_says_so(record):
    gated, world = guarded(record, Ask(yes), num=2, simulation=True)
    for action in ([0, LAUNCH], [1, 0]):
        gated.send(np.array(action))
        before = gated.recv()
    snapshot = gated.snapshot()
    world.clear()
    jax.tree.map(np.testing.assert_array_equal, gated.restore(snapshot), before)
    assert done(gated, world) == [0, 1, LAUNCH, 0]  # environment 0, then environment 1
    assert verdicts(record) == ["allowed", "replayed"]
    allowed, replayed = lines(record)
    assert replayed["act"] == allowed["act"] and replayed["row"] == 1 and "simulation" in replayed["why"]
    assert gated.snapshot() == snapshot
    # The world is no simulation, whoever took the snapshot.
    real, untouched = guarded(record, Ask(yes), num=2)
    with pytest.raises(Refused, match="environment 1, episode 0, step 0: .*do again"):
        real.restore(snapshot)
    assert done(real, untouched) == []
    with pytest.raises(ValueError, match="simulation is for host"):
        Gated(CORRIDOR, Gate([], record), irreversible=(1,), simulation=True)


def test_a_snapshot_of_actions_that_were_never_judged_is_refused(record):
    plain, _ = silo(1)
    plain.reset()
    plain.send(np.array([LAUNCH]))
    plain.recv()
    other, _ = guarded(record, num=1, declared=(3,))
    other.send(np.array([LAUNCH]))
    other.recv()
    gated, world = guarded(record, Ask(yes), num=1)
    with pytest.raises(ValueError, match="no snapshot of a gated"):
        gated.restore(plain.snapshot())
    with pytest.raises(ValueError, match=r"irreversible is \[3\], this gate has \[2\]"):
        gated.restore(other.snapshot())
    assert done(gated, world) == []
