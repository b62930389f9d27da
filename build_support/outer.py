"""The packages of the Python that runs pip, seen from inside pip's isolated build environment.

pip hides them from a build by PYTHONPATH and a sitecustomize; without those the same interpreter sees them. They
are used so that building against an installed torch downloads no other torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

_LIST_PATHS = "import json, sys; print(json.dumps([p for p in sys.path if p]))"


def _outer_paths() -> list[str]:
    run = subprocess.run([sys.executable, "-E", "-c", _LIST_PATHS], cwd=os.sep, capture_output=True, text=True)
    return json.loads(run.stdout) if run.returncode == 0 else []


def make_importable(module: str) -> bool:
    """Whether `module` can be imported, after adding the outer Python's paths behind our own where that helps."""
    if importlib.util.find_spec(module) is not None:
        return True
    known = list(sys.path)
    sys.path.extend(path for path in _outer_paths() if path not in known)
    importlib.invalidate_caches()
    if importlib.util.find_spec(module) is not None:
        return True
    sys.path[:] = known
    return False
