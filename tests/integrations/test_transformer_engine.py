"""Every call of flash_attn's and FlashAttention-3's functions in TransformerEngine fits ours.

TransformerEngine cannot be imported without a GPU's libraries, so its calls are recorded in tests/data: the values that
it passes by position, under the names that they must reach, and its keywords, with the file and line of each call.
Calls of FlashAttention-4, and one of flash_attn_2_cuda.varlen_bwd with the arguments of releases before 2.3, which no
supported release takes, are left out.
"""

import ast
import importlib.metadata
import importlib.util
import inspect
import json
import operator
import pathlib

import pytest

from dash_attn import aliases
from dash_attn.compat import flash_attn_2, flash_attn_3

RECORD = json.loads((pathlib.Path(__file__).parents[1] / "data" / "transformer_engine_2.20.2.json").read_text())
MODULES = {"flash_attn.flash_attn_interface": flash_attn_2, "flash_attn_interface": flash_attn_3}
CALLEES = {"func", "flash_attn_fwd", "flash_attn_bwd"}
CALLS = pytest.mark.parametrize(
    "call", RECORD["calls"], ids=lambda call: f"{call['function'].rpartition('.')[2]}, {call['when']}"
)


@CALLS
def test_call_fits(call):
    module, _, name = call["function"].rpartition(".")
    signature = inspect.signature(getattr(MODULES[module], name))
    bound = signature.bind(*call["positional"], **{keyword: keyword for keyword in call["keywords"]})
    assert all(name == value for name, value in bound.arguments.items()), bound.arguments
    assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in signature.parameters.values())


# backends.py and utils.py of its releases: the bounds of flash-attn's version, on Hopper and since Blackwell.
BOUNDS = {
    "2.6 to 2.9": ">=2.1.1,>=2.7.3,<=2.8.1",
    "2.10 to 2.18.0": ">=2.1.1,>=2.7.3,<=2.8.3",
    "2.20.2": ">=2.1.1,>=2.7.3,<2.8.4",
}


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_versions_that_it_accepts(bounds):
    """As a requirement and as TransformerEngine compares: whole versions, of which a local one is above the release."""
    specifiers = pytest.importorskip("packaging.specifiers", reason="packaging is not installed")
    as_version = pytest.importorskip("packaging.version").Version
    version = as_version(aliases._version_of("flash-attn"))
    compared = {">=": operator.ge, "<=": operator.le, "<": operator.lt}
    for bound in specifiers.SpecifierSet(bounds):
        assert version in bound and compared[bound.operator](version, as_version(bound.version)), bound


def test_version_of_flash_attention_3():
    """On Hopper TransformerEngine's FlashAttention-3 goes before 2."""
    version = pytest.importorskip("packaging.version", reason="packaging is not installed").Version
    third = version(aliases._version_of("flash-attn-3"))
    # Between 3.0.0b and 3.0.0 it would take us for a beta.
    assert version(third.public) == version("3.0.0")
    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
        assert "softcap" in inspect.signature(getattr(flash_attn_3, name)).parameters


def source() -> pathlib.Path:
    spec = importlib.util.find_spec("transformer_engine")  # which imports nothing
    if spec is None:
        pytest.skip("TransformerEngine's sources are not installed, so the record is not compared with them")
    installed = f"transformer_engine {importlib.metadata.version('transformer_engine')}"
    if installed != RECORD["source"]:
        pytest.skip(f"the record is of {RECORD['source']}, and {installed} is installed")
    return pathlib.Path(spec.origin).parent / RECORD["folder"]


def test_record_has_every_call_of_the_source():
    recorded = {}
    for call in RECORD["calls"]:
        for place in call["places"]:
            recorded.setdefault(place, []).append(call)
    found = set()
    folder = source()
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLEES):
                continue
            starred = any(isinstance(argument, ast.Starred) for argument in node.args)
            if not starred:  # FlashAttention-4's, which take everything else by keyword
                continue
            place = f"{path.name}:{node.lineno}"
            found.add(place)
            named = {keyword.arg for keyword in node.keywords if keyword.arg}
            plain = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
            for call in recorded.get(place, []):
                assert named <= {*call["keywords"]} and len(plain) <= len(call["positional"]), place
    assert found == set(recorded)
