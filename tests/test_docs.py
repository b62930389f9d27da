"""The code of the documents runs, their commands exist, and the reference has every public name.

Python blocks run on the CPU, page by page. The commands of the recipes run as they are shown, with stand-ins for Slurm
and containers, and so do some of the other pages. The rest take minutes or a GPU: their syntax, programs and options
are checked.
"""

import ast
import contextlib
import importlib
import inspect
import io
import json
import os
import pathlib
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
import types

import pytest
import site_pages
import torch

ROOT = pathlib.Path(__file__).parents[1]
RECIPES = "docs/recipes/"
ANY_PORT = "--rdzv-backend c10d --rdzv-endpoint localhost:0"  # tests run side by side
PAGES = [str(path.relative_to(ROOT)) for path in site_pages.pages()]
# The modules that users import; other modules with an __all__ serve these.
PUBLIC = (
    "dash_attn", "dash_attn.compat.bert_padding", "dash_attn.compat.flash_attn_2", "dash_attn.compat.flash_attn_3",
    "dash_attn.distributed", "dash_attn.dropout", "dash_attn.integrations.megatron", "dash_attn.integrations.sglang",
    "dash_attn.integrations.torch", "dash_attn.integrations.transformers", "dash_attn.integrations.vllm",
    "dash_attn.masks", "dash_attn.receipts", "dash_attn.schedule",
)  # fmt: skip


def blocks(page, language):
    """The fenced blocks of a language on a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)


def run_blocks(page, names=(), replaced=()):
    """The names that the Python blocks of a page leave, run one after the other from those given."""
    code = "\n".join(blocks(page, "python"))
    for shown, tried in replaced:
        assert shown in code, shown
        code = code.replace(shown, tried)
    found = {"torch": torch, **dict(names)}
    exec(compile(code, page, "exec"), found)
    return found


@pytest.fixture
def determinism_put_back():
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def one_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def qkv(*shape):
    return {name: torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for name in "qkv"}


def test_packed_training(determinism_put_back):
    found = run_blocks(f"{RECIPES}packed_training.md")
    q, k, v, cu_seqlens = (found[name] for name in ("q", "k", "v", "cu_seqlens"))
    assert found["packed"][177:].eq(0).all() and cu_seqlens[-1] == 177
    assert len(found["train"]()) == 3


def test_rollout():
    found = run_blocks(f"{RECIPES}rollout.md")
    assert found["trained"].requires_grad and found["trained"].shape == (106, 4, 64)


def test_usage():
    """In the page's order: a packed batch, then dense calls, for which the page gives no tensors."""
    from dash_attn import flash_attn_func

    dense = qkv(1, 64, 2, 32)
    names = {"dense_input": dense["q"], "layer": lambda x: flash_attn_func(x, x, x), "x": dense["q"]}
    for part in "12":
        names[f"out_{part}"], names[f"lse_{part}"], _ = flash_attn_func(*dense.values(), return_attn_probs=True)
    smaller = [('device="cuda"', 'device="cpu"'), ("(2260, 16, 128", "(2260, 1, 16")]
    calls = "out, max_logits = flash_attn_func", "torch.manual_seed(0)"
    ready = [(call, f"q = k = v = dense_input\n{call}") for call in calls]
    found = run_blocks("docs/usage.md", names, smaller + ready)
    assert found["cu_seqlens"].tolist() == [0, 700, 2200, 2260] and found["max_logits"].shape == (1, 2)
    found["out"].sum().backward()
    assert dense["q"].grad.any()


def test_dropout():
    from dash_attn import flash_attn_func
    from dash_attn.dropout import DropoutState, dropout_bits_beside

    names = {"flash_attn_func": flash_attn_func, "dropout_bits_beside": dropout_bits_beside, **qkv(1, 64, 2, 32)}
    names |= {"state": DropoutState.of(0), "x": torch.randn(4, 4), "weight": torch.randn(4, 4)}
    sizes = "batch=2, heads=16, seqlen_q=4096, seqlen_k=4096", "batch=1, heads=2, seqlen_q=64, seqlen_k=64"
    assert run_blocks("docs/dropout.md", names, [sizes])["out"].shape == (1, 64, 2, 32)


def test_masks():
    names = qkv(1, 8, 1, 16) | {"packed": torch.randn(1, 1800, 1, 16).bfloat16()}
    names["q_1000"] = torch.randn(1, 1000, 1, 16).bfloat16()
    found = run_blocks("docs/masks.md", names, [('device="cuda"', 'device="cpu"')])
    assert found["mask"].shape == (1, 1, 1000, 2) and not found["causal"] and found["out"].shape == (1, 1000, 1, 16)


@pytest.mark.parametrize("page", ["docs/receipts.md", f"{RECIPES}debugging_a_divergence.md"])
def test_recording(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential()
    model.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1), torch.nn.Flatten(0))
    model.forward = lambda x: model.layers(x).sum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run_blocks(page, {"model": model, "optimizer": optimizer, "batches": [torch.randn(2, 4)] * 2})
    assert len(list(tmp_path.glob("receipts/*/rank_00000.sqlite"))) == 1


