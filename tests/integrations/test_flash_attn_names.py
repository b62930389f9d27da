"""Frameworks that look for flash_attn find dash_attn under its names, and train with it."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

import dash_attn

ROOT = pathlib.Path(dash_attn.__file__).parents[1]


def result_of(code):
    """What `code` prints last, as JSON. Frameworks are imported in a process of their own: they remember what they
    found."""
    places = os.pathsep.join(map(str, (ROOT, pathlib.Path(__file__).parents[1], pathlib.Path(__file__).parent)))
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


TRANSFORMERS = """
import dash_attn.as_flash_attn
import json, torch
from unittest import mock
with mock.patch("torch.cuda.is_available", lambda: True):  # which it asks, and remembers the answer
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available
    available = [is_flash_attn_2_available(), is_flash_attn_3_available()]
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers_support import attention_in

config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, initializer_range=0.2)
ids = torch.randint(1, 64, (2, 20), generator=torch.Generator().manual_seed(1))
mask = torch.ones_like(ids)
mask[1, 14:] = 0

def gradients(attention, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float64)
    with attention_in(dtype):
        model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])

names = ("eager", "flash_attention_2", "flash_attention_3")
exact = gradients("eager", torch.float64)
found = {name: gradients(name) for name in names}
errors = {name: ((found[name] - exact).norm() / exact.norm()).item() for name in names}
same = torch.equal(found["flash_attention_2"], found["flash_attention_3"])
print(json.dumps({"available": available, "errors": errors, "same": same}))
"""


def test_transformers_trains():
    pytest.importorskip("transformers", reason="transformers is not installed")
    found = result_of(TRANSFORMERS)
    assert found["available"] == [True, True] and found["same"]
    eager = found["errors"].pop("eager")
    assert 0 < eager < 0.1 and all(error <= eager for error in found["errors"].values()), (eager, found)


RING_ATTENTION = """
import dash_attn.as_flash_attn
import importlib.util, json, sys, types
# The package itself imports what transformers 5 has no more; its modules do not.
package = types.ModuleType("ring_flash_attn")
package.__path__ = importlib.util.find_spec("ring_flash_attn").submodule_search_locations
sys.modules["ring_flash_attn"] = package
from ring_flash_attn.ring_flash_attn import ring_flash_attn_forward
from ring_flash_attn.zigzag_ring_flash_attn_varlen import _flash_attn_varlen_forward
print(json.dumps([_flash_attn_varlen_forward.__module__]))
"""


@pytest.mark.slow
def test_ring_attention_imports_ours():
    if importlib.util.find_spec("ring_flash_attn") is None:
        pytest.skip("ring-flash-attn is not installed")
    assert result_of(RING_ATTENTION) == ["dash_attn.compat.flash_attn_2"]


# Conditions that need a GPU's libraries to be met by the frameworks themselves, with the files that hold them.
CONDITIONS = """
import dash_attn.as_flash_attn
import importlib.metadata as metadata, importlib.util, inspect, json
from packaging.version import parse

found = {}
# xformers 0.0.35, ops/fmha/flash.py:57-77, and flash3.py:117, whose extension module must not be found.
import flash_attn.flash_attn_interface
extension = flash_attn.flash_attn_interface.flash_attn_gpu
found["xformers"] = parse("2.7.1") <= parse(flash_attn.__version__) <= parse("2.8.4") and all(
    inspect.isroutine(getattr(extension, name)) for name in ("fwd", "varlen_fwd", "bwd", "varlen_bwd"))
found["xformers, no FlashAttention-3"] = importlib.util.find_spec("flash_attn_3._C") is None
# diffusers 0.42.1, utils/import_utils.py:61-94 and models/attention_dispatch.py:84-105.
for name in ("flash_attn", "flash_attn_3"):
    is_new = parse(metadata.version(name)) >= parse("2.6.3")
    found["diffusers " + name] = importlib.util.find_spec(name) is not None and is_new
from flash_attn.flash_attn_interface import _wrapped_flash_attn_backward, _wrapped_flash_attn_forward
from flash_attn_interface import flash_attn_func, flash_attn_varlen_func
# Megatron-LM, core/utils.py:365 and core/transformer/attention.py:65-80: parameters are read from a plain function.
from flash_attn_3.flash_attn_interface import _flash_attn_forward
found["megatron"] = inspect.isfunction(_flash_attn_forward) and parse(flash_attn.__version__) >= parse("2.7.3")
# yunchang 0.6.4, kernels/attention.py:176, which compares text.
found["yunchang"] = flash_attn.__version__ > "2.6.3"
# TransformerEngine 2.20.2, backends.py:114-168.
from flash_attn_2_cuda import varlen_bwd
from flash_attn.flash_attn_interface import _flash_attn_varlen_backward, _flash_attn_varlen_forward
from flash_attn_interface import _flash_attn_backward, _flash_attn_forward, flash_attn_with_kvcache
found["transformer_engine"] = parse("2.1.1") <= parse(metadata.version("flash-attn")) < parse("2.8.4")
# DeepSpeed 0.19.8, sequence/fpdt_layer.py:15-18 and 237.
found["deepspeed"] = parse(flash_attn.__version__) >= parse("2.7.0") and all(
    inspect.isfunction(getattr(flash_attn.flash_attn_interface, "_flash_attn_" + n)) for n in ("forward", "backward"))
# ms-swift 4.6.0, utils/import_utils.py:43-49.
found["ms-swift"] = all(importlib.util.find_spec(n) for n in ("flash_attn", "flash_attn_3", "flash_attn_interface"))
print(json.dumps(found))
"""


def test_conditions_that_frameworks_have():
    pytest.importorskip("packaging", reason="packaging is not installed")
    found = result_of(CONDITIONS)
    assert len(found) == 9 and all(found.values()), found
