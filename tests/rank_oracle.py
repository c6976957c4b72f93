"""What ranks must bring each other, whatever carries it: what virtual ranks of one process do."""
import math
import threading

import numpy as np

from k3cuda.buffers import DTYPE_BYTES, buffer_shape
from k3cuda.draft_plan import DraftPlan
from k3cuda.emit import arena_offsets, layout_of
from k3cuda.runtime.collectives import VirtualRanks, members
from k3cuda.stages import GATHER, STACK
from k3cuda.tables import tables_of


def check_moves(ranks, shapes, rng) -> None:
    """Every collective of `ranks`, between all of them and in groups, one a thread, on random parts of each shape: the arrays of virtual ranks."""
    tp = len(ranks)
    for shape in shapes:
        sources = [rng.normal(size=shape).astype(np.float32) for _ in range(tp)]
        for name, group in ((n, g) for n in ("gather", "scatter") for g in range(1, tp + 1) if tp % g == 0):
            got = [None] * tp

            def run(r, name=name, group=group, got=got, sources=sources):
                got[r] = getattr(ranks[r], name)([sources[r]], group)[0]

            threads = [threading.Thread(target=run, args=(r,)) for r in range(tp)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for mine, wanted in zip(got, getattr(VirtualRanks(tp), name)(sources, group), strict=True):
                for a, b in zip(mine, wanted, strict=True):
                    np.testing.assert_array_equal(a, b)


def collectives_of(plan) -> list[tuple[str, int, tuple]]:
    """(name, number of a layer where its buffers have some, moves) of every collective that moves something else than those before it."""
    ops = [op for op in (plan.context + plan.ops if isinstance(plan, DraftPlan) else plan.ops) if op.stage.moves]
    return list(dict.fromkeys((op.stage.name, op.kind_index * (op.stage.moves[0].source == "draft_logits_part"), op.stage.moves) for op in ops))


def check_plan(plan, rows, launches, times=1) -> None:
    """Every collective of a step of up to `rows` rows, `times` times over with other values, on arenas in host memory: what the shapes of its buffers say
    arrives, and nothing around it changes. Every rank runs on its own.

    Args:
        launches: (rank, name, [(layout, source, target)]) -> what is launched for a collective.
    """
    tables, (offsets, size) = tables_of(plan), arena_offsets(plan)
    rng = np.random.default_rng(rows)
    arenas = [rng.integers(0, 256, size, np.uint8) for _ in range(plan.tp)]
    before, dice = [a.copy() for a in arenas], [np.random.default_rng((rows, r)) for r in range(plan.tp)]

    def view(arena, name, layer):
        b = tables.buffers[name]
        shape, of = buffer_shape(b, tables.dims), offsets[name]
        width = DTYPE_BYTES[b.dtype]
        whole = arena[of:of + math.prod(shape) * width].view(f"u{width}").reshape(shape)
        return whole[layer] if b.is_layered else whole

    def places(rank, moves, layer):
        base, layouts = arenas[rank].ctypes.data, [layout_of(m, plan, tables, rows) for m in moves]
        return [(at, base + offsets[m.source] + layer * at.source_layer, base + offsets[m.target] + layer * at.target_layer) for m, at in zip(moves, layouts)]

    found = collectives_of(plan)
    sent = list(dict.fromkeys((m.source, layer) for _, layer, moves in found for m in moves))
    assert not {name for name, _ in sent} & {m.target for _, _, moves in found for m in moves}
    todo = [[x for name, layer, moves in found for x in launches(r, name, places(r, moves, layer))] for r in range(plan.tp)]
    trouble = []

    def run(rank):
        try:
            for _ in range(times):
                for name, layer in sent:
                    part = view(arenas[rank], name, layer)
                    part[...] = dice[rank].integers(0, 1 << (8 * part.itemsize - 1), part.shape)   # no word of them is the one that an exchange changes
                for launch in todo[rank]:
                    launch.launch()
        except Exception as e:   # else the thread would end unseen
            trouble.append(e)

    threads = [threading.Thread(target=run, args=(r,)) for r in range(plan.tp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not trouble, trouble
    for r in range(plan.tp):
        wanted = before[r].copy()
        for name, layer in sent:
            view(wanted, name, layer)[...] = view(arenas[r], name, layer)
        for m, layer in ((m, layer) for _, layer, moves in found for m in moves):
            mine = members(r, plan.dcp if m.in_group else plan.tp)
            count = plan.padded_seqs(rows) if "seqs" in tables.buffers[m.source].shape else rows
            target, sources = view(wanted, m.target, layer), [view(arenas[i], m.source, layer)[:count] for i in mine]
            if m.how == GATHER:
                source = tables.buffers[m.source]
                target[:count] = np.concatenate(sources, axis=source.cut - source.is_layered)
            else:
                n, place = math.prod(target.shape[2:]), r - mine[0]
                for i, source in enumerate(sources):
                    target[i, :rows] = source if m.how == STACK else source.reshape(rows, -1)[:, place * n:(place + 1) * n].reshape(rows, *target.shape[2:])
        np.testing.assert_array_equal(arenas[r], wanted, err_msg=f"rank {r}: also what lies around the targets")
