"""What the package's pictures share. Drawing needs matplotlib, which is imported only then."""

from __future__ import annotations

from os import PathLike
from typing import Any


def check_picture(path: str | PathLike[str], subject: str) -> None:
    """Checks that `subject`, such as "receipts", can be drawn to `path`, before anything is computed for the picture.

    Raises:
        ValueError: `path` does not end in .png.
        ImportError: matplotlib is not installed.
    """
    if not str(path).endswith(".png"):
        raise ValueError(f"path must end in .png, got {str(path)!r}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(f"drawing {subject} needs matplotlib: pip install matplotlib ({error})") from error


def new_figure(width: float, height: float, layout: Any = "constrained") -> Any:
    """Returns an empty figure, in inches, that is drawn without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout=layout)
    FigureCanvasAgg(figure)
    return figure
