"""The binary: which kernels it holds, and what their machine code does."""

import collections
import os
import pathlib
import re
import shutil
import subprocess

import check_kernels
import pytest
import toolchain
import variants

import dash_attn

# `make test` builds no kernels where there is no GPU.
pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[1]
BINARY = pathlib.Path(dash_attn.__file__).parent / "_C.abi3.so"
VARIANTS = variants.read_variants(ROOT / "csrc" / "launch" / "variants.def")
ELEMENTS = {"bf16": "BFloat16", "fp16": "Float16"}


@pytest.fixture(scope="module")
def binary() -> dict[str, check_kernels.Kernel]:
    """{symbol: kernel} of the compiled ops."""
    if os.environ.get("DASH_ATTN_SKIP_CUDA") == "1":
        pytest.skip("DASH_ATTN_SKIP_CUDA=1: a binary that is there may be an older build's")
    if not BINARY.is_file():
        if toolchain.find_cuda_home() is None:
            pytest.skip("nvcc is not on this machine, so there are no kernels to look at")
        pytest.fail("nvcc is here, but dash_attn/_C.abi3.so was not built: python setup.py build_ext --inplace")
    return check_kernels.read_kernels(BINARY)


def main_kernels(binary, pass_: str) -> list[tuple[str, str, check_kernels.Kernel]]:
    """(symbol, dtype, kernel) of the kernels that do a pass's products, one for a variant."""
    found = []
    for name, kernel in binary.items():
        if f"{pass_}_kernel" in name and (element := re.search("|".join(ELEMENTS), name)):
            found.append((name, ELEMENTS[element.group(0)], kernel))
    return found


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_binary_has_every_variant(binary, pass_):
    selected = [v for v in variants.select_variants(VARIANTS) if v.pass_.endswith(pass_.upper())]
    built = collections.Counter(dtype for _, dtype, _ in main_kernels(binary, pass_))
    assert built == collections.Counter(v.values[0] for v in selected)


def test_no_kernel_has_a_fault(binary):
    assert binary
    assert not {name: kernel.faults() for name, kernel in binary.items() if kernel.faults()}


# TMA loads and stores, warpgroup products, bulk adds, registers handed from the producer to the consumers.
@pytest.mark.parametrize(
    "pass_, units",
    [
        ("backward", {"HGMMA", "UTMALDG", "UBLKRED", "USETMAXREG"}),
        ("forward", {"HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"}),
    ],
)
def test_kernels_use_the_units_of_hopper(binary, pass_, units):
    found = main_kernels(binary, pass_)
    assert found
    for name, dtype, kernel in found:
        assert units <= kernel.opcodes(), name
        # A product of bf16 states the type; a product of fp16 is the instruction's default.
        products = [i for i in kernel.mnemonics() if i.startswith("HGMMA")]
        assert all(("BF16" in i) == (dtype == "BFloat16") for i in products), (name, products)


def test_backward_adds_numbers_in_fp32_and_order_free_integers_too(binary):
    """The order-free kernels add integers, and fp32 for the heads that need the order; the others fp32 alone."""
    added = []
    for name, _, kernel in main_kernels(binary, "backward"):
        additions = {i for i in kernel.mnemonics() if i.startswith("UBLKRED")}
        assert all("ADD" in i for i in additions), (name, additions)
        added.append(frozenset(re.search(r"[FSU]32", i).group(0) for i in additions))
    order_free = [v for v in variants.select_variants(VARIANTS) if v.values[-1] == "OrderFree"]
    expected = {frozenset({"F32"}): len(added) - len(order_free), frozenset({"F32", "S32"}): len(order_free)}
    assert collections.Counter(added) == {types: count for types, count in expected.items() if count}


def test_kernels_have_the_word_in_their_names_that_nvcc_looks_for(binary):
    """See csrc/device/elements.h."""
    for pass_ in ("forward", "backward"):
        assert all("cutlass" in name for name, _, _ in main_kernels(binary, pass_))


def test_forward_adds_to_nothing_but_the_counter_of_tiles(binary):
    """Each output has one writer, and the counter is an integer. Only kernels for masks by key columns take maxima in
    global memory, those of the logits, as integers: a maximum has no order."""
    columns = "MaskKindE3E"
    maxima = {"REDG.E.MAX.S32.STRONG.GPU", "REDG.E.MIN.STRONG.GPU"}
    for name, _, kernel in main_kernels(binary, "forward"):
        in_memory = {i for i in kernel.mnemonics() if i.startswith(("ATOM", "RED.", "REDG", "UBLKRED", "UTMAREDG"))}
        assert in_memory == {"ATOMG.E.ADD.STRONG.GPU"} | (maxima if columns in name else set()), name


def test_the_fingerprint_kernel_reads_vectors(binary):
    """One kernel for all tensors: whole groups by loads of 16 bytes, of single bytes 8, and sums by atomics alone."""
    (kernel,) = (kernel for name, kernel in binary.items() if "fingerprint_kernel" in name)
    loads = collections.Counter(i.split()[0] for i in kernel.instructions if i.startswith("LDG"))
    # A lane has four groups in flight: of words of two bytes one load each, of four bytes two.
    assert loads["LDG.E.128.CONSTANT"] >= 4 + 8 and loads["LDG.E.64.CONSTANT"] >= 4, loads
    assert {i for i in kernel.mnemonics() if i.startswith(("RED", "ATOM"))} == {"REDG.E.ADD.64.STRONG.GPU"}
    assert kernel.registers <= 64, kernel.registers


def test_binary_needs_only_stable_symbols(binary):
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm (binutils) is not on this machine")
    run = subprocess.run([nm, "-D", "--undefined-only", str(BINARY)], capture_output=True, text=True, check=True)
    names = {line.split()[-1].split("@")[0] for line in run.stdout.splitlines()}
    assert "aoti_torch_get_current_cuda_stream" in names
    # C++ symbols of torch change with its version, Python's with Python's; neither may be needed.
    assert not [name for name in names if re.match(r"_ZNK?(2at|3c10|5torch)|_?Py", name)]
