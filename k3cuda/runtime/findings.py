"""One problem of a checkpoint as a record, so that one run can list them all and a program can read them."""
from dataclasses import asdict, dataclass

from ..errors import CheckpointError, K3Error, OutOfMemory

AGAIN = "download the file again"  # the way out of a damaged file


@dataclass(frozen=True)
class Finding:
    """What is wrong with one file, or with one kind of tensor in it."""

    file: str
    found: str
    wanted: str
    way_out: str
    code: int = CheckpointError.code  # exit code of the command line if nothing else is wrong

    def __str__(self):
        return f"{self.file}: found {self.found}; wanted {self.wanted}; {self.way_out}"

    def to_dict(self) -> dict:
        return asdict(self)


def error_of(findings, what) -> K3Error:
    """The error that lists every finding about `what`: OutOfMemory if memory is all that is short, else CheckpointError."""
    findings = tuple(findings)
    if len(findings) == 1:
        message = str(findings[0])
    else:
        message = "\n".join([f"{what}: {len(findings)} problems", *(f"  {finding}" for finding in findings)])
    if all(finding.code == OutOfMemory.code for finding in findings):
        return OutOfMemory(message)
    return CheckpointError(message, findings=findings)


def shown(text, limit: int = 120) -> str:
    """`text` from a file, safe to print: no control characters or lone surrogates, and not longer than `limit`."""
    text = str(text)
    text = text if len(text) <= limit else text[:limit] + "..."
    return text if text.isprintable() and text.isascii() else ascii(text)


def counted(names, noun: str, limit: int = 3) -> str:
    """"2 tensors: a, b" or "70 tensors, first a, b, c"."""
    names = list(names)
    first = ", ".join(shown(name) for name in names[:limit])
    head = f"{len(names)} {noun}{'' if len(names) == 1 else 's'}"
    return f"{head}: {first}" if len(names) <= limit else f"{head}, first {first}"
