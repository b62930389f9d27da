"""The folder that tools/hub_layout.py builds, as `kernels` loads it in a process of its own."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import hub_layout
import pytest
import torch

pytest.importorskip("kernels")

from kernels import variants

if not list(hub_layout.PACKAGE.glob("_autograd*.so")):
    pytest.skip("the checkout is not built: an installed package is tested", allow_module_level=True)

# `make test` builds no kernels where there is no GPU.
pytestmark = pytest.mark.slow

CALL = """
import sys
from pathlib import Path
import torch
from kernels import get_kernel, get_local_kernel
kernel = {load}
assert "dash_attn" not in sys.modules
assert {{"flash_attn_func", "flash_attn_varlen_func"}} <= set(kernel.__all__)
torch.manual_seed(0)
q, k, v = (torch.randn(1, 70, 2, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
out = kernel.flash_attn_func(q, k, v, causal=True, window_size=(9, 0))
out.sum().backward()
torch.save([out, q.grad, k.grad, v.grad], sys.argv[1])
"""


@pytest.fixture(scope="module")
def layout(tmp_path_factory) -> pathlib.Path:
    if not list(hub_layout.PACKAGE.glob("_C*.so")):
        pytest.skip("the kernels, which are a part of the layout, are not built")
    # Far from the checkout, which must not be read.
    out = tmp_path_factory.mktemp("hub")
    subprocess.run([sys.executable, "tools/hub_layout.py", str(out), "--built"], cwd=hub_layout.ROOT, check=True)
    return out


def run(code, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": "", **environment}, cwd="/", capture_output=True, text=True,
    )  # fmt: skip


def variant_of(layout):
    (variant,) = (layout / "build").iterdir()
    return variant


@pytest.mark.parametrize("how", ["get_local_kernel", "LOCAL_KERNELS"])
def test_kernels_loads_it(how, layout, tmp_path):
    from dash_attn import flash_attn_func

    load = f"get_local_kernel(Path({str(layout)!r}))" if how == "get_local_kernel" else 'get_kernel("a/b", version=1)'
    process = run(CALL.format(load=load), tmp_path / "results", LOCAL_KERNELS=f"a/b={layout}")
    assert process.returncode == 0, process.stderr
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 70, 2, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = flash_attn_func(q, k, v, causal=True, window_size=(9, 0))
    expected = [out, *torch.autograd.grad(out.sum(), (q, k, v))]
    assert all(map(torch.equal, torch.load(tmp_path / "results"), expected))


def test_transformers_loads_it(layout):
    pytest.importorskip("transformers")
    code = """
import sys, torch
from transformers import AutoModelForCausalLM, LlamaConfig
config = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model = AutoModelForCausalLM.from_config(config, attn_implementation="dash-attn/flash", dtype=torch.bfloat16)
ids = torch.arange(9)[None]
model(ids, labels=ids).loss.backward()
assert "dash_attn" not in sys.modules
"""
    process = run(code, LOCAL_KERNELS=f"dash-attn/flash={layout}")
    assert process.returncode == 0, process.stderr


def test_what_it_holds(layout):
    variant = variant_of(layout)
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["name"] == "dash-attn" and metadata["id"].isidentifier()
    assert metadata["license"] == "BSD-3-Clause"
    assert {"LICENSE", "pybind11.txt"} <= {path.name for path in (variant / "licenses").iterdir()}
    held = {str(path.relative_to(variant / "dash_attn")) for path in (variant / "dash_attn").rglob("*.py")}
    assert {"interface.py", "ops.py", "schedule.py"} <= held
    # What needs matplotlib, a framework or the checkout stays out.
    assert "demo.py" not in held and not any("integrations" in name for name in held)


def test_the_variant_is_one_of_this_torch(layout, monkeypatch):
    (variant,) = variants.get_variants_local(layout / "build")
    assert variants.resolve_variant([variant], None)[0] == variant
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert variants.resolve_variant([variant], None)[0] is None


def test_the_variant_with_kernels_is_one_of_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    name = hub_layout.variant_name()
    assert name.startswith("torch211-cxx11-cu130-")
    assert variants.resolve_variant([variants.parse_variant(name)], None)[0].variant_str == name
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert variants.resolve_variant([variants.parse_variant(name)], None)[0] is None


@pytest.mark.parametrize(
    "before, message",
    [
        (
            "sys.implementation.cache_tag = 'cpython-399'",
            "compiled for cpython-3.*, but this Python is cpython-399: build",
        ),
        ("torch.__version__ = '2.99.0'", "is for torch 2.*, but this is torch 2.99.0"),
        ("sys.path.insert(0, sys.argv[2]); import dash_attn", "a process can hold only one dash_attn"),
    ],
)
def test_other_processes_are_told_why(before, message, layout):
    # The variant's own folder, which kernels takes without asking whether it fits.
    code = f"import sys, torch\n{before}\nfrom pathlib import Path\nfrom kernels import get_local_kernel\n"
    process = run(code + "get_local_kernel(Path(sys.argv[1]))", variant_of(layout), hub_layout.ROOT)
    assert process.returncode != 0 and re.search(f"ImportError: .*{message}", process.stderr), process.stderr


def test_what_cannot_be_laid_out(monkeypatch, tmp_path):
    monkeypatch.setattr(hub_layout, "PACKAGE", tmp_path)
    with pytest.raises(SystemExit, match=r"must have one _autograd\*.so, got none"):
        hub_layout.compiled(with_kernels=False)
    (tmp_path / "_autograd.abi3.so").touch()
    with pytest.raises(SystemExit, match=r"must have a _schedule\*.so of cpython-\d+, got none"):
        hub_layout.compiled(with_kernels=False)
    (tmp_path / f"_schedule.{sys.implementation.cache_tag}-x86_64-linux-gnu.so").touch()
    with pytest.raises(SystemExit, match=r"must have one _C\*.so, got none"):
        hub_layout.compiled(with_kernels=True)
    assert len(hub_layout.compiled(with_kernels=False)) == 2
    shutil.copy(tmp_path / "_autograd.abi3.so", tmp_path / "_autograd.old.so")
    with pytest.raises(SystemExit, match=r"must have one _autograd\*.so, got _autograd.abi3.so, _autograd.old.so"):
        hub_layout.compiled(with_kernels=False)


def test_an_absolute_import_is_refused(tmp_path):
    module = tmp_path / "module.py"
    module.write_text("def f():\n    from dash_attn import checks\n")
    with pytest.raises(SystemExit, match="must import its own package relatively, got line 2"):
        hub_layout.relative_imports(module)
