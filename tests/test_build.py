"""The binary: which kernels it holds, and what their machine code does. Needs no GPU."""

import importlib.metadata
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from dash_attn import schedule

ROOT = pathlib.Path(__file__).parents[1]
BINARY = ROOT / "dash_attn" / "_C.abi3.so"
sys.path[:0] = [str(ROOT / "build_support"), str(ROOT / "third_party")]

import find_cutlass  # noqa: E402
import ptxas  # noqa: E402
import toolchain  # noqa: E402
import variants  # noqa: E402

VARIANTS = variants.read_variants(ROOT / "csrc" / "launch" / "variants.def")
KERNELS = {
    "backward": re.compile(r"backward_kernelI.*?(bfloat16_t|half_t)ELi(\d+)ELb([01])ELN\w*?PolicyE(\d+)E"),
    "forward": re.compile(r"forward_kernelI.*?(bfloat16_t|half_t)ELi(\d+)ELb([01])E()E"),
}
INSTALLED = ["setup.py", "pyproject.toml", "README.md", "csrc", "dash_attn", "build_support", "third_party"]


def key(variant: variants.Variant) -> tuple:
    """A variant as `kernels` names it."""
    policy = str(schedule.policy_number(variant.policy_name())) if variant.policy else ""
    return variant.dtype, variant.head_dim, variant.causal, policy


def of_pass(pass_: str, chosen: list[variants.Variant]) -> list[variants.Variant]:
    return [variant for variant in chosen if variant.pass_name() == pass_]


def tool(name: str) -> str:
    """cuobjdump or nvdisasm, from PATH, the CUDA toolkit or the PyPI package of that name."""
    home = toolchain.find_cuda_home()
    candidates = [shutil.which(name), home and home / "bin" / name]
    try:
        files = importlib.metadata.files(f"nvidia-cuda-{name}") or []
        candidates += [file.locate() for file in files if file.name == name]
    except importlib.metadata.PackageNotFoundError:
        pass
    for candidate in candidates:
        if candidate and pathlib.Path(candidate).is_file():
            return str(candidate)
    pytest.fail(f"{name} was not found: pip install nvidia-cuda-{name}")


