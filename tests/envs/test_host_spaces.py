"""What becomes of Gymnasium's spaces, key by key."""

import host_envs
import numpy as np
import pytest
from gymnasium import spaces

from forethought.envs import EnvironmentFault, make
from forethought.envs.spaces import action_space, leaves
from forethought.types import Box, Discrete, MultiDiscrete


def test_every_space_is_mapped_by_key():
    env = make(host_envs.Many, num=2)
    spec = env.spec.obs
    assert list(spec) == ["counts", "dials", "flags", "height", "image", "inner/pair/0", "inner/pair/1", "level"]
    kinds = {key: (type(space), space.shape, space.dtype) for key, space in spec.items()}
    assert kinds == {
        "counts": (Box, (2,), "int32"),
        "dials": (MultiDiscrete, (2,), "int32"),
        "flags": (Box, (3,), "float32"),
        "height": (Box, (1,), "float32"),
        "image": (Box, (5, 5, 5), "uint8"),
        "inner/pair/0": (Discrete, (), "int32"),
        "inner/pair/1": (Box, (1,), "float32"),
        "level": (Discrete, (), "int32"),
    }
    env.reset()
    env.send(np.array([0, 0]))
    obs = env.recv().obs
    for key, space in spec.items():
        assert obs[key].dtype == space.dtype and obs[key].shape == (2, *space.shape)
    assert (obs["image"] == 201).all()  # as it is: an array of 5x5x5 bytes need not be an image
    assert obs["counts"][1].tolist() == [1, 9] and obs["dials"][0].tolist() == [1, 6]  # 2 - 1, 6 - 0
    assert obs["flags"][0].tolist() == [1, 0, 1] and obs["height"][0].tolist() == [-1.5]
    assert obs["inner/pair/0"].tolist() == [1, 1] and obs["inner/pair/1"][0].tolist() == [0.25]
    assert obs["level"].tolist() == [1, 1]  # 0 - (-1)


def test_a_multi_discrete_action_is_one_number_decoded_exactly():
    env = make(host_envs.Many, num=15)
    assert env.spec.action == Discrete(15)
    env.reset()
    env.send(np.arange(15))
    # Action n of 3 x 5 is (n // 5, n % 5); the environment answers 10 * first + second.
    assert env.recv().reward.tolist() == [10 * (n // 5) + n % 5 for n in range(15)]
    with pytest.raises(ValueError, match=r"action 15 of environment 14 is outside 0 .. 14"):
        env.send(np.arange(1, 16))


def test_action_spaces_decode_to_what_the_native_space_contains():
    for native, size in [
        (spaces.Discrete(4, start=-2), 4),
        (spaces.MultiDiscrete([2, 3, 2], start=[5, 0, 1]), 12),
        (spaces.MultiDiscrete(np.array([[2, 2], [3, 1]])), 12),
        (spaces.MultiBinary(5), 32),
    ]:
        space, decode = action_space(native)
        assert space == Discrete(size)
        decoded = [decode(np.asarray(n)) for n in range(size)]
        assert all(native.contains(action) for action in decoded), native
        assert len({np.asarray(action).tobytes() for action in decoded}) == size


@pytest.mark.parametrize(
    "space, message",
    [
        (spaces.MultiDiscrete([17, 241]), "has 4097 combinations"),
        (spaces.MultiBinary(13), "has 8192 combinations"),
        (spaces.Box(0, 3, (2,), np.int32), "declare a Box of floats, Discrete or MultiDiscrete"),
        (spaces.Dict({"a": spaces.Discrete(2)}), "has no counterpart"),
    ],
)
def test_action_spaces_without_counterpart_are_refused(space, message):
    with pytest.raises(ValueError, match=message):
        action_space(space)
    assert action_space(spaces.MultiDiscrete([16, 256]))[0] == Discrete(4096)  # the largest that is flattened


@pytest.mark.parametrize(
    "space, message",
    [
        (spaces.Dict({"a": spaces.Dict({"words": spaces.Text(5)})}), "observation 'a/words': a Text space"),
        (spaces.Tuple((spaces.Discrete(2), spaces.Sequence(spaces.Discrete(2)))), "observation '1': a Sequence space"),
        (spaces.Graph(spaces.Discrete(2), None), "observation 'obs': a Graph space"),
        (spaces.Dict({"a/b": spaces.Discrete(2), "a": spaces.Dict({"b": spaces.Discrete(2)})}), "'a/b': two parts"),
        (spaces.Dict({}), "holds nothing"),
    ],
)
def test_observation_spaces_without_counterpart_are_refused_by_key(space, message):
    with pytest.raises(ValueError, match=message):
        leaves(space)


def test_bounds_are_kept_and_the_largest_number_means_none():
    top = np.finfo(np.float64).max
    (leaf,) = leaves(spaces.Box(np.array([-1.0, -top]), np.array([2.5, top]), (2,), np.float64))
    assert isinstance(leaf.space, Box) and leaf.key == "obs"
    assert np.asarray(leaf.space.low).tolist() == [-1, -np.inf] and np.asarray(leaf.space.high).tolist() == [
        2.5,
        np.inf,
    ]


def test_integers_beyond_int32_are_a_fault():
    (leaf,) = leaves(spaces.Box(0, 2**40, (2,), np.int64))
    assert leaf.read(np.array([0, 2**31 - 1])).tolist() == [0, 2147483647]
    with pytest.raises(EnvironmentFault, match="observation 'obs' holds an integer beyond int32's range"):
        leaf.read(np.array([0, 2**31]))
