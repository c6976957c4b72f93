"""The image and its examples: locks that fit setup.py, their size, a linted Dockerfile, commands that the command line takes."""
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from command import ROOT
from packaging.requirements import Requirement

from k3cuda.cli import main

sys.path.insert(0, str(ROOT / "scripts"))
import locks  # noqa: E402

REQUIRED = os.environ.get("REQUIRE_CUDA_LINE")   # the line that CI installed: then nothing is skipped
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def takes(words) -> None:
    """click reads a command line as a user's and starts nothing."""
    command, *rest = words
    main.commands[command].make_context(command, list(rest))


def installed(line: str) -> dict[str, metadata.Distribution]:
    """The packages of a lock that are here; all of them, or the test is left out."""
    found = {}
    for name in locks.read_lock(line):
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if REQUIRED != line:
                pytest.skip(f"{line} is not installed here: no {name}")
            if name in {Requirement(text).name for text in locks.requirements(line)}:   # others may be of a version that needs them no more
                raise
    return found


@pytest.mark.parametrize("line", locks.LINES)
def test_a_lock_is_within_the_ranges(line):
    pins = locks.read_lock(line)
    for text in locks.requirements(line):
        wanted = Requirement(text)
        assert wanted.specifier.contains(pins[wanted.name.lower().replace("_", "-")][0]), text
    compiled = {name for name, (_, hashes) in pins.items() if len(hashes) == len(locks.CPUS)}   # a wheel for each kind of CPU
    assert {"numpy", "tiktoken", "cuda-bindings", f"nvidia-nccl-{line}", f"cupy-cuda{line[2:]}x"} <= compiled


