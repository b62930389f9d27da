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
from dash_attn.compat import flash_attn_3
from dash_attn.distributed import attention

PACKAGE = pathlib.Path(dash_attn.__file__).parent
README = PACKAGE.parent / "README.md"
CALLS = """
import torch
import dash_attn
from dash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from dash_attn.compat import flash_attn_2, flash_attn_3
from dash_attn.distributed import context_parallel_attention, context_parallel_varlen_attention

x = torch.zeros(1, 9, 2, 8)
offsets = torch.zeros(2)
flag = bool(x.sum())
chosen: dash_attn.Schedule = "shift"
reveal_type(flash_attn_func(x, x, x, schedule=chosen))
reveal_type(flash_attn_func(x, x, x, 0.0, None, True, return_attn_probs=False, learnable_sink=x))
reveal_type(flash_attn_func(x, x, x, causal=True, return_attn_probs=True))
reveal_type(flash_attn_varlen_func(x, x, x, offsets, offsets, 9, 9, seqused_k=offsets))
reveal_type(flash_attn_with_kvcache(x, x, x, cache_seqlens=3))
reveal_type(flash_attn_with_kvcache(x, x, x, return_softmax_lse=True))
reveal_type(flash_attn_2.flash_attn_func(x, x, x))
reveal_type(flash_attn_func(x, x, x, return_attn_probs=flag))
reveal_type(flash_attn_func(x, x, x, return_max_logits=True))
reveal_type(flash_attn_varlen_func(x, x, x, offsets, offsets, 9, 9, return_attn_probs=True, return_max_logits=flag))
reveal_type(flash_attn_2.flash_attn_with_kvcache(x, x, x, return_softmax_lse=True))
reveal_type(flash_attn_3.flash_attn_func(x, x, x, None, True, schedule=chosen))
reveal_type(flash_attn_3.flash_attn_func(x, x, x, return_attn_probs=True, s_aux=x))
reveal_type(flash_attn_3.flash_attn_varlen_func(x, x, x, offsets, offsets, 9, 9, return_attn_probs=flag))
reveal_type(flash_attn_3.flash_attn_qkvpacked_func(x))
reveal_type(flash_attn_3.flash_attn_with_kvcache(x, x, x, return_softmax_lse=True))
reveal_type(context_parallel_attention(x, x, x, causal=True))
reveal_type(context_parallel_attention(x, x, x, return_attn_probs=True, check_values=True))
reveal_type(context_parallel_varlen_attention(x, x, x, offsets, offsets, 9, 9, seqused_q=x, return_attn_probs=flag))
"""
_TENSOR = "torch._tensor.Tensor"


def _tuple(count: int) -> str:
    return f"tuple[{', '.join([_TENSOR] * count)}]"


