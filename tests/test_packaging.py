"""What users get: the source distribution, the wheel built from it, and what both state about themselves."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import build_wheel
import check_frameworks
import prepare
import pytest
import toolchain
import write_stub

import dash_attn
from dash_attn import _schedule, ops

ROOT = pathlib.Path(__file__).parents[1]
# The files of the repository that only its own workflow reads.
NOT_SHIPPED = {".github/ISSUE_TEMPLATE/bug.md", ".gitignore", ".clang-format", ".ci/run"}
BUILD_SDIST = "import setuptools.build_meta as backend, sys; backend.build_sdist(sys.argv[1])"
DESCRIBE = """
import dash_attn, dash_attn.schedule, importlib.metadata, json
metadata = importlib.metadata.metadata("dash-attn")
print(json.dumps({"file": dash_attn.__file__, "version": dash_attn.__version__, "policies": dash_attn.schedule.POLICIES,
                  "metadata": {name: metadata.get_all(name) for name in set(metadata)}}))
"""


def tracked_files() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no git checkout, so there is no list of the project's files to compare with")
    return [name for name in run.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> pathlib.Path:
    """The source distribution, made from a copy of the files that git knows or would add."""
    folder = tmp_path_factory.mktemp("sdist")
    for name in tracked_files():
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "source" / name)
    if not (folder / "source" / "dash_attn").is_dir():
        pytest.skip("the package's sources are not beside these tests, which run against an installed package")
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_HOME"}
    run = subprocess.run(
        [sys.executable, "-c", BUILD_SDIST, str(folder)],
        cwd=folder / "source",
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return next(folder.glob("dash_attn-*.tar.gz"))


def test_sdist_holds_every_file_of_the_project(sdist):
    with tarfile.open(sdist) as archive:
        held = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert not set(tracked_files()) - NOT_SHIPPED - held
    generated = {name for name in held - set(tracked_files()) if ".egg-info/" not in name}
    assert generated == {"PKG-INFO", "setup.cfg"}


@pytest.mark.slow
def test_package_from_the_sdist_works_without_nvcc(sdist, tmp_path):
    environment = {**os.environ, "DASH_ATTN_SKIP_CUDA": "1"}
    pip = [sys.executable, "-m", "pip", "install", "-v", "--no-deps", "--no-build-isolation", "--no-index"]
    run = subprocess.run([*pip, "--target", str(tmp_path), str(sdist)], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "building WITHOUT the CUDA ops: DASH_ATTN_SKIP_CUDA=1 was set" in run.stdout + run.stderr
    package = tmp_path / "dash_attn"
    assert list(package.glob("_schedule*.so")) and not list(package.glob("_C*"))
    assert bool(list(package.glob("_autograd*.so"))) == (ROOT / "csrc" / "bindings" / "autograd.cpp").is_file()
    assert (package / "py.typed").is_file()

    environment["PYTHONPATH"] = str(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", DESCRIBE], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    described = json.loads(run.stdout)
    metadata = described["metadata"]
    assert pathlib.Path(described["file"]).parent == package and described["policies"]
    assert metadata["Version"] == [described["version"]]
    assert metadata["License-Expression"] == ["BSD-3-Clause"] and metadata["Author"] == ["dash_attn contributors"]
    assert f"torch>={toolchain.OLDEST_TORCH}" in metadata["Requires-Dist"]
    licenses = next(tmp_path.glob("dash_attn-*.dist-info")) / "licenses"
    assert (licenses / "LICENSE").is_file() and (licenses / "third_party" / "LICENSES" / "pybind11.txt").is_file()


def test_documents_promise_the_versions_that_the_build_accepts():
    text = "".join((ROOT / name).read_text() for name in ("README.md", "docs/install.md", "third_party/README.md"))
    torch = re.findall(r"\btorch (\d+\.\d+) or newer", text)
    assert torch and set(torch) == {toolchain.OLDEST_TORCH}


def test_flags_are_known_for_every_binding():
    """tools/check_torch_headers.py compiles them with these flags."""
    bindings = ROOT / "csrc" / "bindings"
    if not bindings.is_dir():
        pytest.skip("csrc/ is not beside the tests")
    assert {path.name for path in bindings.glob("*.cpp")} == set(toolchain.BINDINGS)


def test_types_of_the_compiled_module_are_its_own():
    """pybind11 before 3.1 words signatures otherwise."""
    pytest.importorskip("pybind11", minversion="3.1")
    stub = pathlib.Path(dash_attn.__file__).parent / "_schedule.pyi"
    assert stub.read_text() == write_stub.stub(_schedule), "python tools/write_stub.py writes it anew"


def test_groups_of_requirements():
    wanted, alone = prepare.requirements(["test", "test-frameworks"])
    assert {"pytest", "ninja"} <= set(wanted)
    pinned = [name for name in wanted + alone if name.startswith(("transformers", "megatron-core", "ring-flash-attn"))]
    assert len(pinned) == 3 and all("==" in name for name in pinned)
    assert "ring-flash-attn" in "".join(alone), "its requirements would take other packages along"
    assert not [name for name in wanted + alone if re.match(r"torch([=<>].*)?$", name)], "no group replaces torch"
    with pytest.raises(SystemExit, match="no dependency group tests, it has demo, test, test-frameworks,"):
        prepare.requirements(["tests"])


def test_the_environment_of_the_checkout_has_the_package(monkeypatch, tmp_path):
    """Installed in editable mode and without its requirements, and found from another folder; a failure ends make."""
    commands, statuses = [], [0, 0]

    def record(command, cwd=None):
        commands.append((command, cwd))
        return subprocess.CompletedProcess(command, statuses[len(commands) - 1])

    monkeypatch.setattr(prepare.subprocess, "run", record)
    prepare.install_checkout(tmp_path / "python")
    (install, _), (found, folder) = commands
    assert install[:4] == [str(tmp_path / "python"), "-m", "pip", "--disable-pip-version-check"]
    assert {"--no-build-isolation", "--no-deps"} < set(install) and install[-2:] == ["--editable", str(ROOT)]
    assert found[1:] == ["-c", "import dash_attn"] and not (pathlib.Path(folder) / "dash_attn").exists()
    for number in (0, 1):
        commands, statuses = [], [int(place == number) for place in range(2)]
        with pytest.raises(SystemExit, match="^1$"):
            prepare.install_checkout(tmp_path / "python")


@pytest.fixture
def wheel(tmp_path) -> pathlib.Path:
    """A wheel as pip makes it, with kernels of CUDA 12."""
    pytest.importorskip("wheel")
    info, package = tmp_path / "made" / "dash_attn-0.1.0.dist-info", tmp_path / "made" / "dash_attn"
    for folder in (info, package, tmp_path / "work"):
        folder.mkdir(parents=True)
    record = b"..dash_attn build record\narchitecture sm_90a\nnvcc 12.9.86\n"
    for name in ("_C.abi3.so", "_autograd.abi3.so", "_schedule.cpython-311-x86_64-linux-gnu.so"):
        (package / name).write_bytes(record if name.startswith("_C") else b"own")
    metadata = "Metadata-Version: 2.4\nName: dash-attn\nVersion: 0.1.0\nRequires-Dist: torch>=2.11\n"
    (info / "METADATA").write_text(metadata)
    tags = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: false\nTag: cp311-cp311-linux_x86_64\n"
    (info / "WHEEL").write_text(tags)
    (info / "RECORD").touch()
    pack = [sys.executable, "-m", "wheel", "pack", str(tmp_path / "made"), "--dest-dir", str(tmp_path)]
    subprocess.run(pack, check=True)
    return next(tmp_path.glob("*.whl"))


def test_a_wheel_for_other_machines_asks_for_its_torch(wheel, tmp_path):
    """What tools/build_wheel.py makes of the metadata; auditwheel's part is tried by CI."""
    bound = build_wheel.bind(wheel, tmp_path / "work", ["2.13.1+cu129"])
    assert bound.name == "dash_attn-0.1.0+cu12.torch2.13-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(bound) as archive:
        metadata = archive.read("dash_attn-0.1.0+cu12.torch2.13.dist-info/METADATA").decode()
    assert "\nRequires-Dist: torch==2.13.*\n" in metadata and "\nVersion: 0.1.0+cu12.torch2.13\n" in metadata


