"""dash_attn under the names of flash_attn: what is found, when it steps back, and how other processes get it."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from alias_support import (
    PACKAGE,
    START_FILE,
    VARIABLE,
    WAYS,
    check_program,
    environment_with_start_file,
    python,
)
from interface_support import assert_same_bits, qkv_tensors

import dash_attn
from dash_attn import run
from dash_attn.compat import flash_attn_2, flash_attn_2_cuda

ROOTS = ("flash_attn", "flash_attn_2_cuda", "flash_attn_interface", "flash_attn_3")
FINDERS = "[f for f in sys.meta_path if hasattr(f, 'finds_dash_attn_as_flash_attn')]"


@pytest.fixture(scope="module")
def started_python(tmp_path_factory):
    return environment_with_start_file(tmp_path_factory.mktemp("venv"))


@pytest.fixture
def installed(tmp_path):
    """A folder that holds a flash_attn of somebody else's."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("__version__ = '2.7.4'\nmarker = 'theirs'\n")
    (tmp_path / "flash_attn-2.7.4.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.7.4\n"
    (tmp_path / "flash_attn-2.7.4.dist-info" / "METADATA").write_text(metadata)
    return tmp_path


NAMES = """
import dash_attn.as_flash_attn
import dash_attn, importlib.metadata as metadata, importlib.util, json, sys
from dash_attn.compat import bert_padding, flash_attn_2, flash_attn_2_cuda, flash_attn_3 as compat_3
import flash_attn, flash_attn.bert_padding, flash_attn.flash_attn_interface, flash_attn_2_cuda as cuda
import flash_attn_3.flash_attn_interface, flash_attn_interface

public = [*flash_attn_2.__all__]
private = [n for n in vars(flash_attn_2) if n.startswith(("_flash_attn_", "_wrapped_flash_attn_"))]
assert len(public) == 7 and len(private) == 8
assert all(getattr(flash_attn, n) is getattr(flash_attn_2, n) for n in public)
assert not any(hasattr(flash_attn, n) for n in private)
assert all(getattr(flash_attn.flash_attn_interface, n) is getattr(flash_attn_2, n) for n in public + private)
assert flash_attn.flash_attn_interface.flash_attn_gpu is cuda
assert all(getattr(cuda, n) is getattr(flash_attn_2_cuda, n) for n in ("fwd", "varlen_fwd", "bwd", "varlen_bwd"))
assert all(getattr(flash_attn.bert_padding, n) is getattr(bert_padding, n) for n in bert_padding.__all__)
for module in (flash_attn_interface, flash_attn_3.flash_attn_interface):
    for n in (*compat_3.__all__, "_flash_attn_forward", "_flash_attn_backward"):
        assert getattr(module, n) is getattr(compat_3, n), n
for n in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_interface", "flash_attn_3", "flash_attn_2_cuda"):
    assert sys.modules[n].__dash_attn__ == dash_attn.__version__
for n in ("ops.triton", "layers.rotary", "losses", "modules.mha", "cute"):
    try:
        __import__(f"flash_attn.{n}")
    except ModuleNotFoundError as error:
        module = f"flash_attn.{n.partition('.')[0]}"
        covered = "flash_attn, flash_attn.flash_attn_interface, flash_attn.bert_padding"
        assert error.name == module and str(error) == (
            f"No module named {module!r}: flash_attn is dash_attn {dash_attn.__version__} in this process, which "
            f"covers only {covered}"
        )
    else:
        raise AssertionError(n)
# Whoever only looks for a module is told that it is not there.
assert not any(map(importlib.util.find_spec, ("flash_attn.ops", "flash_attn.cute", "flash_attn_3._C")))
packages = metadata.packages_distributions()
print(json.dumps({
    "versions": [flash_attn.__version__, flash_attn_3.__version__],
    "metadata": [metadata.version("flash-attn"), metadata.version("flash_attn_3")],
    "packages": [packages[n] for n in ("flash_attn", "flash_attn_2_cuda", "flash_attn_interface", "flash_attn_3")],
    "in folders": [d.name for d in metadata.distributions(path=sys.path) if d.name.startswith("flash")],
}))
"""


def test_names_versions_and_distributions():
    stdout, stderr = python("-W", "error", "-c", NAMES)
    versions = [f"{release}+dash.{dash_attn.__version__}" for release in ("2.8.0", "3.0.0")]
    assert json.loads(stdout) == {
        "versions": versions,
        "metadata": versions,
        "packages": [["flash-attn"]] * 2 + [["flash-attn-3"]] * 2,
        # pip and others that look into folders see nothing.
        "in folders": [],
    }
    version = dash_attn.__version__
    assert stderr == [f"flash_attn is dash_attn {version} in this process, under the version {versions[0]}"]


@pytest.mark.slow
def test_an_installed_flash_attn_wins_unless_forced(installed):
    code = """
import dash_attn.aliases as aliases
try:
    aliases.activate()
except RuntimeError as error:
    print(error)
import flash_attn
assert flash_attn.marker == "theirs" and not aliases.active()
try:
    aliases.activate(force=True)
except RuntimeError as error:
    print(error)
"""
    stdout, _ = python("-c", code, paths=[installed])
    place = installed / "flash_attn" / "__init__.py"
    refused, late = stdout.splitlines()
    assert refused.startswith(f"dash_attn replaces flash_attn, which is installed in {place}, only if forced")
    assert late == "dash_attn cannot replace flash_attn, which is already imported: activate dash_attn first"

    code = """
import dash_attn.aliases as aliases
aliases.activate(force=True)
import flash_attn, importlib.metadata as metadata
print(flash_attn.__version__, metadata.version("flash-attn"), hasattr(flash_attn, "marker"))
"""
    stdout, _ = python("-c", code, paths=[installed])
    assert stdout.split() == [f"2.8.0+dash.{dash_attn.__version__}"] * 2 + ["False"]


@pytest.mark.slow
def test_activating_again_after_force_changes_nothing(installed):
    again = "aliases.activate(); import flash_attn; print(flash_attn.__dash_attn__)"
    stdout, _ = python("-c", f"import dash_attn.aliases as aliases; aliases.activate(force=True); {again}",
                       paths=[installed])  # fmt: skip
    assert stdout.split() == [dash_attn.__version__]


@pytest.mark.slow
def test_the_interface_is_an_attribute_of_the_package():
    code = "import dash_attn.as_flash_attn, flash_attn; print(flash_attn.flash_attn_interface.__name__)"
    stdout, stderr = python("-c", code)
    assert stdout.split() == ["flash_attn.flash_attn_interface"]
    assert [line.split()[0] for line in stderr] == ["flash_attn"]


def test_start_of_python(started_python):
    def start(code, **environment):
        return python("-c", f"import sys; print({code})", executable=started_python, **environment)

    # Nothing is imported where the variable is unset, and torch is not where it is set.
    for environment in ({}, {VARIABLE: ""}, {VARIABLE: "0"}):
        assert start(FINDERS, **environment) == ("[]\n", [])
        modules, _ = start("'importlib.util' in sys.modules, 'importlib.metadata' in sys.modules", **environment)
        assert modules == "False False\n"
    stdout, stderr = start(f"{FINDERS}, 'torch' in sys.modules", **{VARIABLE: "1"})
    assert "_Finder" in stdout and stdout.endswith(" False\n") and not stderr
    assert start(FINDERS, **{VARIABLE: "yes"}) == (
        "[]\n", [f"{VARIABLE} must be 0, 1 or force, got 'yes': the value is ignored"],
    )  # fmt: skip


def test_start_of_python_without_the_package(tmp_path):
    """The file may outlive the package, and must not break Python."""
    executable = environment_with_start_file(tmp_path, paths=[])
    done = subprocess.run(
        [executable, "-I", "-c", f"import sys; print({FINDERS})"],
        env={**os.environ, VARIABLE: "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@pytest.mark.slow
def test_environment_leaves_an_installed_flash_attn(started_python, installed):
    code = "import importlib.metadata as m, flash_attn; print(flash_attn.__version__, m.version('flash-attn'))"
    stdout, stderr = python("-c", code, executable=started_python, paths=[installed], **{VARIABLE: "1"})
    assert stdout.split() == ["2.7.4", "2.7.4"]
    (line,) = stderr
    assert line.startswith("dash_attn replaces flash_attn, which is installed in") and "=force" in line
    # The other release's names are not there, so they are given.
    code = "import flash_attn_interface, flash_attn; print(flash_attn_interface.__dash_attn__, flash_attn.marker)"
    stdout, _ = python("-c", code, executable=started_python, paths=[installed], **{VARIABLE: "1"})
    assert stdout.split() == [dash_attn.__version__, "theirs"]
    code = "import flash_attn; print(flash_attn.__version__)"
    stdout, _ = python("-c", code, executable=started_python, paths=[installed], **{VARIABLE: "force"})
    assert stdout.split() == [f"2.8.0+dash.{dash_attn.__version__}"]


WORKERS = """
import multiprocessing, subprocess, sys

def version(_):
    import flash_attn
    return flash_attn.__version__

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.map(version, [0])
    code = "import flash_attn; print(flash_attn.__version__)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found.append(other.stdout.strip())
    print(found, sys.argv[1:])
"""


@pytest.mark.slow
def test_processes_that_a_program_starts(started_python, tmp_path):
    (tmp_path / "program.py").write_text(WORKERS)
    arguments = ("-m", "dash_attn.run", tmp_path / "program.py", "--flag", "3")
    stdout, stderr = python(*arguments, executable=started_python)
    assert not any(START_FILE in line for line in stderr)
    assert stdout.strip() == f"{[f'2.8.0+dash.{dash_attn.__version__}'] * 2} ['--flag', '3']"


PROGRAM = """
import json, os, sys, flash_attn, beside
print(json.dumps([__name__, sys.argv, sys.path[0], beside.__file__, flash_attn.__version__, os.environ[{VARIABLE!r}]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("force", (False, True))
def test_run(force, installed):
    folder = installed / "programs"
    folder.mkdir()
    (folder / "program.py").write_text(PROGRAM.replace("{VARIABLE!r}", repr(VARIABLE)))
    (folder / "beside.py").write_text("")
    version, value = f"2.8.0+dash.{dash_attn.__version__}", "force" if force else "1"
    options, paths = (["--force"], [installed]) if force else ([], [])
    found = json.loads(python("-m", "dash_attn.run", *options, folder / "program.py", "a", "-m", paths=paths)[0])
    program = str(folder / "program.py")
    assert found == ["__main__", [program, "a", "-m"], str(folder), str(folder / "beside.py"), version, value]
    found = json.loads(python("-m", "dash_attn.run", *options, "-m", "program", "--force", paths=[*paths, folder])[0])
    assert found[:2] == ["__main__", [program, "--force"]] and found[4:] == [version, value]


def test_run_keeps_an_inherited_force(installed):
    code = f"import os, flash_attn; print(flash_attn.__version__, os.environ[{VARIABLE!r}])"
    (installed / "program.py").write_text(code)
    arguments = ("-m", "dash_attn.run", installed / "program.py")
    stdout, _ = python(*arguments, paths=[installed], **{VARIABLE: "force"})
    assert stdout.split() == [f"2.8.0+dash.{dash_attn.__version__}", "force"]


@pytest.mark.slow
def test_names_that_workers_would_lack_are_said(started_python, tmp_path):
    (tmp_path / "program.py").write_text("")
    (started,) = started_python.parents[1].glob(f"lib/python*/site-packages/{START_FILE}")
    kept = started.read_text()
    started.unlink()
    try:
        _, stderr = python("-m", "dash_attn.run", tmp_path / "program.py", executable=started_python)
        facts, _ = python("-m", "dash_attn.info", executable=started_python)
    finally:
        started.write_text(kept)
    (line,) = stderr
    assert line.startswith(
        f"dash_attn.run: child processes of the program do not get the names: {START_FILE} is not in"
    )
    assert str(started.parent) in line
    assert f"no: {START_FILE} is not in {started.parent}" in facts
    facts, _ = python("-m", "dash_attn.info", executable=started_python)
    assert START_FILE not in facts and f"by {VARIABLE}" in facts


@pytest.mark.parametrize("arguments, why", [
    ([], "expected a script or -m module, got no arguments"), (["-m"], "expected a script or -m module, got -m"),
    (["--unknown", "x.py"], "expected a script or -m module, got --unknown x.py"),
    (["missing.py"], "the script must be a file, got missing.py"),
])  # fmt: skip
def test_run_says_how_to_use_it(arguments, why, capsys):
    with pytest.raises(SystemExit) as error:
        run.main(arguments)
    usage, reason = capsys.readouterr().err.splitlines()
    assert error.value.code == 2 and reason == f"dash_attn.run: {why}"
    assert usage == "usage: python -m dash_attn.run [--force] {script.py | -m module} [arguments ...]"


def test_run_refuses(installed):
    refused = subprocess.run(
        [sys.executable, "-m", "dash_attn.run", __file__], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(installed), str(PACKAGE.parent)))},
    )  # fmt: skip
    assert refused.returncode == 1
    assert refused.stderr.startswith("dash_attn.run: dash_attn replaces flash_attn, which is installed")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_program_that_computes(way, started_python):
    check_program(way, "cpu", started_python)


@pytest.mark.slow
def test_example():
    example = pathlib.Path(__file__).parents[1] / "examples" / "flash_attn_names.py"
    stdout, _ = python("-m", "dash_attn.run", example)
    assert stdout.splitlines()[-1] == "the gradients of three runs have the same bits"


@pytest.mark.slow
def test_under_torchrun(tmp_path):
    program = "import os, flash_attn; print(os.environ['RANK'], flash_attn.__dash_attn__, flush=True)"
    (tmp_path / "program.py").write_text(program)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    stdout, _ = python(*torchrun, "-m", "dash_attn.run", tmp_path / "program.py")
    assert sorted(stdout.splitlines()) == [f"{rank} {dash_attn.__version__}" for rank in range(2)]


def test_frameworks_that_were_imported_before_are_named():
    code = "import sys, types; sys.modules['xformers'] = types.ModuleType('xformers'); import dash_attn.as_flash_attn"
    _, stderr = python("-c", code)
    assert any("xformers may already have looked for flash_attn: activate dash_attn first" in line for line in stderr)


def test_functions_of_the_extension_module():
    """The arguments as xformers passes them, by position."""
    q, k, v, dout = (x.detach() for x in qkv_tensors(20, 30))
    tail = (0.0, 0.2, True, 8, 0, 0.0)
    found = flash_attn_2_cuda.fwd(q, k, v, None, None, *tail, False, None)
    expected = flash_attn_2._flash_attn_forward(q, k, v, *tail, None, False)
    assert_same_bits(found, expected)
    out, lse, _, rng_state = found
    *gradients, softmax_d = flash_attn_2_cuda.bwd(
        dout, q, k, v, out, lse, None, None, None, None, *tail, False, None, rng_state
    )  # fmt: skip
    given = [torch.empty_like(x) for x in (q, k, v)]
    d = flash_attn_2._flash_attn_backward(dout, q, k, v, out, lse, *given, *tail, None, False)
    assert_same_bits([*gradients, softmax_d], [*given, d])
    with pytest.raises(TypeError, match="^q must be a torch.Tensor, got None"):
        flash_attn_2_cuda.bwd(dout, None, k, v, out, lse, None, None, None, None, *tail, False, None, rng_state)

    q, k, v, dout = (x.flatten(0, 1) for x in (q, k, v, dout))
    offsets = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (20, 30)]
    found = flash_attn_2_cuda.varlen_fwd(
        q, k, v, None, *offsets, None, None, None, None, 20, 30, 0.0, 0.2, False, *tail[2:], False, None
    )  # fmt: skip
    assert_same_bits([found[0].unflatten(0, (2, 20))], [out])
    again = flash_attn_2_cuda.varlen_bwd(
        dout, q, k, v, found[0], found[1], None, None, None, *offsets, None, 20, 30, 0.0, 0.2, False, *tail[2:], False,
        None, found[3],
    )  # fmt: skip
    assert_same_bits([dx.unflatten(0, (2, -1)) for dx in again[:3]], gradients)
    with pytest.raises(NotImplementedError, match=r"gen must be None \(this function has no dropout; "):
        flash_attn_2_cuda.fwd(q, k, v, None, None, *tail, False, torch.Generator())


SELECTIVE = """
import dash_attn.as_flash_attn
import json, torch
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.flash_attn_interface import _flash_attn_forward
from kernel_counts import kernels_in
from torch.utils import checkpoint

def policy(context, op, *args, **kwargs):
    saved = {rule}
    names.add(op.name())
    return checkpoint.CheckpointPolicy.MUST_SAVE if saved else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

names = set()
x = torch.randn(1, 9, 2, 16).bfloat16().requires_grad_()
offsets = torch.tensor([0, 4, 9], dtype=torch.int32)

def layers():
    for of_layer in (
        lambda x: flash_attn_func(x, x, x, causal=True),
        lambda x: flash_attn_varlen_func(x[0], x[0], x[0], offsets, offsets, 9, 9),
    ):
        context = lambda: checkpoint.create_selective_checkpoint_contexts(policy)
        checkpoint.checkpoint(of_layer, x, use_reentrant=False, context_fn=context).sum().backward()

calls = kernels_in(layers)[1]
compiled = torch.compile(lambda x: flash_attn_func(x, x, x), backend="aot_eager", fullgraph=True)
assert torch.equal(compiled(x), flash_attn_func(x, x, x))
print(json.dumps([calls, sorted(name for name in names if "attn" in name)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("rule, runs", [
    ("'flash_attn' in op.name()", 2), ("op.namespace == 'flash_attn'", 2), ("'flash_attn' in str(op)", 2), ("False", 4),
])  # fmt: skip
def test_selective_checkpointing_finds_the_forward(rule, runs):
    """As the policies of axolotl and prime-rl look for FlashAttention's op, whose forward then runs once."""
    stdout, _ = python("-c", SELECTIVE.replace("{rule}", rule), paths=[pathlib.Path(__file__).parent])
    assert json.loads(stdout) == [[runs, 2], ["flash_attn::_dash_attn_forward"]]
