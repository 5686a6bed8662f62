"""Environments in worker processes: the same rows as in this process, clear errors, and nothing left behind."""

import multiprocessing
import os

import host_envs
import numpy as np
import pytest
from test_host import act, equal, rows_of

from forethought.envs import EnvironmentFault, make


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def workers():
    return {process.pid for process in multiprocessing.active_children()}


def test_rows_and_snapshots_equal_those_in_this_process():
    before = workers()
    actions = np.random.default_rng(0).uniform(-1, 1, (20, 3, 1)).astype(np.float32)
    here, there = make(host_envs.Uneven, num=3, seed=5), make(host_envs.Uneven, num=3, seed=5, processes=2)
    started = workers() - before
    assert len(started) == 2
    try:
        equal(rows_of(here, actions), rows_of(there, actions))
        assert here.snapshot() == there.snapshot()
        assert here.native == there.native
        saved = here.snapshot()
        rows_of(there, actions[:3])
        equal([there.restore(saved)], [here.recv()])
        # A fault keeps its kind and its words on the way.
        with pytest.raises(ValueError, match="outside"):
            there.send(act(2.0, 3), where=~there.recv().last)
    finally:
        there.close()
    assert not any(alive(pid) for pid in started)
    there.close()  # a second time does nothing


def test_a_reset_while_others_step_waits_for_its_own_rows():
    env = make(host_envs.Line, num=2, seed=1, processes=1)
    reference = make(host_envs.Line, num=2, seed=1)
    for batch in (env, reference):
        batch.reset()
        batch.send(act(0.5, 2), where=np.array([True, False]))
    reset = [batch.reset(where=np.array([False, True])) for batch in (env, reference)]
    equal(reset[:1], reset[1:])
    assert reset[0].obs["obs"][0, 1] == 0  # the step that was started arrives with recv
    received = [batch.recv() for batch in (env, reference)]
    equal(received[:1], received[1:])
    assert received[0].obs["obs"][0, 1] == 1 and received[0].first.tolist() == [False, True]
    env.close()


def test_a_fault_and_a_death_name_their_environment():
    env = make(host_envs.NotFinite, num=2, processes=2)
    with pytest.raises(
        EnvironmentFault, match="NotFinite: environment 0, episode 0, step 3: observation 'obs'"
    ) as caught:
        rows_of(env, [act(0.0, 2)] * 4)
    assert caught.value.kind == "non-finite"
    # Both workers had answered; no answer is left over to be taken for another one.
    equal([env.reset(seed=0)], [make(host_envs.NotFinite, num=2).reset()])
    env.close()
    before = workers()
    env = make(host_envs.Dies, num=3, processes=2)
    started = workers() - before
    # np.array_split gives the first worker environments 0 and 1.
    with pytest.raises(EnvironmentFault, match=r"Dies: the worker process of environments 0, 1 died \(exit code 3\)"):
        rows_of(env, [act(0.0, 3)] * 4)
    env.close()
    assert not any(alive(pid) for pid in started)


def test_what_cannot_be_sent_or_made_is_refused_and_leaves_no_process():
    before = workers()
    with pytest.raises(ValueError, match="stands at the top of a module"):
        make(lambda: host_envs.Line(), num=2, processes=2)
    with pytest.raises(ValueError, match="observation 'screen/words': a Text space"):
        make(host_envs.WordsSeen, num=2, processes=2)
    with pytest.raises(ValueError, match="processes: 3 for 2 environments"):
        make(host_envs.Line, num=2, processes=3)
    assert workers() == before


def test_a_batch_that_is_forgotten_ends_its_workers():
    before = workers()
    env = make(host_envs.Line, num=1, processes=1)
    (pid,) = workers() - before
    del env
    assert not alive(pid)
