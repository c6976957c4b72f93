"""Which rank of which job this process is, from what its launcher put into the environment."""
import os
import re
from dataclasses import dataclass
from typing import Mapping

from ..errors import UsageError

PORT = 29517   # of the rendezvous, where MASTER_PORT says nothing
TOKEN = "K3CUDA_JOB_TOKEN"


@dataclass(frozen=True)
class Launch:
    """One process of a job.

    Attributes:
        launcher: what users call it.
        local_rank: among the ranks of this host. local_size: how many these are; None where nothing says so.
        host, port: where rank 0 listens.
        token: of the job; see docs/multi-node.md.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int | None
    host: str
    port: int
    token: str


@dataclass(frozen=True)
class _Family:
    """The variables of one launcher; of `local_*` the first that is set counts, `job` are joined."""

    name: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...] = ()
    job: tuple[str, ...] = ()


# By precedence: mpirun inside a Slurm job sets both, and Slurm's then count its daemons. SLURM_NTASKS also stands in a batch script, which
# is no rank; SLURM_STEP_NUM_TASKS only where srun started the process.
_SLURM = _Family("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_LOCALID",), job=("SLURM_JOB_ID", "SLURM_STEP_ID"))
_TORCHRUN = _Family("RANK and WORLD_SIZE", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",), ("TORCHELASTIC_RUN_ID",))
_FAMILIES = (
    _Family("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_LOCAL_SIZE",), ("PMIX_NAMESPACE",)),
    _Family("PMI", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"), ("PMI_JOBID",)),
    _TORCHRUN, _SLURM,
)


def launched(env: Mapping[str, str] = os.environ) -> Launch | None:
    """The place of this process in its job; None where no launcher started it, or started it alone.

    Raises:
        UsageError: variables that contradict each other, are incomplete, or say nothing about where rank 0 is.
    """
    found = [(family, place) for family in _FAMILIES if (place := _place(family, env))]
    if not found:
        if "PMIX_RANK" in env and env["PMIX_RANK"] != "0":
            raise UsageError(f"PMIX_RANK: found rank {env['PMIX_RANK']}, but nothing says of how many", "start it by mpirun or srun, or set RANK and WORLD_SIZE")
        return None
    if _TORCHRUN.job[0] in env:   # torchrun starts ranks itself, whatever started it
        found.sort(key=lambda pair: pair[0] is not _TORCHRUN)
    family, (rank, size) = found[0]
    for other, place in found[1:]:
        nested = (other is _SLURM or _TORCHRUN.job[0] in env) and place[1] != size
        if place != (rank, size) and not nested:
            raise UsageError(f"{family.rank} says rank {rank} of {size}, {other.rank} says rank {place[0]} of {place[1]}", "unset the variables that are not meant")
    if size == 1:
        return None
    agreeing = [f for f, place in found if place == (rank, size)]
    local_size = _first(env, [name for f in agreeing for name in f.local_size])
    if local_size is None and _SLURM in agreeing and _nodes(env) == 1:
        local_size = size
    local_rank = _first(env, [name for f in agreeing for name in f.local_rank])
    if local_rank is None:
        if local_size != size:
            raise UsageError(f"{family.rank} says rank {rank} of {size}, but nothing says which GPU of its machine is its own", "set LOCAL_RANK")
        local_rank = rank
    if local_size is not None and not local_rank < local_size <= size:
        raise UsageError(f"{family.name}: found local rank {local_rank} of {local_size} on a machine, and {size} ranks in all", "unset the variables that are not meant")
    job = ".".join(env[name] for f in agreeing for name in f.job if env.get(name))
    return Launch(family.name, rank, size, local_rank, local_size, _host(env, agreeing, local_size == size), _port(env), env.get(TOKEN) or job)


def _place(family: _Family, env: Mapping[str, str]) -> tuple[int, int] | None:
    """(rank, size), or None where this launcher did not start the process."""
    has = [name for name in (family.rank, family.size) if env.get(name, "") != ""]
    if len(has) < 2:
        if has and family is not _SLURM:
            raise UsageError(f"{has[0]} is set and {(set((family.rank, family.size)) - set(has)).pop()} is not", "set both, or neither")
        return None
    rank, size = _number(env, family.rank), _number(env, family.size)
    if not rank < size:
        raise UsageError(f"{family.rank}: found rank {rank} of {size}, wanted 0 to {size - 1}")
    return rank, size


def _number(env: Mapping[str, str], name: str) -> int:
    if not re.fullmatch(r"\d{1,9}", env[name]):
        raise UsageError(f"{name}: found {env[name]!r:.60}, wanted a number")
    return int(env[name])


def _first(env: Mapping[str, str], names: list[str]) -> int | None:
    return next((_number(env, name) for name in names if env.get(name, "") != ""), None)


def _nodes(env: Mapping[str, str]) -> int | None:
    return _first(env, ["SLURM_STEP_NUM_NODES", "SLURM_NNODES"])


def _host(env: Mapping[str, str], families: list[_Family], one_machine: bool) -> str:
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"]
    if one_machine:
        return "127.0.0.1"
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if _SLURM in families and nodes:   # rank 0 is on the first host of a step
        return first_host(nodes)
    raise UsageError("the ranks may be on several machines, and nothing says where rank 0 is", "set MASTER_ADDR to its machine, and MASTER_PORT if not the default")


def _port(env: Mapping[str, str]) -> int:
    if not env.get("MASTER_PORT"):
        return PORT
    port = _number(env, "MASTER_PORT")
    if not 1 <= port <= 65535:
        raise UsageError(f"MASTER_PORT: found {port}, wanted 1 to 65535")
    return port


def first_host(nodes: str) -> str:
    """The first name of a list as Slurm writes it: "gb[03-06,09],login1" is gb03 and others."""
    head = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\]([^\[,]*))?", nodes.strip())
    return "".join(part or "" for part in head.groups())
