"""Where the seats of a batch live: in this process, or spread over worker processes.

Workers come from a fork server, never from a fork of this process, whose JAX threads would be copied in the middle of
what they do. Pipes carry the actions and rows.

Workers pay where a step costs more than about 100 us. CPU time per environment step in us (16 environments, Xeon, mean
of two runs), in one process against this process + 2 workers: CartPole-v1 33 against 29 + 56, dmc/cheetah-run 104
against 32 + 133, dmc/humanoid-run 479 against 62 + 542. Only the workers' share is divided by the cores.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import signal
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

from forethought.envs.seat import Row, Rules, Seat
from forethought.envs.single import AbstractSingle, EnvironmentFault
from forethought.types import Spec

Maker = Callable[[], AbstractSingle]
PATIENCE_S = 5.0
"""How long a worker may take to end by itself when the batch is closed."""


class Seats(Protocol):
    """B seats; `ask` may be called between `start` and `finish` for seats that were not started."""

    specs: list[Spec]
    native: dict[str, str]

    def start(self, actions: Mapping[int, np.ndarray]) -> None: ...

    def finish(self) -> dict[int, Row]: ...

    def ask(self, method: str, arguments: Mapping[int, tuple]) -> dict[int, Any]: ...

    def close(self) -> None: ...


class SeatsHere:
    """Seats in this process. The steps are taken in `finish`, while JAX computes what was dispatched before it."""

    def __init__(self, makers: Sequence[Maker], seed: int, rules: Rules):
        self._seats = [Seat(make(), index, seed, rules) for index, make in enumerate(makers)]
        self.specs = [seat.spec for seat in self._seats]
        self.native = self._seats[0].single.native
        self._started: dict[int, np.ndarray] = {}

    def start(self, actions: Mapping[int, np.ndarray]) -> None:
        self._started = dict(actions)

    def finish(self) -> dict[int, Row]:
        started, self._started = self._started, {}
        return {index: self._seats[index].step(action) for index, action in started.items()}

    def ask(self, method: str, arguments: Mapping[int, tuple]) -> dict[int, Any]:
        return {index: getattr(self._seats[index], method)(*given) for index, given in arguments.items()}

    def close(self) -> None:
        for seat in self._seats:
            seat.close()


class SeatsInWorkers:
    """Seats in worker processes, neighbours together; a worker answers its requests in order."""

    def __init__(self, makers: Sequence[Maker], seed: int, rules: Rules, processes: int):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["forethought.envs.workers"])
        self._shares = [share.tolist() for share in np.array_split(np.arange(len(makers)), processes)]
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._finalizer = weakref.finalize(self, _end, self._pipes, self._processes)
        self._name = "environment"
        self._stepping: list[int] = []
        self._early: dict[int, Row] = {}
        for share in self._shares:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(theirs, {i: makers[i] for i in share}, seed, rules), daemon=True
            )
            try:
                process.start()
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                ours.close()
                self.close()
                raise ValueError(
                    f"processes: the environment cannot be sent to a worker ({error}); give an id or a function that "
                    "stands at the top of a module"
                ) from error
            finally:
                theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.specs, self.native = [], {}
        try:
            for answer in self._answers(list(range(processes))):
                if isinstance(answer, Exception):
                    raise answer
                specs, self.native = answer
                self.specs += specs
        except BaseException:
            self.close()
            raise
        self._name = self.specs[0].name

    def start(self, actions: Mapping[int, np.ndarray]) -> None:
        self._stepping = self._send("step", {index: (action,) for index, action in actions.items()})

    def finish(self) -> dict[int, Row]:
        stepping, self._stepping = self._stepping, []
        early, self._early = self._early, {}
        return early | _merged(self._answers(stepping))

    def ask(self, method: str, arguments: Mapping[int, tuple]) -> dict[int, Any]:
        asked = self._send(method, arguments)
        # A worker that still steps answers that first: its rows wait for `finish`.
        first = [worker for worker in self._stepping if worker in asked]
        self._stepping = [worker for worker in self._stepping if worker not in asked]
        early, answers = self._answers(first), self._answers(asked)
        self._early |= _merged(early)
        return _merged(answers)

    def close(self) -> None:
        self._finalizer()

    def _send(self, method: str, arguments: Mapping[int, tuple]) -> list[int]:
        sent = []
        for worker, share in enumerate(self._shares):
            part = {index: arguments[index] for index in share if index in arguments}
            if part:
                # To a dead worker nothing can be sent; reading its answer then tells so.
                with contextlib.suppress(OSError):
                    self._pipes[worker].send((method, part))
                sent.append(worker)
        return sent

    def _answers(self, workers: list[int]) -> list[Any]:
        """One answer of each worker; an error stands in its place, so that no pipe keeps an answer unread."""
        answers = []
        for worker in workers:
            try:
                answers.append(self._pipes[worker].recv())
            except (EOFError, OSError):
                answers.append(self._death(worker))
        return answers

    def _death(self, worker: int) -> EnvironmentFault:
        process = self._processes[worker]
        process.join(PATIENCE_S)
        share = ", ".join(map(str, self._shares[worker]))
        what = f"the worker process of environments {share} died (exit code {process.exitcode})"
        return EnvironmentFault("process died", f"{self._name}: {what}")


def _merged(answers: list[Any]) -> dict[int, Any]:
    """The answers as one; raises the first error among them."""
    merged: dict[int, Any] = {}
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
        merged |= answer
    return merged


def _work(pipe: Connection, makers: Mapping[int, Maker], seed: int, rules: Rules) -> None:
    """A worker: answers requests (method, {seat: arguments}) until the other end of its pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which then closes the pipe
    seats: dict[int, Seat] = {}
    try:
        for index, make in makers.items():
            seats[index] = Seat(make(), index, seed, rules)
        specs = [seat.spec for seat in seats.values()]
        pipe.send((specs, next(iter(seats.values())).single.native))
        while True:
            method, arguments = pipe.recv()
            pipe.send(_answered(seats, method, arguments))
    except (EOFError, BrokenPipeError):
        pass
    except Exception as error:
        pipe.send(_portable(error))
    finally:
        for seat in seats.values():
            seat.close()


def _answered(seats: Mapping[int, Seat], method: str, arguments: Mapping[int, tuple]) -> dict[int, Any] | Exception:
    try:
        return {index: getattr(seats[index], method)(*given) for index, given in arguments.items()}
    except Exception as error:
        return _portable(error)


def _portable(error: Exception) -> Exception:
    """The error, or what it says where its own type might not survive the pipe."""
    if type(error) in (EnvironmentFault, ValueError, ImportError):
        error.__cause__ = None
        return error
    return EnvironmentFault("raised", f"worker: {type(error).__name__}: {error}")


def _end(pipes: list[Connection], processes: list[Any]) -> None:
    for pipe in pipes:
        pipe.close()
    for process in processes:
        process.join(PATIENCE_S)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
