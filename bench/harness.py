"""What every benchmark shares: which code and which versions a number was measured with."""

from __future__ import annotations

import datetime
import os
from typing import Any

from forethought import settings


def provenance() -> dict[str, Any]:
    """The commit, versions, date and cores of a measurement."""
    return {
        "git": settings.git_commit(),
        "versions": settings.versions(),
        "date": datetime.date.today().isoformat(),
        "cores": os.cpu_count(),
    }
