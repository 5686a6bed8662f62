"""Forethought: learn a world model, plan in it, and audit it before anything relies on it."""

from forethought._version import __version__ as __version__
from forethought.agent import Agent as Agent
from forethought.agent import load as load
from forethought.auditing.audit import Audit as Audit
from forethought.auditing.audit import audit as audit
from forethought.auditing.subject import HostModel as HostModel
from forethought.auditing.tolerances import Tolerances as Tolerances
from forethought.devices import cpu_devices as cpu_devices
from forethought.envs import make as make
from forethought.examination import examine as examine
from forethought.run import evaluate as evaluate
from forethought.run import rollout as rollout
from forethought.run import train as train
from forethought.settings import Settings as Settings