@pytest.mark.parametrize("line", locks.LINES)
def test_a_lock_is_complete(line):
    names = set(locks.read_lock(line))
    for name, found in installed(line).items():
        for needed in map(Requirement, found.requires or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": "", "python_version": locks.PYTHON}):
                assert needed.name.lower().replace("_", "-").replace(".", "-") in names, f"{name} needs {needed}"


@pytest.mark.parametrize("line", locks.LINES)
def test_packages_of_a_line_fit_the_image(line):
    sizes = {name: sum(Path(f.locate()).stat().st_size for f in found.files if f.suffix != ".pyc" and Path(f.locate()).is_file())
             for name, found in installed(line).items()}
    assert min(sizes.values()) > 0 and sum(sizes.values()) / 1e6 <= locks.LIMITS_MB[line], sorted(sizes.items(), key=lambda s: -s[1])[:5]


def linted(tool: str, *files) -> None:
    """A linter of k3cuda[test], which says nothing of these files."""
    beside = Path(sys.executable).parent / tool
    program = str(beside) if beside.exists() else shutil.which(tool)
    if program is None and REQUIRED is None:
        pytest.skip(f"no {tool}; it comes with k3cuda[test] on x86_64")
    done = subprocess.run([program, *files], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_dockerfile_passes_hadolint():
    linted("hadolint", ROOT / "Dockerfile")


def test_shell_scripts_pass_shellcheck():
    linted("shellcheck", *sorted((ROOT / "examples").glob("*.sh")), *sorted((ROOT / "scripts").glob("*.sh")))


def test_the_dockerfile_says_what_is_so():
    assert re.search(r"^ARG PYTHON_IMAGE=python:([\d.]+)-slim", DOCKERFILE, re.M).group(1) == locks.PYTHON
    line = re.search(r"^ARG CUDA_LINE=(\w+)$", DOCKERFILE, re.M).group(1)
    assert re.search(r"^COPY (\S+) requirements.lock$", DOCKERFILE, re.M).group(1).replace("${CUDA_LINE}", line) == str(locks.lock_of(line).relative_to(ROOT))
    words = shlex.split(re.search(r'^ARG COMPILE="(.*)"$', DOCKERFILE, re.M).group(1))
    takes(["compile", "--output", "cubin", *words])
    entry, command = (json.loads(re.search(rf"^{name} (\[.*\])$", DOCKERFILE, re.M).group(1)) for name in ("ENTRYPOINT", "CMD"))
    assert entry == ["k3cuda"]
    takes(command)
    assert set(re.findall(r"\b(K3CUDA_\w+)=", DOCKERFILE)) <= main.variables()


def test_the_build_context_has_what_is_copied():
    allowed = [row[1:] for row in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if row.startswith("!")]
    copied = re.findall(r"^COPY (?!--from)(\S+) ", DOCKERFILE, re.M)
    assert len(copied) == 2 and all(any(Path(path.replace("${CUDA_LINE}", "cu13")).match(rule) for rule in allowed) for path in copied)


def test_commands_of_the_kubernetes_example():
    text = (ROOT / "examples/kubernetes.yaml").read_text(encoding="utf-8")
    args = json.loads(re.search(r"^ +args: (\[.*\])$", text, re.M).group(1))
    takes(args)
    grace = float(args[args.index("--shutdown-grace") + 1])
    assert grace < int(re.search(r"terminationGracePeriodSeconds: (\d+)", text).group(1))
    user, group = re.search(r"runAsUser: (\d+), runAsGroup: (\d+)", text).groups()
    assert f"USER {user}:{group}\n" in DOCKERFILE
    assert set(re.findall(r"\bK3CUDA_\w+", text)) <= main.variables()


@pytest.mark.parametrize("version", ["1.28", "1.36"])
def test_the_kubernetes_example_has_the_fields_of_the_api(version):
    """Against the schemas of Kubernetes, fields that are none refused."""
    if REQUIRED is None:
        pytest.importorskip("kubernetes_validate", reason="it comes with k3cuda[test]")
    import kubernetes_validate
    import yaml
    documents = list(yaml.safe_load_all((ROOT / "examples/kubernetes.yaml").read_text(encoding="utf-8")))
    assert [d["kind"] for d in documents] == ["Deployment", "Service"]
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)
    deployment, service = documents
    pod = deployment["spec"]["template"]
    container, = pod["spec"]["containers"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == pod["metadata"]["labels"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["spec"]["volumes"]}
    assert service["spec"]["ports"][0]["targetPort"] in {p["name"] for p in container["ports"]}
    container["securityContext"]["readOnlyRootFileSystem"] = True   # a slip of one letter
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, version, strict=True)


@pytest.mark.parametrize(("name", "wanted"), [("slurm", ["info", "check", "serve"]), ("slurm-ranks", ["check", "serve"])])
def test_commands_of_the_slurm_examples(name, wanted):
    path = ROOT / f"examples/{name}.sh"
    beside = Path(sys.executable).parent / "shellcheck"
    tool = str(beside) if beside.exists() else shutil.which("shellcheck")
    if tool is None and REQUIRED is None:
        pytest.skip("no shellcheck; it comes with k3cuda[test] on x86_64")
    done = subprocess.run([tool, path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    text = path.read_text(encoding="utf-8")
    commands = re.findall(r"srun (?:--\S+ )*k3cuda (.*)$", text, re.M)
    assert [words.split()[0] for words in commands] == wanted
    for words in commands:
        takes(shlex.split(words))
    assert float(re.search(r"--shutdown-grace (\d+)", text).group(1)) < int(re.search(r"--signal=TERM@(\d+)", text).group(1))


def test_the_example_of_many_ranks_starts_a_task_a_rank():
    text = (ROOT / "examples/slurm-ranks.sh").read_text(encoding="utf-8")
    number = {name: int(re.search(rf"^#SBATCH --{name}=(\d+)$", text, re.M)[1]) for name in ("nodes", "ntasks-per-node", "gpus-per-node")}
    assert number["ntasks-per-node"] == number["gpus-per-node"]
    assert set(re.findall(r"--tp (\d+)", text)) == {str(number["nodes"] * number["ntasks-per-node"])}
    assert set(re.findall(r"\bK3CUDA_\w+", text)) <= main.variables()
