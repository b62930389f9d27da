"""`python -m dash_attn.info`, and what an installation says of the kernels it holds or lacks."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch

import dash_attn
from dash_attn import build_record, info, ops

PACKAGE = pathlib.Path(dash_attn.__file__).parent
RECORD = (
    b"\x7fELF...dash_attn build record\narchitecture sm_90a\nnvcc 13.0.88\n"
    b"forward BFloat16 128 Causal Plain\nforward Float16 192x128 Full Plain\n"
    b"backward BFloat16 128 Causal Plain Ordered\nbackward BFloat16 128 Causal Plain SymmetricShift\n"
    b"end\n\0..."
)
# Makes a CPU torch look like one with CUDA, which is when the lack of kernels is worth a warning.
IMPORT = "import torch; torch.version.cuda = '13.0'; import dash_attn.ops as ops; print(ops.why_no_kernels)"


@pytest.fixture
def package(tmp_path) -> pathlib.Path:
    """A copy of the package without kernels."""
    copy = tmp_path / "dash_attn"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("_C*", "__pycache__", "without_kernels.txt"))
    return copy


def run(folder: pathlib.Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(folder), **variables}
    environment.pop("PYTHONWARNINGS", None)
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def test_record_of_a_binary(tmp_path):
    path = tmp_path / "_C.abi3.so"
    path.write_bytes(RECORD)
    assert build_record.kernels_file(tmp_path) == path
    record = build_record.read(path)
    assert (record.architecture, record.nvcc) == ("sm_90a", "13.0.88")
    assert len(record.kernels) == 4
    assert record.kernels[1] == build_record.Kernel("forward", "Float16", "192x128", "Full", "Plain", None)
    assert record.kernels[3].policies == "SymmetricShift"


def test_a_binary_without_a_record_is_refused(tmp_path):
    assert build_record.kernels_file(tmp_path) is None
    path = tmp_path / "_C.abi3.so"
    path.write_bytes(RECORD[:100])
    with pytest.raises(ValueError, match=re.escape(f"{path} contains no record of its build")):
        build_record.read(path)


def test_a_binary_of_older_sources_is_refused(tmp_path):
    path = tmp_path / "_C.abi3.so"
    path.write_bytes(RECORD.replace(b"forward ", b"cutlass 4.2.0\nforward ", 1))
    with pytest.raises(ValueError, match=re.escape(f"{path} was built from older sources")):
        build_record.read(path)


def test_every_score_and_set_of_policies_is_known():
    """A build record names those of csrc/launch/variants.def."""
    lines = (pathlib.Path(__file__).parents[1] / "csrc/launch/variants.def").read_text()
    sets = set(re.findall(r"^DASH_BACKWARD_VARIANT\(.*, (\w+)\)$", lines, re.MULTILINE))
    assert sets | {"OrderedAndYardsticks"} == set(info._POLICIES_OF)
    scores = set(re.findall(r"^DASH_FORWARD_VARIANT\(.*, (\w+)\)$", lines, re.MULTILINE))
    assert scores == set(info._SCORES_OF)


def test_info_of_this_installation():
    run = subprocess.run([sys.executable, "-m", "dash_attn.info", "--json"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    facts = json.loads(run.stdout)
    assert facts["dash_attn"]["version"] == dash_attn.__version__ and facts["torch"]["version"] == torch.__version__
    assert facts["self_check"]["passed"] and facts["self_check"]["cases"] >= 1
    assert facts["kernels"]["built"] == bool(list(PACKAGE.glob("_C*.so")))
    assert facts["kernels_run_here"] == (facts["self_check"]["device"] == "cuda") == (facts["why_not"] is None)
    # A CUDA build of torch leaves +cu130 out of the version that pip knows.
    assert facts["integrations"][0]["version"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert not facts["integrations"][0]["active"]


@pytest.mark.slow
def test_info_says_what_was_built_and_what_is_not_here(package):
    (package / "_C.abi3.so").write_bytes(RECORD)
    found = run(package.parent, "-m", "dash_attn.info", CUDA_VISIBLE_DEVICES="")
    assert found.returncode == 0, found.stdout + found.stderr
    lines = found.stdout.splitlines()
    assert f"dash_attn {dash_attn.__version__} in {package}" in lines
    assert "kernels: 4 for sm_90a (Hopper), by nvcc 13.0.88" in lines
    assert "  head dims: 128, 192x128" in lines
    schedules = next(line.partition(":")[2] for line in lines if line.startswith("  schedules:"))
    assert set(schedules.replace(",", "").split()) == {"descending", "spt", "symmetric_shift"}
    # A torch with CUDA tries to load the library, which is none.
    reason = (
        f"{package / '_C.abi3.so'} cannot be loaded: " if torch.version.cuda else "this torch is built without CUDA"
    )
    assert any(line.startswith(f"kernels run here: no: {reason}") for line in lines)
    assert "self-check of the CPU reference: passed" in found.stdout


@pytest.mark.slow
@pytest.mark.parametrize("note, because", [
    ("nvcc was not found (PATH)", "because nvcc was not found (PATH) when dash_attn was built"),
    (None, "and the build left no note of the reason"),
])  # fmt: skip
def test_info_says_why_there_are_no_kernels(package, note, because):
    if note is not None:
        (package / "without_kernels.txt").write_text(f"{note}\n")
    found = run(package.parent, "-W", "ignore", "-m", "dash_attn.info")
    assert f"kernels: none, {because} (docs/install.md)" in found.stdout.splitlines(), found.stdout + found.stderr


def test_info_fails_with_its_self_check(monkeypatch, capsys):
    monkeypatch.setattr(info.dash_attn, "flash_attn_func", lambda q, k, v, causal: (q + k + v) * 0.5)
    assert info.main([]) == 1
    assert "FAILED" in (printed := capsys.readouterr().out) and "the output differs from plain PyTorch" in printed


@pytest.mark.parametrize("not_loaded, capability, why", [
    (None, (9, 0), None),
    (None, (10, 0), "they need a GPU of compute capability 9.0 (Hopper), but this one is a GPU (10.0)"),
    (None, None, "torch sees no CUDA device"),
    ("_C.abi3.so cannot be loaded", (9, 0), "_C.abi3.so cannot be loaded"),
], ids=str)  # fmt: skip
def test_why_no_kernels_run(monkeypatch, not_loaded, capability, why):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    monkeypatch.setattr(ops, "why_no_kernels", not_loaded)
    assert info.why_no_kernels_run() == why


def test_every_integration_is_listed():
    folder = PACKAGE / "integrations"
    # X_backend is a part of X.
    stems = {path.stem.removesuffix("_backend") for path in folder.glob("[a-z]*.py")}
    modules = {f"dash_attn.integrations.{stem}" for stem in stems}
    assert modules <= {integration.module for integration in info.INTEGRATIONS}


def test_info_says_why_an_integration_is_unavailable(package):
    """Of frameworks whose versions do not fit."""
    for name, text in {
        "transformers/__init__.py": "__version__ = '5.0.0'\n",
        "transformers/utils/__init__.py": "",
        "transformers/utils/import_utils.py": "",
        "transformers-5.0.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: transformers\nVersion: 5.0.0\n",
        "megatron/core/__init__.py": "",
    }.items():
        (package.parent / name).parent.mkdir(parents=True, exist_ok=True)
        (package.parent / name).write_text(text)
    found = run(package.parent, "-W", "ignore", "-m", "dash_attn.info")
    assert found.returncode == 0, found.stdout + found.stderr
    lines = {line.split()[0]: line.partition(": ")[2] for line in found.stdout.splitlines() if line.startswith("  ")}
    assert lines["dash_attn.integrations.torch"] == "available"
    transformers = "unavailable: dash-attn/flash needs transformers 5.16 or newer, got 5.0.0"
    assert lines["dash_attn.integrations.transformers"] == transformers
    assert lines["dash_attn.integrations.megatron"].startswith("unavailable: cannot import name 'parallel_state' from")


@pytest.mark.slow
@pytest.mark.parametrize("note", [None, "nvcc was not found (CUDA_HOME, PATH, /usr/local/cuda)"])
def test_a_package_without_kernels_says_so_once(package, note):
    if note is not None:
        (package / "without_kernels.txt").write_text(note + "\n")
    found = run(package.parent, "-c", IMPORT)
    assert found.returncode == 0, found.stderr
    because = f", because {note} when it was built" if note else ""
    assert found.stderr.count(f"RuntimeWarning: dash_attn was installed without its CUDA kernels{because}:") == 1
    assert "set CUDA_HOME to a CUDA toolkit and run `pip install --no-build-isolation .`" in found.stderr


def test_a_package_that_was_asked_to_be_without_kernels_is_silent(package):
    (package / "without_kernels.txt").write_text("DASH_ATTN_SKIP_CUDA=1 was set\n")
    found = run(package.parent, "-c", IMPORT)
    assert found.returncode == 0 and found.stderr == ""
    assert "because DASH_ATTN_SKIP_CUDA=1 was set when it was built" in found.stdout


def test_kernels_that_cannot_be_loaded_are_not_passed_over(package):
    (package / "_C.abi3.so").write_bytes(b"no library")
    (package / "without_kernels.txt").write_text("DASH_ATTN_SKIP_CUDA=1 was set\n")
    found = run(package.parent, "-c", IMPORT)
    assert "RuntimeWarning" in found.stderr and "cannot be loaded" in found.stderr
