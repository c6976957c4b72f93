"""Ranks that have a launch each build the same one, or none."""
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from threading import Barrier

import pytest

pytest.importorskip("cupy", reason="no CUDA line installed; install k3cuda[cu13] or k3cuda[cu12]")

from test_launch_step import PLAN, TP  # noqa: E402

from k3cuda.errors import CompileError, PlanError  # noqa: E402
from k3cuda.launch_step import step_program  # noqa: E402
from k3cuda.phases import Grid  # noqa: E402
from k3cuda.runtime.cuda_launch_peers import LaunchPeers  # noqa: E402


@pytest.fixture(scope="module")
def program():
    return step_program(PLAN, 1, Grid(sms=3), cache=2, rank_parts=TP, ranks=TP)


def outcomes(programs):
    """What each rank says of what it builds: "" or why it has none. `programs`: of each rank, or an error that it meets with."""
    said, all_here = [b""] * len(programs), Barrier(len(programs))

    def gather(rank, mine):
        said[rank] = mine
        all_here.wait(10)
        return list(said)

    def build(rank):
        peers = LaunchPeers(rank, 256, None, lambda mine: gather(rank, mine), nullcontext)
        try:
            with peers.agreed() as found:
                if isinstance(programs[rank], Exception):
                    raise programs[rank]
                found["program"] = programs[rank]
        except PlanError as e:
            return e.message
        return ""

    with ThreadPoolExecutor(len(programs)) as pool:
        return [job.result() for job in [pool.submit(build, rank) for rank in range(len(programs))]]


def test_ranks_that_have_the_same_program_go_on(program):
    assert outcomes([program, replace(program)]) == ["", ""]


@pytest.mark.parametrize("error", [PlanError("sizes that no phase has"), CompileError("no room", "look")])
def test_where_one_rank_has_no_launch_none_has(program, error):
    assert outcomes([program, error, program]) == [f"rank 1: {error.message}"] * 3


def test_other_blocks_are_another_launch(program):
    other = step_program(PLAN, 1, Grid(sms=4), cache=2, rank_parts=TP, ranks=TP)
    assert outcomes([program, program, other]) == ["ranks 0 and 2 have launches of different blocks"] * 3