def test_distributed(one_process):
    from dash_attn.distributed import context_parallel_attention

    _, of_mesh = blocks("docs/distributed.md", "python")
    names = {"torch": torch, "nodes": 1, "context_parallel_attention": context_parallel_attention, **qkv(1, 64, 2, 32)}
    exec(of_mesh.replace('"cuda"', '"cpu"').replace("(nodes, 8)", "(nodes, 1)"), names)
    assert names["out"].shape == (1, 64, 2, 32)


@pytest.mark.slow
def test_distributed_program(shell, tmp_path):
    page = "docs/distributed.md"
    (tmp_path / "context_parallel.py").write_text(blocks(page, "python")[0])
    done = shell(blocks(page, "bash")[0].replace("torchrun", f"torchrun {ANY_PORT}"))
    # Two processes write to one pipe, so their lines may mix.
    assert done.returncode == 0 and done.stdout.count("True") == 2, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("page, numbers", [("docs/training.md", (0, -1))])
def test_commands_run(page, numbers, shell):
    """One after the other in one folder, as a reader runs them."""
    shown = blocks(page, "bash")
    code = "".join(shown[number] for number in numbers).replace("torchrun", f"torchrun {ANY_PORT}")
    done = shell(f"set -e\n{code}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_foreign_forward(monkeypatch):
    from dash_attn.compat import flash_attn_3

    theirs = types.ModuleType("flash_attn_interface")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", theirs)
    run_blocks("docs/integrations/foreign_forward.md")
    assert theirs._flash_attn_backward is flash_attn_3._flash_attn_backward


def test_spec_of_transformer_engine():
    """TransformerEngine's own spec cannot be made without a GPU's libraries."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from dash_attn.integrations.megatron import DashAttention

    names = "get_gpt_layer_with_transformer_engine_spec", "get_gpt_layer_local_spec"
    spec = run_blocks(f"{RECIPES}megatron_with_transformer_engine.md", (), [names])["layer_spec"]
    assert spec.submodules.self_attention.submodules.core_attention is DashAttention


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_python_imports_what_exists(page):
    for code in blocks(page, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("dash_attn"):
                if ".megatron" in node.module:
                    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
                module = importlib.import_module(node.module)
                for name in node.names:
                    assert hasattr(module, name.name) or importlib.import_module(f"{node.module}.{name.name}")


def commands(page):
    """The commands of a page as lists of words."""
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    found = [shlex.split(line, comments=True) for line in lines if not line.startswith("#")]
    return [[word.strip("()") for word in words] for words in found if words]


def programs():
    """(page, program as Python starts it, its arguments) of every command that starts one of ours."""
    found = []
    for page in PAGES:
        for words in commands(page):
            script = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
            module = next((i for i, word in enumerate(words) if word == "-m" and words[i - 1] != "any_launcher"), None)
            if module is not None and words[module + 1].split(".")[0] in ("dash_attn", "benchmarks"):
                found.append((page, words[module + 1], words[module + 2 :]))
            elif script is not None and (ROOT / words[script].removeprefix("/opt/dash_attn/")).exists():
                found.append((page, words[script].removeprefix("/opt/dash_attn/"), words[script + 1 :]))
    return found


def help_of(program, first, cache={}):  # noqa: B006  one process asks each program once
    """What `program --help` prints."""
    name = program, first if program == "dash_attn.receipts" else None
    if name not in cache:
        arguments = [program, *(x for x in name[1:] if x), "--help"]
        before, path, modules = sys.argv, list(sys.path), set(sys.modules)
        sys.argv = arguments
        text = io.StringIO()
        try:
            with contextlib.redirect_stdout(text), pytest.raises(SystemExit) as ended:
                if program.endswith(".py"):
                    sys.path.insert(0, str((ROOT / program).parent))
                    runpy.run_path(str(ROOT / program), run_name="__main__")
                else:
                    runpy.run_module(program, run_name="__main__", alter_sys=False)
        finally:
            sys.argv, sys.path[:] = before, path
            for module in set(sys.modules) - modules:
                if module.partition(".")[0] not in ("torch", "dash_attn"):
                    del sys.modules[module]
        assert not ended.value.code, program
        cache[name] = text.getvalue()
    return cache[name]


@pytest.mark.parametrize("page, program, arguments", programs(), ids=lambda x: x if isinstance(x, str) else "")
def test_programs_have_the_options_that_are_shown(page, program, arguments):
    if program == "dash_attn.run":  # whose arguments are those of another program
        return
    text = help_of(program, arguments[0] if arguments else None)
    for word in arguments:
        if word in (";", "&", "&&", "|"):
            break
        if word.startswith("--"):
            assert re.search(rf"(?<![\w-]){re.escape(word.partition('=')[0])}(?![\w-])", text), (program, word)


def test_commands_of_make_and_python_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    words = [words for page in PAGES for words in commands(page)]
    assert {target for command, target, *_ in filter(lambda x: x[1:], words) if command == "make"} <= targets
    assert len(programs()) > 30


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "bash") or blocks(page, "dockerfile")])
def test_shell_is_valid(page):
    runs = re.findall(r"^RUN (.*)$", "\n".join(blocks(page, "dockerfile")), re.M)
    for code in [*blocks(page, "bash"), *runs]:
        done = subprocess.run(["bash", "-n"], input=code, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def shell(tmp_path):
    """Runs bash in an empty folder beside the examples, where `python` is this one; returns the finished process."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    stand_ins = {
        "python": f'exec {shlex.quote(sys.executable)} "$@"',
        "torchrun": f'exec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"',
        "scontrol": "echo 127.0.0.1",
        "srun": 'exec "$@"',
        "apptainer": '[ "$1 $2" = "exec --nv" ] && shift 3 && exec "$@"',
    }
    for name, line in stand_ins.items():
        (tools / name).write_text(f"#!/bin/bash\n{line}\n")
        (tools / name).chmod(0o755)

    def run(code, *arguments, **environment):
        paths = {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = ["bash", "-c", code, "bash", *arguments]
        environment = {**os.environ, **paths, **environment}
        return subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True)

    return run


