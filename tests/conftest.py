"""Every test runs with shapes and types checked: jaxtyping's annotations are enforced by beartype."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MUJOCO_GL", "disable")
# The tests' networks are tiny, so nearly all their time is compilation.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=2")

from jaxtyping import install_import_hook  # noqa: E402

install_import_hook("forethought", "beartype.beartype")