def test_a_wheel_for_every_python_and_torch_has_their_libraries(wheel, tmp_path):
    names = ["_autograd_torch2.9.so", "_autograd_torch2.10.so"]
    names += [f"_schedule.cpython-{python}-x86_64-linux-gnu.so" for python in ("310", "311")]
    for name in names:
        (tmp_path / name).write_text(name)
    bindings = [tmp_path / name for name in names]
    bound = build_wheel.bind(wheel, tmp_path / "work", ["2.10.0", "2.9.1"], bindings)
    assert bound.name == "dash_attn-0.1.0+cu12-cp310.cp311-none-linux_x86_64.whl"
    with zipfile.ZipFile(bound) as archive:
        held = [name.removeprefix("dash_attn/") for name in archive.namelist() if name.startswith("dash_attn/")]
        assert sorted(held) == sorted(["_C.abi3.so", *names])
        metadata = archive.read("dash_attn-0.1.0+cu12.dist-info/METADATA").decode()
    assert "\nRequires-Dist: torch>=2.9,<2.11\n" in metadata and "\nVersion: 0.1.0+cu12\n" in metadata
    with pytest.raises(SystemExit, match="--torch must name consecutive minor versions, got 2.9.1 2.11.0"):
        build_wheel.requirement(["2.9.1", "2.11.0"])


