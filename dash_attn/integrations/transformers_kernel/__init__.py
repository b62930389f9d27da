"""What transformers loads as `dash-attn/flash`: a folder in the form that the `kernels` package reads."""

from dash_attn import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
