"""Imports follow the flow of data, the core needs no GPU package, and no kernel source or module grows out of a sitting."""
import ast
import subprocess
import sys
from pathlib import Path

import pytest

import k3cuda

ROOT = Path(k3cuda.__file__).parent
DESCRIPTION = ["errors", "config", "context_split", "weights", "buffers", "stages", "plan", "draft_keys", "draft_rope", "draft_config", "draft_weights", "draft_buffers",
               "draft_stages", "draft_plan", "dataflow", "packing", "tables", "emit_sizes", "emit", "phases", "schedule"]
LAUNCH = ["launch_kinds", "launch_mixes", "block_program", "launch_rank", "launch_layer", "launch_mla", "launch_step", "launch_operands", "launch_source"]   # the single launch: behind the description, with NumPy
GPU_PACKAGES = {"cupy", "cuda", "nccl"}
FORBIDDEN = {"torch", "triton", "jax", "numba"}
MAX_LINES = {".py": 300, ".cu": 350, ".cuh": 350}  # a file is read in one sitting
FILES = sorted(p for p in ROOT.rglob("*") if p.suffix in MAX_LINES)
MODULES = [p for p in FILES if p.suffix == ".py"]


def imports(path):
    """(absolute module name, whether at top level) of everything a module imports."""
    package = ["k3cuda", *path.relative_to(ROOT).parts[:-1]]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        top = node in tree.body
        if isinstance(node, ast.Import):
            yield from ((a.name, top) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[:len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, node.module] if node.module else base)
            yield stem, top
            if not node.module:
                yield from ((f"{stem}.{a.name}", top) for a in node.names)


@pytest.mark.parametrize("name", DESCRIPTION + LAUNCH)
def test_description_and_launch_import_only_what_stands_to_their_left(name):
    order = DESCRIPTION + LAUNCH
    allowed = {f"k3cuda.{n}" for n in order[:order.index(name)]} | {"k3cuda"} | ({"numpy"} if name in LAUNCH else set())
    for module, _ in imports(ROOT / f"{name}.py"):
        assert module in allowed or module.split(".")[0] in sys.stdlib_module_names, module


def test_reference_knows_neither_runtime_nor_command():
    for path in (ROOT / "reference").glob("*.py"):
        if path.name in ("sample.py", "accept.py"):
            continue  # their parameters are the runtime's SamplingParams and options of a draft: data, no behaviour
        for module, _ in imports(path):
            assert not module.startswith(("k3cuda.runtime", "k3cuda.cli", "k3cuda.llm")), (path.name, module)


def test_runtime_does_not_know_the_command():
    for path in (ROOT / "runtime").glob("*.py"):
        assert not any(m.startswith(("k3cuda.cli", "k3cuda.llm")) for m, _ in imports(path)), path.name


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_packages_stay_where_they_belong(path):
    found = {(m.split(".")[0], top) for m, top in imports(path)}
    names = {n for n, _ in found}
    assert not names & FORBIDDEN
    if not path.name.startswith("cuda_"):
        assert not {n for n, top in found if top} & GPU_PACKAGES, "only runtime/cuda_*.py may import a GPU package"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_read_in_one_sitting(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES[path.suffix], f"{lines} lines"


def test_the_command_line_loads_no_parts_of_a_job():
    """NumPy is for commands that compute, 150 ms of every other command's start; ranks that are processes for those that run a model, 40 ms."""
    code = "import k3cuda.cli, sys; print([m for m in ('numpy', 'cupy', 'k3cuda.runtime.rank_job', 'k3cuda.runtime.nccl') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_import_is_light():
    """`import k3cuda` alone loads neither NumPy nor the tokenizer: a command that only prints its version starts at once."""
    code = "import k3cuda, sys; print([m for m in ('numpy', 'tiktoken', 'click', 'cupy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
