"""What a type checker says of programs that call dash_attn."""

import ast
import inspect
import pathlib
import subprocess
import sys
import typing

import pytest

import dash_attn
from dash_attn import schedule

PACKAGE = pathlib.Path(dash_attn.__file__).parent
README = PACKAGE.parent / "README.md"
CALLS = """
import torch
import dash_attn
from dash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from dash_attn.compat import flash_attn_2

x = torch.zeros(1, 9, 2, 8)
offsets = torch.zeros(2)
chosen: dash_attn.Schedule = "shift"
reveal_type(flash_attn_func(x, x, x, schedule=chosen))
reveal_type(flash_attn_func(x, x, x, 0.0, None, True, return_attn_probs=False, learnable_sink=x))
reveal_type(flash_attn_func(x, x, x, causal=True, return_attn_probs=True))
reveal_type(flash_attn_varlen_func(x, x, x, offsets, offsets, 9, 9, seqused_k=offsets))
reveal_type(flash_attn_with_kvcache(x, x, x, cache_seqlens=3))
reveal_type(flash_attn_with_kvcache(x, x, x, return_softmax_lse=True))
reveal_type(flash_attn_2.flash_attn_func(x, x, x))
reveal_type(flash_attn_func(x, x, x, return_attn_probs=bool(x.sum())))
"""
_TENSOR = "torch._tensor.Tensor"
REVEALED = [
    _TENSOR, _TENSOR, f"tuple[{_TENSOR}, {_TENSOR}, {_TENSOR}]", _TENSOR, _TENSOR, f"tuple[{_TENSOR}, {_TENSOR}]",
    _TENSOR, f"{_TENSOR} | tuple[{_TENSOR}, {_TENSOR}, {_TENSOR}]",
]  # fmt: skip


@pytest.fixture(scope="module")
def mypy(tmp_path_factory):
    """A function: the lines that mypy prints of a program, without places, its exit status, and its stderr."""
    pytest.importorskip("mypy")
    folder = tmp_path_factory.mktemp("mypy")
    options = ["--no-error-summary", "--hide-error-codes", "--cache-dir", "cache", "--config-file", ""]

    def check(program):
        (folder / "program.py").write_text(program)
        done = subprocess.run(
            [sys.executable, "-m", "mypy", *options, "program.py"], cwd=folder, capture_output=True, text=True,
            env={"MYPYPATH": str(PACKAGE.parent), "PYTHONPATH": ":".join(sys.path)},
        )  # fmt: skip
        return [line.partition(": ")[2] for line in done.stdout.splitlines()], done.returncode, done.stderr

    return check


def test_mypy_accepts_the_first_example_of_the_readme(mypy):
    if not README.is_file():
        pytest.skip("README.md is not beside the package")
    example = README.read_text().partition("```python\n")[2].partition("```")[0]
    assert "out.sum().backward()" in example
    assert mypy(example) == ([], 0, "")


def test_mypy_knows_what_a_call_returns(mypy):
    lines, status, _ = mypy(CALLS)
    assert status == 0 and [line.partition('"')[2].rstrip('"') for line in lines] == REVEALED


def test_mypy_refuses_a_schedule_that_there_is_not(mypy):
    program = "import torch, dash_attn\nx = torch.zeros(1)\ndash_attn.flash_attn_func(x, x, x, schedule='fastest')\n"
    lines, status, _ = mypy(program)
    assert status == 1 and lines[0].startswith('error: No overload variant of "flash_attn_func" matches'), lines


def test_the_names_of_schedules():
    assert set(typing.get_args(dash_attn.Schedule)) == {"auto", *schedule.POLICIES}


STUB = ast.parse((PACKAGE / "__init__.pyi").read_text())


def keywords_of(name):
    """The fields of one of the stub's TypedDicts, with those of its bases."""
    (of_name,) = (node for node in STUB.body if isinstance(node, ast.ClassDef) and node.name == name)
    bases = [keywords_of(base.id) for base in of_name.bases if base.id != "TypedDict"]
    own = {field.target.id: ast.unparse(field.annotation) for field in of_name.body if isinstance(field, ast.AnnAssign)}
    return {name: annotation for fields in (*bases, own) for name, annotation in fields.items()}


def arguments_of(node):
    """[name, annotation, default] of the arguments in their place and by name of a function in the stub."""
    positional, given = node.args.args, node.args.defaults
    defaults = [None] * (len(positional) - len(given)) + [ast.unparse(default) for default in given]
    found = {x.arg: (ast.unparse(x.annotation), default) for x, default in zip(positional, defaults)}
    by_name = {
        x.arg: (ast.unparse(x.annotation), default and ast.unparse(default))
        for x, default in zip(node.args.kwonlyargs, node.args.kw_defaults)
    }
    if node.args.kwarg is not None:
        by_name |= {name: (of, None) for name, of in keywords_of(node.args.kwarg.annotation.slice.id).items()}
    return found, by_name


@pytest.mark.parametrize("name", [name for name in dash_attn.__all__ if name.startswith("flash_attn")])
def test_the_stub_has_the_functions_signatures(name):
    overloads = [node for node in STUB.body if isinstance(node, ast.FunctionDef) and node.name == name]
    plain, flagged, either = (arguments_of(node) for node in overloads)
    signature = inspect.signature(getattr(dash_attn, name)).parameters.values()
    in_place = [x for x in signature if x.kind is x.POSITIONAL_OR_KEYWORD]
    flag = "return_softmax_lse" if name == "flash_attn_with_kvcache" else "return_attn_probs"
    annotations = {x.name: x.annotation.replace("Sequence[int | None]", "_Window") for x in signature}
    defaults = {x.name: None if x.default is x.empty else repr(x.default) for x in signature}
    assert either[0] == {x.name: (annotations[x.name], defaults[x.name]) for x in in_place}
    assert {key: of for key, (of, _) in either[1].items()} == {
        x.name: annotations[x.name] for x in signature if x.kind is x.KEYWORD_ONLY
    }
    for arguments, literal in ((plain, "False"), (flagged, "True")):
        together = arguments[0] | arguments[1]
        assert together.pop(flag) == (f"Literal[{literal}]", "False" if literal == "False" else None)
        expected = either[0] | either[1]
        del expected[flag]
        assert together == expected
    assert list(plain[0]) == list(either[0])


def test_the_stub_has_every_public_name():
    names = {node.name for node in STUB.body if isinstance(node, ast.FunctionDef)}
    (exported,) = (ast.literal_eval(node.value) for node in STUB.body if isinstance(node, ast.Assign))
    assert names == set(dash_attn.__all__) and exported == dash_attn.__all__