def dump(option: str) -> str:
    folders = [os.path.dirname(tool(name)) for name in ("cuobjdump", "nvdisasm")]
    environment = {**os.environ, "PATH": os.pathsep.join([*folders, os.environ["PATH"]])}
    command = [tool("cuobjdump"), option, str(BINARY)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def binary():
    if not BINARY.is_file():
        if toolchain.find_cuda_home() is None:
            pytest.skip("nvcc is not on this machine, so there are no kernels to look at")
        if os.environ.get("DASH_ATTN_SKIP_CUDA") == "1":
            pytest.skip("DASH_ATTN_SKIP_CUDA=1")
        pytest.fail("nvcc is here, but dash_attn/_C.abi3.so was not built: python setup.py build_ext --inplace")


@pytest.fixture(scope="module")
def resources(binary) -> dict[str, dict[str, int]]:
    """{kernel: {"REG": registers, "STACK": bytes, "LOCAL": bytes, ...}} as the binary states them."""
    found = re.findall(r"Function (\S+):\s*\n\s*(REG:.*)", dump("-res-usage"))
    return {name: {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", usage)} for name, usage in found}


@pytest.fixture(scope="module")
def machine_code(binary) -> dict[str, set[str]]:
    """{kernel: the instructions (with modifiers) that it uses}."""
    code: dict[str, set[str]] = {}
    name = None
    for line in dump("-sass").splitlines():
        if match := re.search(r"Function : (\S+)", line):
            name = match.group(1)
            code[name] = set()
        elif name and (match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", line)):
            code[name].add(match.group(1))
    return code


def kernels(pass_: str, names) -> dict[tuple, str]:
    """{(dtype, head_dim, causal, policy number or ""): symbol} of the main kernels among the symbols."""
    found = {}
    for name in names:
        if match := KERNELS[pass_].search(name):
            element, head_dim, causal, policy = match.groups()
            dtype = "BFloat16" if element == "bfloat16_t" else "Float16"
            found[dtype, int(head_dim), causal == "1", policy] = name
    return found


def test_list_of_variants_is_complete():
    shapes = list(itertools.product(("BFloat16", "Float16"), (64, 128), (False, True)))
    backward = {
        (*shape, name)
        for shape in shapes
        for name in schedule.fitting(causal=shape[2])
    }
    backward |= {("BFloat16", head_dim, causal, "atomic") for head_dim in (64, 128) for causal in (False, True)}
    listed = [(v.dtype, v.head_dim, v.causal, v.policy_name()) for v in VARIANTS]
    assert set(listed) == backward | {(*shape, None) for shape in shapes}
    assert len(listed) == len(set(listed))
    assert len(of_pass("backward", VARIANTS)) == 48 and len(of_pass("forward", VARIANTS)) == 8


@pytest.mark.parametrize("pass_", KERNELS)
def test_binary_has_every_variant(resources, pass_):
    selected = of_pass(pass_, variants.select_variants(VARIANTS))
    assert set(kernels(pass_, resources)) == {key(v) for v in selected}


def test_no_kernel_uses_local_memory(resources):
    assert resources
    bad = {name: usage for name, usage in resources.items() if usage["STACK"] or usage["LOCAL"]}
    assert not bad


def test_machine_code_has_no_local_loads_or_stores(machine_code):
    assert machine_code
    local = {name: {i for i in code if i.split(".")[0] in {"LDL", "STL"}} for name, code in machine_code.items()}
    assert not {name: code for name, code in local.items() if code}


# TMA loads and stores, warpgroup products, bulk adds, registers handed from the producer to the consumers.
@pytest.mark.parametrize(
    "pass_, units",
    [("backward", {"HGMMA", "UTMALDG", "UBLKRED", "USETMAXREG"}), ("forward", {"HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"})],
)
def test_kernels_use_the_units_of_hopper(machine_code, pass_, units):
    found = kernels(pass_, machine_code)
    assert found
    for (dtype, _, _, policy), name in found.items():
        opcodes = {instruction.split(".")[0] for instruction in machine_code[name]}
        assert units <= opcodes, name
        # A product of bf16 states the type; a product of fp16 is the instruction's default.
        products = [i for i in machine_code[name] if i.startswith("HGMMA")]
        assert all(("BF16" in i) == (dtype == "BFloat16") for i in products), (name, products)
        additions = {i for i in machine_code[name] if i.startswith("UBLKRED")}
        # Order-free kernels add integers, and fp32 for the heads that need the order.
        types = {match.group(0) for i in additions for match in [re.search(r"[FSU]32", i)] if match and "ADD" in i}
        expected = {"F32", "S32"} if policy == str(schedule.policy_number("order_free")) else {"F32"} if policy else set()
        assert len(additions) == len(types) and types == expected, (name, additions)


def test_forward_adds_to_nothing_in_memory(machine_code):
    """No atomics: each output has one writer."""
    for name in kernels("forward", machine_code).values():
        opcodes = {instruction.split(".")[0] for instruction in machine_code[name]}
        assert not opcodes & {"ATOM", "ATOMG", "RED", "REDG", "REDUX", "UBLKRED", "UTMAREDG"}, name


def test_binary_needs_only_stable_symbols(binary):
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm (binutils) is not on this machine")
    symbols = subprocess.run([nm, "-D", "--undefined-only", str(BINARY)], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1].split("@")[0] for line in symbols.splitlines()}
    assert "aoti_torch_get_current_cuda_stream" in names
    # C++ symbols of torch change with its version, Python's with Python's; neither may be needed.
    assert not [name for name in names if re.match(r"_ZNK?(2at|3c10|5torch)|_?Py", name)]


def test_report_of_the_build_is_clean(binary):
    path = BINARY.parent / "_build_report.json"
    if not path.is_file():
        pytest.skip("the binary was built on another machine, without its report")
    report = json.loads(path.read_text())
    assert report["clean"] is True
    assert not [kernel["name"] for kernel in report["kernels"] if ptxas.faults(kernel)]
    names = {kernel["symbol"] for kernel in report["kernels"]}
    assert sum(len(kernels(pass_, names)) for pass_ in KERNELS) == len(report["variants"])


PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'good' for 'sm_90a'
ptxas info    : Function properties for good
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers
ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized in the function 'slow'
ptxas info    : Compiling entry function 'slow' for 'sm_90a'
ptxas info    : Function properties for slow
    24 bytes stack frame, 48 bytes spill stores, 52 bytes spill loads
ptxas info    : Used 240 registers, used 1 barriers
warning: something else
"""


def test_ptxas_output_is_read_and_judged():
    kernels, other = ptxas.parse(PTXAS)
    by_name = {kernel["symbol"]: kernel for kernel in kernels}
    assert by_name["good"]["registers"] == 168 and by_name["slow"]["registers"] == 240
    assert ptxas.faults(by_name["good"]) == []
    assert ptxas.faults(by_name["slow"]) == [
        "spills 48 bytes, reloads 52",
        "has a stack frame of 24 bytes",
        "has serialised wgmma instructions",
    ]
    assert "warning: something else" in other


@pytest.mark.parametrize(
    "environment, backward, forward",
    [
        ({}, 48, 8),
        ({"DASH_ATTN_HEAD_DIMS": "64"}, 24, 4),
        ({"DASH_ATTN_DTYPES": "bf16"}, 26, 4),
        ({"DASH_ATTN_MASKS": "causal", "DASH_ATTN_POLICIES": "spt, symmetric_shift"}, 8, 4),
        ({"DASH_ATTN_HEAD_DIMS": "128", "DASH_ATTN_DTYPES": "fp16", "DASH_ATTN_POLICIES": "shift"}, 1, 2),
    ],
)
def test_environment_limits_what_is_built(monkeypatch, tmp_path, environment, backward, forward):
    for name in ("HEAD_DIMS", "DTYPES", "MASKS", "POLICIES"):
        monkeypatch.delenv(f"DASH_ATTN_{name}", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    selected = variants.select_variants(VARIANTS)
    units = variants.generate(selected, tmp_path)
    written = "".join(unit.read_text() for unit in units)
    dispatched = (tmp_path / "built_variants.def").read_text()
    for pass_, count in (("backward", backward), ("forward", forward)):
        assert len(of_pass(pass_, selected)) == count
        assert written.count(f"DASH_INSTANTIATE_{pass_.upper()}(") == count
        assert dispatched.count(f"DASH_{pass_.upper()}_VARIANT(") == count


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("DASH_ATTN_HEAD_DIMS", "96", "DASH_ATTN_HEAD_DIMS is '96': 96 unknown, allowed are 64, 128"),
        ("DASH_ATTN_DTYPES", "fp8", "DASH_ATTN_DTYPES is 'fp8': fp8 unknown, allowed are bf16, fp16"),
    ],
)
def test_wrong_selection_is_refused(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=re.escape(message)):
        variants.select_variants(VARIANTS)


def test_wrong_cutlass_is_refused(monkeypatch, tmp_path):
    (tmp_path / "include" / "cutlass").mkdir(parents=True)
    (tmp_path / "include" / "cute").mkdir()
    (tmp_path / "include" / "cute" / "tensor.hpp").touch()
    version = tmp_path / "include" / "cutlass" / "version.h"
    monkeypatch.setenv("CUTLASS_HOME", str(tmp_path))
    with pytest.raises(find_cutlass.CutlassNotFound, match="has no CUTLASS headers"):
        find_cutlass.find_cutlass()
    for patch, accepted in ((0, True), (1, False)):
        version.write_text(f"#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH {patch}\n")
        if accepted:
            assert find_cutlass.find_cutlass() == (tmp_path / "include").resolve()
        else:
            with pytest.raises(find_cutlass.CutlassNotFound, match="has CUTLASS 4.2.1, expected 4.2.0"):
                find_cutlass.find_cutlass()


def test_install_without_nvcc_works_and_says_so(tmp_path):
    source, target = tmp_path / "source", tmp_path / "installed"
    source.mkdir()
    for name in INSTALLED:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("*.so", "__pycache__", "_build_report.json"))
        else:
            shutil.copy(path, source / name)
    environment = {**os.environ, "DASH_ATTN_SKIP_CUDA": "1"}
    pip = [sys.executable, "-m", "pip", "install", "-v", "--no-deps", "--no-build-isolation", "--no-index"]
    run = subprocess.run([*pip, "--target", str(target), str(source)], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "WITHOUT the CUDA ops: DASH_ATTN_SKIP_CUDA=1" in run.stdout + run.stderr
    assert json.loads((target / "dash_attn" / "_build_report.json").read_text())["reason"]
    assert not list((target / "dash_attn").glob("_C*"))
    program = "import dash_attn, dash_attn.schedule as s; print(dash_attn.__file__, s.POLICIES[0])"
    environment["PYTHONPATH"] = str(target)
    printed = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert str(target) in printed.stdout and "ascending" in printed.stdout