_ANY_TUPLE = f"{_TENSOR} | tuple[{_TENSOR}, ...]"
REVEALED = [
    _TENSOR, _TENSOR, _tuple(3), _TENSOR, _TENSOR, _tuple(2), _TENSOR, f"{_TENSOR} | {_tuple(3)}", _ANY_TUPLE,
    _ANY_TUPLE, _tuple(2), _TENSOR, _tuple(2), f"{_TENSOR} | {_tuple(2)}", _TENSOR, _tuple(4), _TENSOR, _tuple(3),
    f"{_TENSOR} | {_tuple(3)}",
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


@pytest.mark.slow
def test_mypy_accepts_the_first_example_of_the_readme(mypy):
    if not README.is_file():
        pytest.skip("README.md is not beside the package")
    example = README.read_text().partition("```python\n")[2].partition("```")[0]
    assert "out.sum().backward()" in example
    assert mypy(example) == ([], 0, "")


@pytest.mark.slow
def test_mypy_knows_what_a_call_returns(mypy):
    lines, status, _ = mypy(CALLS)
    assert status == 0 and [line.partition('"')[2].rstrip('"') for line in lines] == REVEALED


@pytest.mark.slow
def test_mypy_refuses_a_schedule_that_there_is_not(mypy):
    program = "import torch, dash_attn\nx = torch.zeros(1)\ndash_attn.flash_attn_func(x, x, x, schedule='fastest')\n"
    lines, status, _ = mypy(program)
    assert status == 1 and lines[0].startswith('error: No overload variant of "flash_attn_func" matches'), lines


def test_the_names_of_schedules():
    assert set(typing.get_args(dash_attn.Schedule)) == {"auto", *schedule.POLICIES}


STUB = ast.parse((PACKAGE / "__init__.pyi").read_text())
FLASH_ATTN_3 = ast.parse(pathlib.Path(flash_attn_3.__file__).read_text())
DISTRIBUTED = ast.parse(pathlib.Path(attention.__file__).read_text())
OVERLOADED = [
    *((STUB, getattr(dash_attn, name)) for name in dash_attn.__all__ if name.startswith("flash_attn")),
    *(
        (FLASH_ATTN_3, getattr(flash_attn_3, f"flash_attn_{name}"))
        for name in ("func", "varlen_func", "qkvpacked_func", "with_kvcache")
    ),
    (DISTRIBUTED, attention.context_parallel_attention),
    (DISTRIBUTED, attention.context_parallel_varlen_attention),
]


def written(annotation):
    return ast.unparse(annotation).replace("Sequence[int | None]", "_Window")


def keywords_of(tree, name):
    """The fields of one of the TypedDicts in a file, with those of its bases."""
    (of_name,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    bases = [keywords_of(tree, base.id) for base in of_name.bases if base.id != "TypedDict"]
    own = {field.target.id: written(field.annotation) for field in of_name.body if isinstance(field, ast.AnnAssign)}
    return {name: annotation for fields in (*bases, own) for name, annotation in fields.items()}


def arguments_of(tree, node):
    """{name: (annotation, default)} of the arguments in their place and by name of an overload in a file."""
    positional, given = node.args.args, node.args.defaults
    defaults = [None] * (len(positional) - len(given)) + [ast.unparse(default) for default in given]
    found = {x.arg: (written(x.annotation), default) for x, default in zip(positional, defaults)}
    by_name = {
        x.arg: (written(x.annotation), default and ast.unparse(default))
        for x, default in zip(node.args.kwonlyargs, node.args.kw_defaults)
    }
    if node.args.kwarg is not None:
        by_name |= {name: (of, None) for name, of in keywords_of(tree, node.args.kwarg.annotation.slice.id).items()}
    return found, by_name


@pytest.mark.parametrize(
    "tree, function", OVERLOADED, ids=[f"{function.__module__}.{function.__name__}" for _, function in OVERLOADED]
)
def test_overloads_have_the_functions_signature(tree, function):
    nodes = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function.__name__]
    overloads = [node for node in nodes if [ast.unparse(x) for x in node.decorator_list] == ["overload"]]
    plain, flagged, either, *with_max_logits = (arguments_of(tree, node) for node in overloads)
    returned = [ast.unparse(node.returns) for node in overloads]
    assert returned[0] == "Tensor" and returned[2] == f"Tensor | {returned[1]}"
    signature = list(inspect.signature(function).parameters.values())
    # A call that gives this flag has an overload of its own.
    of_max_logits = [x for x in signature if x.name == "return_max_logits"]
    signature = [x for x in signature if x not in of_max_logits]
    assert len(with_max_logits) == len(of_max_logits)
    for arguments, flag in zip(with_max_logits, of_max_logits):
        assert returned[3] == "Tensor | tuple[Tensor, ...]"
        assert arguments == (either[0], {flag.name: (flag.annotation, None)} | either[1])
    in_place = [x for x in signature if x.kind is x.POSITIONAL_OR_KEYWORD]
    flag = "return_softmax_lse" if function.__name__ == "flash_attn_with_kvcache" else "return_attn_probs"
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
