"""The build: which kernels there are, what is chosen, what is refused."""

import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys

import check_kernels
import pytest
import toolchain
import variants

from dash_attn import ops, schedule

ROOT = pathlib.Path(__file__).parents[1]
VARIANTS = variants.read_variants(ROOT / "csrc" / "launch" / "variants.def")
SETS = {"shift": "Shift", "symmetric_shift": "SymmetricShift", "order_free": "OrderFree"}  # of policies, but Ordered

LIST = """\
// A comment with DASH_FORWARD_VARIANT(dtype, head_dim, mask) in it.
DASH_FORWARD_VARIANT(BFloat16, 64, Full, Plain)
DASH_FORWARD_VARIANT(BFloat16, 64, Causal, Plain)
DASH_FORWARD_VARIANT(BFloat16, 128, Full, Plain)
DASH_FORWARD_VARIANT(Float16, 64, Full, Plain)
DASH_BACKWARD_VARIANT(BFloat16, 64, Full, Plain, Ordered)
DASH_BACKWARD_VARIANT(BFloat16, 64, Full, Plain, Shift)
DASH_BACKWARD_VARIANT(BFloat16, 64, Causal, Plain, Ordered)
DASH_BACKWARD_VARIANT(BFloat16, 64, Causal, Plain, SymmetricShift)
DASH_BACKWARD_VARIANT(BFloat16, 128, Full, Plain, Ordered)
DASH_BACKWARD_VARIANT(Float16, 64, Full, Plain, OrderFree)
DASH_BACKWARD_VARIANT(Float16, 192x128, Full, Plain, OrderFree)
"""


def test_list_of_variants_is_complete():
    """Both passes for every dtype, head dims and mask, of a changed score for the masks of csrc/contract/served_mask.h;
    the backward with every set of the policies that csrc/contract/policy.h names."""
    capped_causal, dropped = ("96", "128", "256"), ("64", "128")
    forward, backward = set(), set()
    for dtype, dims in itertools.product(("BFloat16", "Float16"), ("64", "96", "128", "192x128", "192", "256")):
        head_dims = dict(zip(("head_dim", "value_head_dim"), map(int, dims.split("x"))))
        kernels = [("Full", "Plain"), ("Causal", "Plain"), *(("Windowed", s) for s in ("Plain", "Changed"))]
        kernels += [("Windowed", "Dropout"), *[("Causal", "Softcap")] * (dims in capped_causal)]
        kernels += [("Full", "Dropout"), ("Causal", "Dropout")] * (dims in dropped)
        for mask, score in kernels:
            forward.add((dtype, dims, mask, score))
            call = dict(causal=mask == "Causal", window=(0, 0) if mask == "Windowed" else (-1, -1))
            scores = dict(changed_scores=score in ("Softcap", "Changed"), dropout=score == "Dropout")
            policies = schedule.fitting(**call, **head_dims, **scores)
            backward |= {(dtype, dims, mask, score, SETS.get(name, "Ordered")) for name in policies}
        forward.add((dtype, dims, "Columns", "Plain"))
        backward.add((dtype, dims, "Columns", "Plain", "Ordered"))
    passes = ("FORWARD", "SHORT_FORWARD", "BACKWARD")
    listed = {pass_: [v.values for v in VARIANTS if v.pass_ == pass_] for pass_ in passes}
    # Tiles of two warpgroups have no kernel of their own for one.
    short = {v for v in forward if v[1] not in ("192", "256") and v[2:] == ("Windowed", "Plain")}
    assert tuple(map(set, listed.values())) == (forward, short, backward)
    assert len(VARIANTS) == len(forward) + len(short) + len(backward)


# `make test` builds no kernels where there is no GPU.
LIBRARIES = [
    pytest.param(path, marks=pytest.mark.slow if path.name.startswith("_C.") else (), id=path.name)
    for path in sorted((ROOT / "dash_attn").glob("*.so"))
]


