"""The structure of the sources: includes point downwards, and files and lines stay short."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
CSRC = ROOT / "csrc"
# Bottom to top; a layer includes itself and what stands before it. What fixes bits knows nothing of what moves work in
# time.
LAYERS = [
    "host_device.h", "contract", "placement", "dropout", "receipts", "device", "packing", "cache", "columns",
    "generator", "backward", "forward", "launch", "bindings",
]  # fmt: skip
SOURCES = sorted(path for path in CSRC.rglob("*") if path.suffix in {".h", ".cu", ".cpp", ".def"})
GENERATED = {"built_variants.def"}
PLAIN_LAYERS = {"host_device.h", "contract", "placement", "dropout", "receipts"}
STANDARD_HEADER = re.compile(r"^[a-z0-9_]+$")
CUDA_HEADERS = {
    "cuda.h", "cudaTypedefs.h", "cuda_bf16.h", "cuda_fp16.h", "cuda_runtime_api.h", "cub/block/block_scan.cuh"
}  # fmt: skip
MAX_LINES = 500
MAX_COLUMNS = 120
FOLDERS = [
    "csrc",
    "dash_attn",
    "examples",
    "tests",
    "benchmarks",
    "tools",
    "build_support",
    "third_party",
    "docs",
    ".ci",
]
SOURCE_SUFFIXES = {".h", ".cu", ".cpp", ".def", ".py", ".sh"}
SUFFIXES = SOURCE_SUFFIXES | {".md", ".toml"}


def layer_of(path: pathlib.Path) -> int:
    return LAYERS.index(path.relative_to(CSRC).parts[0])


def is_plain(path: pathlib.Path) -> bool:
    return LAYERS[layer_of(path)] in PLAIN_LAYERS


def includes(path: pathlib.Path) -> list[tuple[str, str]]:
    return re.findall(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def resolve(source: pathlib.Path, name: str) -> pathlib.Path | None:
    for folder in (source.parent, CSRC):
        if (folder / name).is_file():
            return (folder / name).resolve()
    return None


def project_files() -> list[pathlib.Path]:
    files = [path for path in ROOT.iterdir() if path.is_file() and (path.suffix in SUFFIXES or path.name == "Makefile")]
    for folder in FOLDERS:
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES or path.parent.name == ".ci"]
    return sorted(path for path in files if path.is_file() and "__pycache__" not in path.parts)


def relative(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_source_is_in_a_layer():
    assert {path.relative_to(CSRC).parts[0] for path in SOURCES} == set(LAYERS)


@pytest.mark.parametrize("source", SOURCES, ids=relative)
def test_includes_point_downwards(source):
    for quote, name in includes(source):
        if quote == "<" or name in GENERATED:
            continue
        target = resolve(source, name)
        assert target is not None, f"{relative(source)} includes {name}, which is not in csrc"
        assert layer_of(target) <= layer_of(source), f"{relative(source)} includes {relative(target)}, a layer above it"


@pytest.mark.parametrize("source", [s for s in SOURCES if is_plain(s)], ids=relative)
def test_plain_layers_are_plain_cpp(source):
    other = [name for quote, name in includes(source) if quote == "<" and not STANDARD_HEADER.match(name)]
    other += [name for quote, name in includes(source) if quote == '"' and not is_plain(resolve(source, name))]
    assert not other, f"{relative(source)} includes {other}: only the C++ standard library may be used here"


@pytest.mark.parametrize("source", [s for s in SOURCES if layer_of(s) < LAYERS.index("bindings")], ids=relative)
def test_only_the_bindings_need_more_than_cuda(source):
    names = [name for quote, name in includes(source) if quote == "<"]
    other = [name for name in names if not STANDARD_HEADER.match(name) and name not in CUDA_HEADERS]
    assert not other, f"{relative(source)} includes {other}"


def test_no_file_is_long():
    files = [path for path in project_files() if "docs" not in path.relative_to(ROOT).parts]
    lengths = {relative(path): len(path.read_text().splitlines()) for path in files}
    assert lengths
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_LINES}


def test_no_line_of_a_source_is_long():
    sources = [path for path in project_files() if path.suffix in SOURCE_SUFFIXES]
    assert sources
    long_lines = []
    for path in sources:
        lines = enumerate(path.read_text().splitlines(), 1)
        long_lines += [f"{relative(path)}:{number}" for number, line in lines if len(line) > MAX_COLUMNS]
    assert not long_lines
