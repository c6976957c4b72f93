"""What every trace of a step in one launch holds to, under g++ and on a GPU."""
from collections import Counter

from k3cuda.launch_kinds import ExpertDown, ExpertUp, Product
from k3cuda.runtime import repack


def parts(program) -> list:
    """(block, phase) where a block has units of a phase."""
    return [(block, phase) for block, words in enumerate(program.words) for phase, at in enumerate(program.places(block)) if int(words[at]) >> 16]


def check_parts(trace, phases: range) -> None:
    """Every part of `phases` once, and its times in order."""
    assert Counter((p.block, p.phase) for p in trace.parts) == Counter(at for at in parts(trace.program) if at[1] in phases)
    for p in trace.parts:
        assert 0 <= p.begins <= p.input_here <= p.units_done and p.begins <= p.slot_clean, (trace.name(p.phase), p)
        if p.products_done is not None:
            assert p.input_here <= p.products_done <= p.units_done, (trace.name(p.phase), p)
        if p.copied:
            assert p.first_copy <= p.last_copy <= p.units_done, (trace.name(p.phase), p)


def check_bytes(trace, cfg, cache_bytes: int) -> None:
    """Of products each block's units; of experts whole experts, as many as rows can choose; of the cache pieces of 16 rows, as they are copied."""
    program, planned, found = trace.program, Counter(), Counter()
    for block, own in enumerate(program.schedule.programs):
        for phase, unit in own:
            planned[block, phase] += program.schedule.phases[phase].units[unit]
    for p in trace.parts:
        kind = program.kinds[program.weights[p.phase][0]]
        if isinstance(kind, Product):
            assert p.copied == planned[p.block, p.phase], (kind.name, p)
        elif isinstance(kind, (ExpertUp, ExpertDown)) or kind.name == "mla_attend":
            found[p.phase] += p.copied
        else:
            assert not p.copied, (kind.name, p)
    for phase, copied in found.items():
        kind = program.kinds[program.weights[phase][0]]
        if kind.name == "mla_attend":
            assert copied and copied % (16 * cfg.dims()["mla_cache_dim"] * cache_bytes) == 0
        else:
            experts, rest = divmod(copied, kind.expert_leaves * repack.leaf_bytes(kind.groups))
            assert not rest and cfg.num_experts_per_token <= experts <= program.rows * cfg.num_experts_per_token
    pages = sum(p.copied for p in trace.parts if trace.name(p.phase) == "mla_attend")
    assert trace.issued.sum(dtype=int) == sum(p.copied for p in trace.parts) - pages   # over time as over phases
    edges, rate = trace.rate()
    assert abs((rate * (edges[1:] - edges[:-1]) / 1e9).sum() / sum(p.copied for p in trace.parts) - 1) < 1e-6 and rate.min() >= 0
    assert {program.steps[phase].name for phase in found} == {"expert_up", "moe_down", "mla_attend"}