@pytest.mark.parametrize("library", LIBRARIES)
def test_libraries_share_libstdcxx(library):
    """A second libstdc++ in the process crashes when it writes a number of an error message."""
    assert "libstdc++.so.6" in needed(library)


@pytest.mark.parametrize("flags", [[], ["-static-libstdc++"]])
def test_a_linker_that_prefers_a_static_libstdcxx(tmp_path, flags):
    source = tmp_path / "number.cpp"
    source.write_text("#include <sstream>\nint f(int n) { std::ostringstream s; s << n; return s.str().size(); }\n")
    command = ["c++", "-shared", "-fPIC", str(source), "-o", str(tmp_path / "number.so"), *flags]
    subprocess.run(command + toolchain.shared_libstdcxx("c++"), check=True)
    assert "libstdc++.so.6" in needed(tmp_path / "number.so")
    subprocess.run(command, check=True)
    assert ("libstdc++.so.6" in needed(tmp_path / "number.so")) == (not flags)


def needed(library: pathlib.Path) -> list[str]:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf (binutils) is not on this machine")
    text = subprocess.run([readelf, "-d", str(library)], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.+)\]", text)


# One kernel whose accumulator is touched between products, one with an array in local memory, and one with neither.
FAULTY_KERNELS = r"""
__device__ void product(float (&d)[4], unsigned long long a, unsigned long long b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
}
template <bool kTouch>
__device__ void products(float* out, unsigned long long a, unsigned long long b) {
  float d[4] = {out[0], out[1], out[2], out[3]};
  asm volatile("wgmma.fence.sync.aligned;");
  product(d, a, b);
  if (kTouch) d[1] += 1.f;
  product(d, a + 2, b + 2);
  asm volatile("wgmma.commit_group.sync.aligned;");
  asm volatile("wgmma.wait_group.sync.aligned 0;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]));
  for (int i = 0; i < 4; ++i) out[threadIdx.x + i] = d[i];
}
extern "C" __global__ void good(float* out, long long a, long long b) { products<false>(out, a, b); }
extern "C" __global__ void serialised(float* out, long long a, long long b) { products<true>(out, a, b); }
extern "C" __global__ void local(float* out, int n) {
  float d[64];
  for (int i = 0; i < 64; ++i) d[i] = out[i];
  for (int i = 0; i < n; ++i) d[i * n % 64] += out[i];
  for (int i = 0; i < 64; ++i) out[i] = d[i];
}
"""


def test_faults_are_found_in_machine_code(tmp_path):
    cuda_home = toolchain.find_cuda_home()
    if cuda_home is None:
        pytest.skip("nvcc is not on this machine")
    source, cubin = tmp_path / "faulty.cu", tmp_path / "faulty.cubin"
    source.write_text(FAULTY_KERNELS)
    flags = [flag for flag in toolchain.OPS_NVCC if flag.startswith("-gencode")]
    subprocess.run([cuda_home / "bin" / "nvcc", "-O3", *flags, "-cubin", source, "-o", cubin], check=True)
    check = [sys.executable, check_kernels.__file__, str(cubin)]
    run = subprocess.run(check, capture_output=True, text=True)
    assert run.returncode == 1, run.stdout
    assert "serialised: waits for every product" in run.stdout and "local: has a stack frame of" in run.stdout
    assert "good:" not in run.stdout and "3 kernels, at most" in run.stdout and "2 with faults" in run.stdout


@pytest.fixture
def listed(monkeypatch, tmp_path) -> list[variants.Variant]:
    for name in variants.AXES:
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "variants.def"
    path.write_text(LIST)
    return variants.read_variants(path)


