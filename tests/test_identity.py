"""What each compiled library states about its origin, and what happens where libraries do not belong together."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import identity
import pytest

import dash_attn
from dash_attn import build_record, info, ops

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = pathlib.Path(dash_attn.__file__).parent
TEXT = b"...dash_attn identity\nversion 0.2.0\ncommit unknown\nsources %s\ntorch 2.13.0\nend\n\0..."


def git(folder: pathlib.Path, *words: str) -> str:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *settings, *words], cwd=folder, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def sources(monkeypatch, tmp_path) -> pathlib.Path:
    """Sources as the build reads them, without a history."""
    monkeypatch.delenv("DASH_ATTN_COMMIT", raising=False)
    root = tmp_path / "outer" / "dash_attn_source"
    (root / "csrc" / "launch").mkdir(parents=True)
    (root / "csrc" / "launch" / "a.h").write_text("int a;\n")
    (root / "dash_attn").mkdir()
    shutil.copy(PACKAGE / "build_record.py", root / "dash_attn")
    (root / "dash_attn" / "__init__.py").write_text('import nothing\n__version__ = "1.2.3"\n')
    return root


def stated(root: pathlib.Path, tmp_path: pathlib.Path) -> build_record.Identity:
    """What a library that was linked with identity.cpp says."""
    source = identity.write(root, tmp_path / "generated", "2.13.0+cpu")
    library = tmp_path / "_library.so"
    subprocess.run([os.environ.get("CXX", "c++"), "-O2", "-shared", "-fPIC", source, "-o", library], check=True)
    found = build_record.identity(library)
    assert found is not None
    return found


def test_a_library_states_its_origin(sources, tmp_path):
    found = stated(sources, tmp_path)
    expected = build_record.source_hash(sources / "csrc")
    assert found == build_record.Identity("1.2.3", "unknown", expected, "2.13.0+cpu")


def test_the_commit_is_that_of_the_checkout(monkeypatch, sources):
    """A changed file is told; a repository around the sources is not theirs."""
    git(sources.parent, "init", "-q")
    git(sources.parent, "add", ".")
    git(sources.parent, "commit", "-q", "-m", "outer")
    assert identity.commit(sources) == "unknown"
    git(sources, "init", "-q")
    git(sources, "add", ".")
    git(sources, "commit", "-q", "-m", "inner")
    git(sources, "tag", "v1.2.3")
    commit = git(sources, "rev-parse", "HEAD").strip()
    assert identity.commit(sources) == commit[:12]
    (sources / "csrc" / "launch" / "a.h").write_text("int b;\n")
    assert identity.commit(sources) == f"{commit[:12]}-dirty"
    monkeypatch.setenv("DASH_ATTN_COMMIT", "0123abcd")
    assert identity.commit(sources) == "0123abcd"


def test_the_hash_sees_every_name_and_every_byte(sources):
    hashes = [build_record.source_hash(sources / "csrc")]
    header = sources / "csrc" / "launch" / "a.h"
    header.write_text("int b;\n")
    hashes.append(build_record.source_hash(sources / "csrc"))
    header.rename(header.with_name("b.h"))
    hashes.append(build_record.source_hash(sources / "csrc"))
    header.with_name("empty.def").touch()
    hashes.append(build_record.source_hash(sources / "csrc"))
    assert len(set(hashes)) == 4
    header.with_name("empty.def").unlink()
    assert build_record.source_hash(sources / "csrc") == hashes[2]


def wrong_tags(folder: pathlib.Path, version: str) -> list[str]:
    tags = git(folder, "tag", "--points-at", "HEAD").split()
    return [tag for tag in tags if re.match(r"v\d", tag) and tag != f"v{version}"]


def test_a_tagged_commit_has_the_version_of_its_tag():
    if not (ROOT / ".git").exists():
        pytest.skip("these tests are not in a checkout")
    assert wrong_tags(ROOT, dash_attn.__version__) == []


def test_a_wrong_tag_is_found(sources):
    git(sources, "init", "-q")
    git(sources, "add", ".")
    git(sources, "commit", "-q", "-m", "inner")
    for tag in ("v1.2.3", "v1.2.4", "other"):
        git(sources, "tag", tag)
    assert wrong_tags(sources, "1.2.3") == ["v1.2.4"]


def test_this_installation_is_of_one_build():
    facts = info.report()
    libraries = facts["build"]["libraries"]
    assert {name.split(".")[0] for name in libraries} >= {"_autograd", "_schedule"} and None not in libraries.values()
    assert {found["version"] for found in libraries.values()} == {dash_attn.__version__}
    assert not [problem for problem in facts["build"]["problems"] if "different sources" in problem]
    assert facts["dash_attn"]["bits_version"] == dash_attn.__bits_version__
    assert re.fullmatch("[0-9a-f]{16}", facts["build"]["python_sources"])


@pytest.fixture
def folder(monkeypatch, tmp_path) -> pathlib.Path:
    """A package whose libraries are nothing but what they state."""
    package = tmp_path / "site" / "dash_attn"
    package.mkdir(parents=True)
    for name in ("_C", "_autograd", "_schedule"):
        (package / f"{name}.abi3.so").write_bytes(TEXT % b"0123456789abcdef")
    monkeypatch.setattr(build_record, "FOLDER", package)
    monkeypatch.setattr(build_record.libraries, "__defaults__", (package,))
    monkeypatch.setattr(dash_attn, "__version__", "0.2.0")
    return package


def test_info_tells_of_libraries_that_do_not_belong_together(folder):
    assert info._build()["problems"] == []
    (folder / "_C.abi3.so").write_bytes(TEXT % b"fedcba9876543210")
    different = (
        f"the libraries in {folder} were built from different sources, _C.abi3.so from fedcba9876543210, "
        "_autograd.abi3.so from 0123456789abcdef, _schedule.abi3.so from 0123456789abcdef: install dash_attn again"
    )
    assert info._build()["problems"] == [different]
    (folder / "_C.abi3.so").write_bytes((TEXT % b"0123456789abcdef").replace(b"0.2.0", b"0.1.9"))
    assert info._build()["problems"] == ["_C.abi3.so is of dash_attn 0.1.9: install dash_attn again"]
    (folder / "_C.abi3.so").write_bytes(b"older")
    problems = info._build()["problems"]
    assert "_C.abi3.so from unknown" in problems[0]
    for name in ("_autograd", "_schedule"):
        (folder / f"{name}.abi3.so").write_bytes(b"older")
    assert f"the libraries in {folder} do not state their sources: install dash_attn again" in info._build()["problems"]
    assert problems[1:] == ["_C.abi3.so does not state what it was built from: install dash_attn again"]


def test_info_tells_of_sources_that_have_changed_since_the_build(folder):
    csrc = folder.parent / "csrc"
    csrc.mkdir()
    (csrc / "a.h").write_text("int a;\n")
    problems = info._build()["problems"]
    assert len(problems) == 3
    assert problems[0] == f"_C.abi3.so was built from other sources than those in {csrc}: install dash_attn again"


def test_kernels_of_other_sources_are_not_loaded(folder):
    """Before anything of them is registered."""
    (folder / "_C.abi3.so").write_bytes(TEXT % b"fedcba9876543210")
    reason = ops.why_not_loaded("_C", "absent", folder)
    assert reason is not None
    assert reason.startswith(f"{folder / '_C.abi3.so'} cannot be loaded: the libraries in {folder} were built from")


def test_ops_of_other_sources_end_the_import(tmp_path):
    package = tmp_path / "dash_attn"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("_C*", "__pycache__"))
    library = next(package.glob("_autograd*.so"))
    sources = build_record.identity(library).sources.encode()
    library.write_bytes(library.read_bytes().replace(b"sources " + sources, b"sources " + sources[::-1]))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", "import dash_attn"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert run.returncode != 0 and "ImportError" in run.stderr and "were built from different sources" in run.stderr


def test_info_prints_the_origin():
    facts = info.report()
    lines = info._text(facts).splitlines()
    first = next(iter(facts["build"]["libraries"]))
    found = facts["build"]["libraries"][first]
    assert f"{first}: sources {found['sources']}, commit {found['commit']}, torch {found['torch']}" in lines
    assert f"bits version {dash_attn.__bits_version__}, Python sources {facts['build']['python_sources']}" in lines
    facts["build"]["problems"] = ["they do not fit"]
    assert "PROBLEM: they do not fit" in info._text(facts)
    assert json.dumps(facts)
