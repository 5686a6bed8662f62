"""Evidence from the real world on one act, before it is done, and the gate that decides on it.

A rule, a check or a person gives it. Evidence is for one act, in one environment, at one moment: an act has an id that
no other has, and a gate takes no evidence that was given on another one, that was imagined, or that is not a plain yes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from forethought.gate_record import Record
from forethought.types import Outcome, Step

KINDS = ("rule", "check", "person")


@dataclasses.dataclass(frozen=True, eq=False)
class Act:
    """An irreversible action that is about to be taken: what a source of evidence is asked about.

    ... --a_{step-1}--> obs --action?-->        obs is what the environment showed last, `action` not yet done
    """

    id: str
    environment: str
    row: int | None
    """Its place in a batch of host environments; None: a pure environment, which has no batch."""
    episode: int | None
    """Counted from 0 since the last seed; None: a pure environment does not count them."""
    step: int
    """Decisions taken before in this episode."""
    obs: dict[str, np.ndarray]
    """Read-only copies."""
    action: np.ndarray
    """As it would be sent, in the dtype of the action space; read-only."""

    def named(self) -> dict[str, Any]:
        """Everything but the observation, as JSON has it."""
        names = ("environment", "row", "episode", "step")
        return {"act": self.id, **{name: getattr(self, name) for name in names}, "action": self.action.tolist()}


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What one source said of one act."""

    act: str
    """Id of the only act that it is evidence for."""
    kind: str
    """'rule', 'check' or 'person'."""
    source: str
    """The name of the rule, the check or the person."""
    allows: bool
    text: str
    observed: float
    """When, in seconds since 1970."""
    depth: int
    """0: from the real world. What was imagined k steps deep is depth k, and is refused."""

    def __post_init__(self) -> None:
        kinds = [type(getattr(self, field.name)) for field in dataclasses.fields(self)]
        if kinds != [str, str, str, bool, str, float, int] or not np.isfinite(self.observed):
            raise TypeError(f"evidence: {[kind.__name__ for kind in kinds]} are not the types of its fields")


@runtime_checkable
class Source(Protocol):
    """Where evidence comes from."""

    @property
    def kind(self) -> str: ...

    @property
    def name(self) -> str: ...

    def evidence(self, act: Act) -> Evidence:
        """Asks now. Whatever it raises is a refusal."""
        ...


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule: a pure function of the real observation (a dict of arrays) and the action."""

    name: str
    allows: Callable[[dict[str, np.ndarray], np.ndarray], Any]
    """Answers True or False, or such an answer and a text; anything else is a refusal. So in `Check` and `Ask`."""
    kind: str = dataclasses.field(default="rule", init=False)

    def evidence(self, act: Act) -> Evidence:
        return _evidence(self, act, self.allows(act.obs, act.action))


@dataclasses.dataclass(frozen=True)
class Check:
    """A check that is made in the real world when it is asked for, such as whether a backup can be read."""

    name: str
    run: Callable[[Act], Any]
    kind: str = dataclasses.field(default="check", init=False)

    def evidence(self, act: Act) -> Evidence:
        return _evidence(self, act, self.run(act))


@dataclasses.dataclass(frozen=True)
class Ask:
    """A person, who is asked through a callback that shows the act and waits for the answer."""

    callback: Callable[[Act], Any]
    name: str = "person"
    kind: str = dataclasses.field(default="person", init=False)

    def evidence(self, act: Act) -> Evidence:
        return _evidence(self, act, self.callback(act))


def _evidence(source: Source, act: Act, answer: Any) -> Evidence:
    given = lambda allows, text, depth=0: Evidence(  # noqa: E731
        act.id, source.kind, source.name, allows, text, time.time(), depth
    )
    allows, text = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, "")
    if isinstance(allows, bool | np.bool_) and isinstance(text, str):
        return given(bool(allows), text)
    kind = type(answer).__name__
    return given(False, f"the answer is a {kind}, not True or False", imagined_depth(answer))


def imagined_depth(answer: Any) -> int:
    """How deep an answer was imagined: 0 where nothing says that it was; a model's Outcome is at least 1 deep."""
    if isinstance(answer, Outcome):
        return 1
    if isinstance(answer, Evidence):
        return answer.depth
    return int(np.max(np.asarray(answer.depth), initial=0)) if isinstance(answer, Step) else 0