@pytest.mark.parametrize(
    "environment, forward, backward",
    [
        ({}, 4, 7),
        ({"DASH_ATTN_HEAD_DIMS": "64"}, 3, 5),
        ({"DASH_ATTN_DTYPES": "bf16"}, 3, 5),
        ({"DASH_ATTN_HEAD_DIMS": "192x128, 128"}, 1, 2),
        ({"DASH_ATTN_DTYPES": "Float16"}, 1, 2),
        ({"DASH_ATTN_MASKS": "causal"}, 1, 2),
        ({"DASH_ATTN_POLICIES": "spt"}, 4, 3),
        ({"DASH_ATTN_POLICIES": "ordered; Symmetric_Shift"}, 4, 4),
        ({"DASH_ATTN_HEAD_DIMS": "64,128", "DASH_ATTN_DTYPES": "fp16", "DASH_ATTN_POLICIES": "order_free"}, 1, 1),
    ],
)
def test_environment_limits_what_is_built(monkeypatch, tmp_path, listed, environment, forward, backward):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    selected = variants.select_variants(listed)
    units = variants.generate(selected, tmp_path / "generated")
    written = "".join(unit.read_text() for unit in units)
    dispatched = (tmp_path / "generated" / "built_variants.def").read_text()
    for pass_, count in (("BACKWARD", backward), ("FORWARD", forward)):
        assert len([v for v in selected if v.pass_ == pass_]) == count
        assert written.count(f"DASH_INSTANTIATE_{pass_}(") == count
        assert dispatched.count(f"DASH_{pass_}_VARIANT(") == count


@pytest.mark.parametrize("score", ["softcap", "alibi"])
def test_scores_that_share_kernels_are_built_together(monkeypatch, score):
    monkeypatch.setenv("DASH_ATTN_SCORES", f"plain,{score}")
    selected = {v.values[2:4] for v in variants.select_variants(VARIANTS) if v.pass_ == "FORWARD"}
    assert {("Windowed", "Changed"), ("Causal", "Softcap"), ("Windowed", "Plain")} <= selected
    assert not {s for _, s in selected} & {"Dropout"}


def test_yardsticks_are_built_where_they_are_asked_for(monkeypatch, listed):
    sets = {v.values[-1] for v in variants.select_variants(listed) if v.pass_ == "BACKWARD"}
    assert "Ordered" in sets and "OrderedAndYardsticks" not in sets
    for name in ("ascending", "atomic"):
        monkeypatch.setenv("DASH_ATTN_POLICIES", f"{name},shift")
        selected = variants.select_variants(listed)
        assert {v.values[-1] for v in selected if v.pass_ == "BACKWARD"} == {"OrderedAndYardsticks", "Shift"}


def test_units_hold_what_shares_a_dtype_and_head_dims(tmp_path, listed):
    variants.generate(listed, tmp_path)
    written = variants.generate([v for v in listed if v.values[1:3] == ("64", "Full")], tmp_path)
    names = ["bfloat16_64", "float16_64"]
    assert [path.stem for path in written] == [f"{pass_}_{name}" for pass_ in ("forward", "backward") for name in names]
    assert sorted(tmp_path.glob("*.cu")) == sorted(written), "units of an earlier selection stay behind"
    assert written[2].read_text() == (
        '#include "launch/compiled_backward.h"\n\n'
        "DASH_INSTANTIATE_BACKWARD(BFloat16, 64, Full, Plain, Ordered)\n"
        "DASH_INSTANTIATE_BACKWARD(BFloat16, 64, Full, Plain, Shift)\n"
    )


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("DASH_ATTN_HEAD_DIMS", "96", "DASH_ATTN_HEAD_DIMS is '96': 96 unknown, allowed are 64, 128, 192x128"),
        ("DASH_ATTN_DTYPES", "fp8", "is 'fp8': fp8 unknown, allowed are bf16, fp16, bfloat16, float16"),
        ("DASH_ATTN_MASKS", "full,window", "is 'full,window': window unknown, allowed are full, causal"),
        ("DASH_ATTN_POLICIES", "zigzag", "zigzag unknown, allowed are descending, spt, ascending, atomic, ordered,"),
    ],
)
def test_wrong_selection_is_refused(monkeypatch, listed, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=re.escape(message)):
        variants.select_variants(listed)


