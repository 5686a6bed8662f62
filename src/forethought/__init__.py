"""Forethought: learn a world model, plan in it, and audit it before anything relies on it."""

from forethought._version import __version__ as __version__
