"""What launchers put into the environment, read: who we are, where rank 0 is, and contradictions that are errors."""
import pytest

from k3cuda.errors import UsageError
from k3cuda.runtime.launch import PORT, Launch, first_host, launched

OMPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
        "PMIX_NAMESPACE": "prterun-a-7@1", "PMIX_RANK": "5"}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SLURM = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0",
         "SLURM_STEP_NODELIST": "gb[03-04]", "SLURM_STEP_NUM_NODES": "2"}
PLACE = {"MASTER_ADDR": "gb01", "MASTER_PORT": "4000"}


@pytest.mark.parametrize(("env", "name", "local_size", "token"), [
    (OMPI, "Open MPI", 4, "prterun-a-7@1"), (MPICH, "PMI", 4, ""), (TORCHRUN, "RANK and WORLD_SIZE", 4, ""), (SLURM, "Slurm", None, "77.0"),
    ({"PMI_RANK": "5", "PMI_SIZE": "8"} | SLURM, "PMI", None, "77.0"),   # srun --mpi=pmi2: Slurm knows the local rank
    (OMPI | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}, "Open MPI", 4, "prterun-a-7@1"),   # mpirun's daemons are Slurm's ranks
    (TORCHRUN | {"TORCHELASTIC_RUN_ID": "r", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "RANK and WORLD_SIZE", 4, "r"),
    (SLURM | TORCHRUN, "RANK and WORLD_SIZE", 4, "77.0"),
])
def test_launchers(env, name, local_size, token):
    assert launched(env | PLACE) == Launch(name, 5, 8, 1, local_size, "gb01", 4000, token)
    assert launched(env | PLACE | {"K3CUDA_JOB_TOKEN": "s"}).token == "s"


@pytest.mark.parametrize("env", [
    {}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "7"},   # a batch script
    {"RANK": "0", "WORLD_SIZE": "1"}, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, {"PMIX_RANK": "0"}, {"RANK": "", "WORLD_SIZE": ""},
])
def test_no_launcher_or_a_single_rank(env):
    assert launched(env) is None


@pytest.mark.parametrize(("env", "host"), [
    (OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, "127.0.0.1"), (SLURM, "gb03"), (SLURM | {"SLURM_STEP_NUM_NODES": "1"}, "127.0.0.1"),
])
def test_where_rank_0_is(env, host):
    found = launched(env)
    assert (found.host, found.port) == (host, PORT)


@pytest.mark.parametrize(("env", "text"), [
    ({"RANK": "1"}, "RANK is set and WORLD_SIZE is not"),
    ({"WORLD_SIZE": "4"}, "WORLD_SIZE is set and RANK is not"),
    ({"PMI_SIZE": "4"}, "PMI_SIZE is set and PMI_RANK is not"),
    ({"PMIX_RANK": "3"}, "nothing says of how many"),
    (TORCHRUN | {"RANK": "8"}, "found rank 8 of 8, wanted 0 to 7"),
    (TORCHRUN | {"RANK": "-1"}, "RANK: found '-1'"),
    (TORCHRUN | {"WORLD_SIZE": "x"}, "WORLD_SIZE: found 'x'"),
    (TORCHRUN | PLACE | {"MASTER_PORT": "70000"}, "MASTER_PORT: found 70000"),
    (TORCHRUN | PLACE | {"MASTER_PORT": "p"}, "MASTER_PORT: found 'p'"),
    (OMPI | TORCHRUN | {"RANK": "4"}, "OMPI_COMM_WORLD_RANK says rank 5 of 8, RANK says rank 4 of 8"),
    (OMPI | MPICH | {"PMI_SIZE": "16"}, "OMPI_COMM_WORLD_RANK says rank 5 of 8, PMI_RANK says rank 5 of 16"),
    (OMPI | SLURM | {"SLURM_PROCID": "4"}, "SLURM_PROCID says rank 4 of 8"),
    (TORCHRUN, "nothing says where rank 0 is"),
    (OMPI, "set MASTER_ADDR"),
    ({"RANK": "1", "WORLD_SIZE": "4"} | PLACE, "set LOCAL_RANK"),
    (TORCHRUN | PLACE | {"LOCAL_RANK": "4"}, "local rank 4 of 4"),
])
def test_contradictions(env, text):
    with pytest.raises(UsageError, match=text):
        launched(env)


@pytest.mark.parametrize(("nodes", "host"), [
    ("gb[03-06,09],login1", "gb03"), ("node7", "node7"), ("a1,a2", "a1"), ("rack[2,4-5]-ib", "rack2-ib"), ("n001.cluster", "n001.cluster"),
])
def test_first_host(nodes, host):
    assert first_host(nodes) == host