@pytest.mark.slow
def test_debugging_a_divergence(shell, tmp_path):
    page = f"{RECIPES}debugging_a_divergence.md"
    record, compare, elements = blocks(page, "bash")
    found, differing = blocks(page, "text")
    done = shell(record)
    assert done.returncode == 0, done.stderr
    done = shell(compare)
    assert done.returncode == 1 and found in done.stdout, done.stdout + done.stderr
    first = json.loads(shell(f"{compare.strip()} --json").stdout)["first"]
    for replay in first["replay"]:
        assert shell(replay).returncode == 0
    folders = [re.search(r"DASH_ATTN_RECEIPTS_PATH=(\S+)", replay)[1] for replay in first["replay"]]
    done = shell(elements.replace("REPLAY_A", folders[0]).replace("REPLAY_B", folders[1]))
    assert differing in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_batch_script(shell, tmp_path):
    """On one node, killed by nothing, requeued once: it continues."""
    (script,) = (code for code in blocks(f"{RECIPES}slurm_and_containers.md", "bash") if "#SBATCH" in code)
    script = script.replace("/opt/dash_attn/", f"{ROOT}/").replace(":29500", ":0")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node", "SLURM_NNODES": "1", "SLURM_GPUS_PER_NODE": "2"}
    sizes = ("--layers", "1", "--seqlen", "32", "--checkpoint-every", "1")
    for restarts, steps in (("0", "2"), ("1", "3")):
        done = shell(script, *sizes, "--steps", steps, RUN=str(tmp_path / "run"), SLURM_RESTART_COUNT=restarts, **job)
        assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "run" / "losses.txt").read_text().splitlines()) == 3
    assert len(list((tmp_path / "run" / "receipts").glob("*.sqlite"))) == 2


def documented():
    """The names of the directives in docs/api, each with its page."""
    found = {}
    for page in (ROOT / "docs" / "api").glob("*.md"):
        found |= dict.fromkeys(re.findall(r"^::: (\S+)$", page.read_text(), re.M), page)
    return found


@pytest.mark.parametrize("name", PUBLIC)
def test_reference_has_every_public_name(name):
    """With a docstring that describes every argument, or names the function whose arguments they are."""
    if name.endswith(".megatron"):
        pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    module, pages = importlib.import_module(name), documented()
    for member in module.__all__:
        # FlashAttention-2's public functions are ours.
        paths = {name, f"{name}.{member}", f"dash_attn.{member}"}
        assert paths & pages.keys(), f"{name}.{member} is on no page of docs/api"
        function = getattr(module, member)
        if not inspect.isfunction(function):
            continue
        text = inspect.getdoc(function)
        described = {part for names in re.findall(r"^ {4}([\w, ]+):", text, re.M) for part in names.split(", ")}
        missing = set(inspect.signature(function).parameters) - described
        assert not missing or re.search(r"arguments[^.]* `|`[^.]*arguments|as in `", text), (member, sorted(missing))


def test_reference_names_what_exists():
    for name in documented():
        if ".megatron" not in name:
            pkgutil.resolve_name(name)


def test_every_page_is_in_the_menu():
    menu = re.findall(r"^\s+- (?:[^:]+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert len(menu) == len(set(menu)) and set(menu) == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_links_are_words(page):
    """On the site nobody knows what a file is called."""
    assert not re.findall(r"\[[^\]]*\.md\]\(", (ROOT / page).read_text())


@pytest.mark.parametrize(
    "text, count",
    [
        ('<script src="https://cdn.example/x.js"></script>', 1),
        ('<link rel="stylesheet" href="//cdn.example/x.css">', 1),
        ('<img alt="x" src=https://cdn.example/x.png>', 1),
        ('<a href="https://cdn.example/">x</a> <script src="assets/x.js"></script>', 0),
    ],
)
def test_what_a_page_fetches_elsewhere_is_found(text, count, tmp_path):
    (tmp_path / "page.html").write_text(text)
    (tmp_path / "style.css").write_text("@font-face { src: url('https://cdn.example/x') } a { background: url(x) }")
    assert len(site_pages.fetched_elsewhere(tmp_path)) == count + 1