def test_selection_of_nothing_is_refused(monkeypatch, listed):
    monkeypatch.setenv("DASH_ATTN_DTYPES", "fp16")
    monkeypatch.setenv("DASH_ATTN_MASKS", "causal")
    with pytest.raises(SystemExit, match="select no kernel"):
        variants.select_variants(listed)


def test_an_installation_notes_that_kernels_are_not_wanted():
    """Also an editable one: without the note, an import warns where torch has CUDA."""
    if os.environ.get("DASH_ATTN_SKIP_CUDA") != "1":
        pytest.skip("DASH_ATTN_SKIP_CUDA is not 1: kernels are wanted")
    assert ops.why_left_out() == "DASH_ATTN_SKIP_CUDA=1 was set"


def run_setup(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "setup.py"), *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)


def test_old_torch_is_refused(tmp_path):
    (tmp_path / "torch.py").write_text("__version__ = '2.10.1+cu128'\n")
    run = run_setup("--version", PYTHONPATH=str(tmp_path))
    assert run.returncode != 0 and "Traceback" not in run.stderr
    assert f"dash_attn needs torch {toolchain.OLDEST_TORCH} or newer" in run.stderr and "has 2.10.1+cu128" in run.stderr


def test_old_setuptools_is_refused():
    toolchain.check_setuptools("77.0.1")
    with pytest.raises(SystemExit, match="needs setuptools 77 or newer, got 65.5.0: pip install -U setuptools"):
        toolchain.check_setuptools("65.5.0")


def test_old_nvcc_is_refused(tmp_path):
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
    nvcc.chmod(0o755)
    folders = ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "objects")]
    run = run_setup("build_ext", *folders, CUDA_HOME=str(nvcc.parents[1]), DASH_ATTN_SKIP_CUDA="0")
    assert run.returncode != 0 and "nvcc is of CUDA 11.8; the kernels need 12.5 or newer" in run.stderr
    assert "Traceback" not in run.stderr


def test_kernels_of_older_nvcc_are_said_to_be_slower(capsys):
    toolchain.check_cuda("13.0", None)
    assert capsys.readouterr().out == ""
    toolchain.check_cuda("12.9", None)
    assert "some kernels that CUDA 12.9 compiles are slower than those of 13.0" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="nvcc is of CUDA 12.4; the kernels need 12.5 or newer"):
        toolchain.check_cuda("12.4", None)


def test_the_runtime_of_a_toolkit(tmp_path):
    """That of the installer, and that of PyPI's packages, which have no libcudart.so."""
    with pytest.raises(SystemExit, match=re.escape(f"must have libcudart.so in lib64 or lib, got {tmp_path}")):
        toolchain.cudart(tmp_path)
    for folder, file, expected in (
        ("lib", "libcudart.so.13", ":libcudart.so.13"),
        ("lib64", "libcudart.so", "cudart"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).touch()
        (tmp_path / folder / "libcudart_static.a").touch()
        assert toolchain.cudart(tmp_path) == (tmp_path / folder, expected)


def test_nvcc_must_be_of_the_cuda_of_torch():
    toolchain.check_cuda("13.0", "13.1")
    toolchain.check_cuda("13.0", None)
    toolchain.check_cuda("12.5", "12.9")
    message = "nvcc is of CUDA 12.8, torch of CUDA 13.0: the major versions must agree (CUDA_HOME chooses the toolkit)"
    with pytest.raises(SystemExit, match=re.escape(message)):
        toolchain.check_cuda("12.8", "13.0")


@pytest.mark.parametrize(
    "version, accepted", [("2.11.0+cu130", True), ("2.11.0a0+git1", True), ("2.9.1", False), ("3.0.0", True)]
)
def test_floor_of_torch(version, accepted):
    if accepted:
        toolchain.check_torch(version)
    else:
        with pytest.raises(SystemExit, match=f"has {re.escape(version)}"):
            toolchain.check_torch(version)