def flaw(evidence: Any, source: Source, act: Act) -> str | None:
    """Why something is no evidence for an act, or none that allows it; None: it is."""
    if not isinstance(evidence, Evidence):
        return f"gave a {type(evidence).__name__}, which is no evidence"
    if evidence.depth != 0:
        return f"gave what was imagined (depth {evidence.depth}); a prediction is not a permission"
    if evidence.act != act.id:
        return "gave evidence on another act; evidence is not used twice"
    if evidence.kind not in KINDS or (evidence.kind, evidence.source) != (source.kind, source.name):
        return f"gave evidence in the name of {evidence.kind} '{evidence.source}'"
    if not evidence.allows:
        return "does not allow it" + (f": {evidence.text}" if evidence.text else "")
    return None


class Refused(RuntimeError):
    """An irreversible action was not let through; nothing was sent, and the environment is where it was."""


class Asked(NamedTuple):
    """What came of asking about an act."""

    evidence: tuple[Evidence, ...] = ()
    why: str | None = None
    """Why it is refused; None: nobody refused."""
    interrupt: BaseException | None = None
    """What broke off the asking, such as Ctrl-C, and goes on after the refusal is written down."""


class Gate:
    """Lets an irreversible act pass if every one of its sources allows it, and writes down each decision before.

    Sources are asked in order until one refuses; a gate without any refuses all. An exception, None and whatever else
    is no yes is a refusal.
    """

    def __init__(self, sources: Sequence[Source], record: Record):
        self._sources, self._record = tuple(sources), record

    def judge(self, acts: Sequence[Act]) -> None:
        """Decides on acts that are to be sent together, each alone, and returns only if all may be sent.

        Every decision is on disk when this returns or raises: 'allowed', 'refused', or 'withheld' for acts that are
        not sent because another one was refused.

        Raises:
            Refused: an act is not allowed; those after it are not asked about.
            OSError, RecordError: a decision could not be written down.
        """
        asked: list[Asked] = []
        for act in acts:
            asked.append(self._asked(act))
            if asked[-1].why is not None:
                break
        refused = asked[-1] if asked and asked[-1].why is not None else None
        for i, act in enumerate(acts):
            found = asked[i] if i < len(asked) else Asked()
            verdict = "allowed" if refused is None else "refused" if found is refused else "withheld"
            self._write(verdict, act.named(), found)
        if refused is None:
            return
        if refused.interrupt is not None:
            raise refused.interrupt
        act = acts[len(asked) - 1]
        where = "" if act.row is None else f"environment {act.row}, episode {act.episode}, "
        raise Refused(
            f"{act.environment}: {where}step {act.step}: the irreversible action {act.action.tolist()} is refused: "
            f"{refused.why}"
        )

    def replayed(self, acts: Sequence[dict[str, Any]]) -> None:
        """Writes down that a simulation does acts again that it did before."""
        for act in acts:
            self._write("replayed", act, Asked(why="the environment is declared a simulation"))

    def _asked(self, act: Act) -> Asked:
        """Asks one source after the other, until one refuses."""
        evidence: list[Evidence] = []
        if not self._sources:
            return Asked(why="the gate has no source of evidence")
        for source in self._sources:
            who = f"{source.kind} '{source.name}' "
            try:
                found = source.evidence(act)
            except BaseException as error:  # its text may hold what must not be logged
                interrupt = None if isinstance(error, Exception) else error
                return Asked(tuple(evidence), f"{who}raised {type(error).__name__}", interrupt)
            if isinstance(found, Evidence):
                evidence.append(found)
            if (what := flaw(found, source, act)) is not None:
                return Asked(tuple(evidence), who + what)
        return Asked(tuple(evidence))

    def _write(self, verdict: str, act: dict[str, Any], asked: Asked) -> None:
        evidence = [dataclasses.asdict(e) for e in asked.evidence]
        self._record.append({"time": time.time(), "verdict": verdict, **act, "why": asked.why, "evidence": evidence})
