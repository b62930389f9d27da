"""The module that transformers loads as `dash-attn/flash`, in the folder layout that the `kernels` package reads."""

from dash_attn import *  # noqa: F403
from dash_attn import __all__  # noqa: F401
