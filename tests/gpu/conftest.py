"""Every test of this folder needs a Hopper GPU and the compiled kernels."""

import os
import pathlib
import sys
from typing import NoReturn

import pytest
import sm_holder
import torch
from gpu_load import Perturbation

import dash_attn

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # float64_reference

HOPPER = (9, 0)
# Set where a GPU and kernels are known to be there, so that a broken set-up fails instead of skipping everything.
REQUIRE = "DASH_ATTN_REQUIRE_GPU"
# "i/n": of the tests that bear others beside them on the GPU, the ith of n shares. "alone": those that do not, which
# hold SMs and ask how fast others get on, or are marked. Modules with RUNS_RANKS are not divided.
SHARE = "DASH_ATTN_TEST_SHARE"


def pytest_configure(config):
    config.addinivalue_line("markers", "alone: takes so much memory that many of them beside each other fill a GPU")


def pytest_collection_modifyitems(config, items):
    if not (share := os.environ.get(SHARE)):
        return
    here = pathlib.Path(__file__).parent
    own = [item for item in items if here in item.path.parents]
    alone = [item for item in own if "holder" in item.fixturenames or item.get_closest_marker("alone")]
    if share == "alone":
        mine = alone
    else:
        index, count = map(int, share.split("/"))
        shared = [item for item in items if item not in alone]
        # Whose fixtures start processes for all of a module's tests.
        together = [item for item in shared if getattr(item.module, "RUNS_RANKS", False)]
        modules = sorted({item.path for item in together})
        mine = [item for item in shared if item not in together][index::count]
        mine += [item for item in together if modules.index(item.path) % count == index]
    config.hook.pytest_deselected(items=[item for item in items if item not in mine])
    items[:] = mine


def why_not_here() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() != HOPPER:
        capability = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()} has compute capability {capability}, not {HOPPER}"
    if not list(pathlib.Path(dash_attn.__file__).parent.glob("_C*.so")):
        return "the kernels (dash_attn._C) are not built"
    return None


def skip_unless_required(reason: str) -> NoReturn:
    if os.environ.get(REQUIRE) == "1":
        pytest.fail(f"{REQUIRE}=1, but {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def hopper():
    if reason := why_not_here():
        skip_unless_required(reason)
    # The first allocations then come from memory full of NaN: a workspace that is read before it is written shows.
    torch.full((64 << 20,), float("nan"), device="cuda")


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.fixture
def perturbation(hopper):
    load = Perturbation()
    yield load
    load.stop()


@pytest.fixture
def num_sms() -> int:
    return torch.cuda.get_device_properties("cuda").multi_processor_count


@pytest.fixture(scope="session")
def holder(hopper, tmp_path_factory):
    nvcc = sm_holder.find_nvcc()
    if nvcc is None:
        skip_unless_required("nvcc, which compiles the kernel that holds SMs, is not found: set CUDA_HOME")
    library = sm_holder.build(tmp_path_factory.mktemp("sm_holder"), nvcc)
    return sm_holder.SmHolder(library, torch.cuda.get_device_properties("cuda").multi_processor_count)