@pytest.mark.parametrize("version, stem, absent", [
    ("2.12.1+cu130", "_autograd_torch2.12", None),
    ("2.15.0a0", "_autograd_torch2.15", "this wheel of dash_attn is for torch 2.9, 2.12, and this is 2.15.0a0"),
])  # fmt: skip
def test_the_library_of_this_torch_is_taken(monkeypatch, tmp_path, version, stem, absent):
    monkeypatch.setattr(ops.torch, "__version__", version)
    assert ops._autograd_of_torch(tmp_path)[0] == "_autograd"
    for release in ("2.12", "2.9"):
        (tmp_path / f"_autograd_torch{release}.so").write_text("no library")
    found = ops._autograd_of_torch(tmp_path)
    assert found[0] == stem
    reason = ops.why_not_loaded(*found, tmp_path)
    if absent is None:
        assert reason.startswith(f"{tmp_path / stem}.so cannot be loaded")
    else:
        assert reason == f"{absent} (no {stem}*.so in {tmp_path})"


def test_a_wheel_leaves_the_other_files_of_its_folder(monkeypatch, tmp_path):
    """Those of the same name are replaced."""

    def made(*command, **_):
        words = [str(word) for word in command]
        if "--wheel-dir" in words:
            folder = pathlib.Path(words[words.index("--wheel-dir") + 1])
            folder.mkdir(exist_ok=True)
            (folder / "dash_attn-1.whl").write_text("new")
        elif "-c" in words:
            (pathlib.Path(words[-1]) / "dash_attn-1.tar.gz").write_text("new")

    dest = tmp_path / "mine"
    (dest / "folder").mkdir(parents=True)
    for name in ("notes.txt", "dash_attn-0.whl", "dash_attn-1.whl"):
        (dest / name).write_text("old")
    monkeypatch.setattr(build_wheel, "ROOT", tmp_path / "checkout")
    monkeypatch.setattr(build_wheel, "run", made)
    monkeypatch.setattr(build_wheel, "bind", lambda wheel, folder, torches, compiled: wheel)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setattr(sys, "argv", ["build_wheel.py", "--dest", str(dest)])
    assert build_wheel.main() == 0
    found = {path.name: path.is_dir() or path.read_text() for path in dest.iterdir()}
    assert found == {
        "notes.txt": "old", "folder": True, "dash_attn-0.whl": "old", "dash_attn-1.whl": "new",
        "dash_attn-1.tar.gz": "new",
    }  # fmt: skip


@pytest.mark.parametrize("answers, status", [(True, 1), (False, os.EX_TEMPFAIL)])
def test_ci_fails_without_the_frameworks_that_the_index_has(monkeypatch, capsys, answers, status):
    """Those of the group and of its companion, in the versions that are asked for."""
    wanted, alone = (prepare.requirements([check_frameworks.GROUP])[i] for i in range(2))
    there = dict(requirement.partition("==")[::2] for requirement in wanted + alone)
    monkeypatch.setattr(check_frameworks, "installed_version", lambda name: there.get(name))
    monkeypatch.setattr(check_frameworks, "index_answers", lambda: answers)
    assert check_frameworks.main() == 0
    there["transformers"], pinned = "5.0.0", there.pop("litgpt")
    assert check_frameworks.main() == status
    said = capsys.readouterr().out
    assert f"litgpt=={pinned} (not installed)" in said and "(5.0.0 is installed)" in said
    assert "tools/check_frameworks.py" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("status", [0, 1, 2, os.EX_TEMPFAIL])
def test_ci_says_what_it_has_skipped(tmp_path, status):
    """Only the status of an index that does not answer is a skip: 2 is also that of a script that is not there."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "dash_attn").mkdir()
    (tmp_path / "dash_attn" / "_C.abi3.so").touch()
    programs = {"make": "exit 0", ".venv/bin/python": f"case $1 in *wheel*) exit {status};; esac"}
    for name, text in programs.items():
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run([tmp_path / ".ci" / "run"], env={"PATH": path}, capture_output=True, text=True)
    skip = status == os.EX_TEMPFAIL
    assert done.returncode == (0 if skip else status)
    last = "SKIPPED: .venv/bin/python tools/try_wheel.py dist/dash_attn-*.whl (the package index did not answer)\n"
    assert done.stdout == (last if skip else "")
