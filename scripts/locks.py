"""Makes the lock files of the container image, and measures what they install.

    python scripts/locks.py make          # container/requirements-cu13.lock and -cu12.lock, from the ranges in setup.py
    python scripts/locks.py measure cu13  # installs one into a temporary folder; code 1 above its limit

Uses pip as it is configured here, for the image's Python and both kinds of CPU, whatever machine this is. A lock has wheels only.
"""
import ast
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHON = "3.13"   # of the image
CPUS = ("x86_64", "aarch64")
LINES = {"cu13": ("BASE", "CU13", "SERVE"), "cu12": ("BASE", "CU12", "SERVE")}   # lists of setup.py
LIMITS_MB = {"cu13": 900, "cu12": 1200}   # of 10^6 bytes, unpacked: with a slim base an image of about 1 GB


def lock_of(line: str) -> Path:
    return ROOT / f"container/requirements-{line}.lock"


def requirements(line: str) -> list[str]:
    """What setup.py asks for, as ranges."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    lists = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)}
    return [word for name in LINES[line] for word in ast.literal_eval(lists[name])]


def read_lock(line: str) -> dict[str, tuple[str, list[str]]]:
    """name -> (version, hashes). ValueError: a line that pins nothing or has no hash."""
    text = lock_of(line).read_text(encoding="utf-8").replace("\\\n", " ")
    pins = {}
    for row in (row for row in text.splitlines() if row and not row.startswith("#")):
        pin, *hashes = row.split()
        name, _, version = pin.partition("==")
        if not version or not hashes or not all(h.startswith("--hash=sha256:") and len(h) == 78 for h in hashes):
            raise ValueError(f"{lock_of(line).name}: found {row:.80}, wanted name==version with hashes")
        pins[name] = (version, hashes)
    return pins


def _pip(*args, cpu: str, target: str) -> None:
    platforms = [f"manylinux_2_{minor}_{cpu}" for minor in range(41, 4, -1)] + [f"manylinux2014_{cpu}"]   # 2.41: the glibc of the image
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--quiet", "--disable-pip-version-check", "--only-binary=:all:", "--implementation", "cp",
                    "--python-version", PYTHON, *(word for p in platforms for word in ("--platform", p)), "--target", target, *args], check=True)


def make(line: str) -> None:
    pins: dict[str, tuple[str, list[str]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for cpu in CPUS:
            asked = [f"{name}=={version}" for name, (version, _) in pins.items()] or requirements(line)   # one version for all CPUs
            report = Path(folder) / f"{cpu}.json"
            _pip("--dry-run", "--ignore-installed", "--report", str(report), *asked, cpu=cpu, target=folder)
            for found in json.loads(report.read_text(encoding="utf-8"))["install"]:
                url, digest = found["download_info"]["url"], found["download_info"]["archive_info"]["hashes"]["sha256"]
                if not url.startswith("https://files.pythonhosted.org/"):   # a wheel that only this machine has
                    raise SystemExit(f"{url}: wanted a file of the public index")
                name, version = found["metadata"]["name"].lower().replace("_", "-"), found["metadata"]["version"]
                hashes = pins.setdefault(name, (version, []))[1]
                hashes += [h for h in [f"--hash=sha256:{digest}"] if h not in hashes]
    rows = [" \\\n    ".join([f"{name}=={version}", *sorted(hashes)]) for name, (version, hashes) in sorted(pins.items())]
    head = f"# Made by scripts/locks.py from setup.py ({', '.join(LINES[line])}), for Python {PYTHON} on Linux, {' and '.join(CPUS)}.\n"
    lock_of(line).write_text(head + "\n".join(rows) + "\n", encoding="utf-8")
    print(f"{lock_of(line).name}: {len(pins)} packages")


def measure(line: str, cpu: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        _pip("--require-hashes", "--no-deps", "--no-compile", "-r", str(lock_of(line)), cpu=cpu, target=folder)
        sizes: dict[str, int] = {}
        for path in Path(folder).rglob("*"):
            if path.is_file() and not path.is_symlink():
                top = "/".join(path.relative_to(folder).parts[:2 if path.relative_to(folder).parts[0] == "nvidia" else 1])
                sizes[top] = sizes.get(top, 0) + path.stat().st_size
    for name, size in sorted(sizes.items(), key=lambda pair: -pair[1])[:8]:
        print(f"{size / 1e6:8.1f} MB {name}")
    total = sum(sizes.values()) / 1e6
    print(f"{total:8.1f} MB in all, {line} on {cpu}, at most {LIMITS_MB[line]}")
    return total <= LIMITS_MB[line]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["make"]:
            for each in LINES:
                make(each)
        case ["measure", line, *cpu] if line in LINES and len(cpu) <= 1:
            sys.exit(not measure(line, *(cpu or CPUS[:1])))
        case _:
            sys.exit(__doc__)
