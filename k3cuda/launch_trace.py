"""The course of a step in one launch as its blocks noted it (LaunchStamps in kernels_cu/launch_ring.cuh): a Chrome trace, a picture, and medians by kind of phase."""
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .bench.bars import Bar, Curve, picture
from .block_program import BlockProgram
from .chrome_trace import bar, line_name, moment, process_name, value
from .launch_mla import MlaAttend
from .launch_source import ISSUE_CYCLES, STAMPS

ROLES = ("consumers", "consumers, every other phase", "producers", "janitor")   # lines of a block: phases that are neighbours may overlap
CONSUMERS, _, PRODUCERS, JANITOR = range(len(ROLES))
BINS, LEAST_NS = 600, 1000   # of the curve of bytes a second: how many at most, and how long at least
POINTS = 4                   # that the bytes of a bin of LaunchStamps.issued are spread over


def phases_of(program: BlockProgram, layers: range | None) -> range:
    """Phases from the first to the last one of `layers`, with what runs between them; None: all."""
    found = [i for i, step in enumerate(program.steps) if layers is None or step.layer in layers]
    return range(found[0], found[-1] + 1)


class Part(NamedTuple):
    """What a block did of a phase; nanoseconds since the first part of the trace began. What did not happen is None.

    Attributes:
        begins, input_here, units_done: its consumers came to it, all that it reads was there, its results were handed over.
        products_done: the last chain of products, before sums over leaves and stores. slot_clean: where its results go was clean.
        first_copy, last_copy: were issued. copied: bytes that they brought into the block's shared memory.
        cleared: the block knew that what the phase was the last to read is clean again everywhere.
    """

    block: int
    phase: int
    begins: int
    input_here: int
    units_done: int
    products_done: int | None
    slot_clean: int
    first_copy: int | None
    last_copy: int | None
    copied: int
    cleared: int | None


@dataclass(frozen=True)
class LaunchTrace:
    """`words` uint64 [blocks, phases, STAMPS], `clocks` uint64 [blocks, 2, 2], `issued` uint32 [blocks, ISSUE_BINS]: LaunchStamps of the phases of `program` from
    `first` on."""

    program: BlockProgram
    first: int
    words: np.ndarray
    clocks: np.ndarray
    issued: np.ndarray

    @cached_property
    def _clock(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each block when it began, in nanoseconds since the first of them did, and nanoseconds of a cycle of its own clock."""
        (ns, own), (end_ns, end) = self.clocks.astype(np.int64).transpose(1, 2, 0)
        return ns - ns.min(), (end_ns - ns) / np.maximum(end - own, 1)

    @cached_property
    def _times(self) -> tuple[np.ndarray, int]:
        """(int64 [blocks, phases, STAMPS], nanoseconds since the launch began; that of the first part)."""
        (began, cycle), column = self._clock, lambda v: v[:, None, None]
        own = self.words.astype(np.int64) - column(self.clocks[:, 0, 1].astype(np.int64))
        times, begins = np.rint(column(began) + own * column(cycle)).astype(np.int64), STAMPS.index("begins")
        return times, int(times[:, :, begins][self.words[:, :, begins] > 0].min())

    @cached_property
    def parts(self) -> list[Part]:
        """Of every block the phases in which it had something to do, in their order."""
        times, zero = self._times
        happened, copied = self.words > 0, self.words[:, :, STAMPS.index("copied")]
        out = []
        for block, phase in np.argwhere(happened[:, :, STAMPS.index("begins")]):
            of = zip(STAMPS, happened[block, phase].tolist(), times[block, phase].tolist())
            since = {name: v - zero if did else None for name, did, v in of} | {"copied": int(copied[block, phase])}
            out.append(Part(int(block), self.first + int(phase), **{name: since[name] for name in Part._fields[2:]}))
        return out

    def name(self, phase: int) -> str:
        return self.program.steps[phase].name

    def rate(self) -> tuple[np.ndarray, np.ndarray]:
        """(edges [n + 1], nanoseconds since the first part; bytes a second [n]): when copies were issued, of all blocks. Pages of the cache, which come by a ring of their
        own, are spread evenly over their phase."""
        end, (began, cycle) = max(p.units_done for p in self.parts), self._clock
        edges = np.linspace(0, end, max(1, min(BINS, end // LEAST_NS)) + 1)
        block, at = np.nonzero(self.issued)
        total = np.zeros(len(edges) - 1)
        for i in range(POINTS):
            when = began[block] + (at + (i + 0.5) / POINTS) * ISSUE_CYCLES * cycle[block] - self._times[1]
            total += np.histogram(np.clip(when, 0, end), edges, weights=self.issued[block, at] / POINTS)[0]
        for p in self.parts:
            if p.copied and isinstance(self.program.kinds[self.program.weights[p.phase][0]], MlaAttend):
                total += np.diff(p.copied * np.clip((edges - p.first_copy) / max(p.last_copy - p.first_copy, 1), 0, 1))
        return edges, total / np.diff(edges) * 1e9

    def chrome(self) -> list[dict]:
        """A process a block with a line a role, and all blocks' terabytes a second as a counter."""
        steps, blocks, seen = self.program.steps, self.program.grid.sms, defaultdict(int)
        out = [process_name(blocks, "all blocks")]
        for block in range(blocks):
            out += [process_name(block, f"block {block}"), *(line_name(block, role, name) for role, name in enumerate(ROLES))]
        us = lambda ns: None if ns is None else round(ns / 1e3, 3)
        for p in self.parts:
            name, layer = self.name(p.phase), steps[p.phase].layer
            out.append(bar(name, p.block, CONSUMERS + seen[p.block] % 2, p.begins, p.units_done, layer=layer, phase=p.phase, input_here_us=us(p.input_here),
                           products_done_us=us(p.products_done), slot_clean_us=us(p.slot_clean)))
            seen[p.block] += 1
            if p.copied:
                out.append(bar(name, p.block, PRODUCERS, p.first_copy, p.last_copy, layer=layer, phase=p.phase, bytes=p.copied))
            if p.cleared is not None:
                out.append(moment(name, p.block, JANITOR, p.cleared, layer=layer, phase=p.phase))
        edges, rate = self.rate()
        return out + [value("TB/s", blocks, at, round(v / 1e12, 4)) for at, v in zip(edges, [*rate, 0.0])]

    def picture(self, title: str, ceiling: float) -> str:
        """SVG: bytes a second over time beside `ceiling`, and a line a block of bars from where a phase has its input to where its results are handed over."""
        edges, rate = self.rate()
        bars = [Bar(p.block, p.input_here / 1e3, p.units_done / 1e3, self.name(p.phase)) for p in self.parts]
        took, copied = max(p.units_done for p in self.parts) / 1e3, sum(p.copied for p in self.parts)
        curve = Curve(f"bytes a second; dashed: the read ceiling, {ceiling / 1e12:.2f} TB/s", edges / 1e3, rate, ceiling)
        note = f"{took:.1f} microseconds, {copied / 1e6:.1f} MB copied, {copied / took / 1e6:.2f} TB/s; a line a block, blank is waiting"
        return picture(bars, self.program.grid.sms, title, note, curve)

    def medians(self) -> dict[str, dict[str, float]]:
        """Microseconds of every kind of phase, the median of all of them.

        `hand_over`: from the last end of what a phase reads to the last block's input. `works`: from there to the last end. Of single blocks: `block_waits`, from
        begin to input, `unclean`, until its slot is clean, `block_works`, from input to end, `sums`, behind the last chain of products, `ahead`, from the last copy's
        issue to the input, and `weights_late`, from the input to the last copy's issue where that is later. `clears`: from the last block's input to clean slots
        everywhere. `mb`: megabytes that all blocks copy.
        """
        by_phase, of_kind = defaultdict(list), defaultdict(lambda: defaultdict(list))
        for p in self.parts:
            by_phase[p.phase].append(p)
        for phase, parts in sorted(by_phase.items()):
            found, last = of_kind[self.name(phase)], max(p.input_here for p in parts)
            if ends := [p.units_done for source in self.program.sources[phase] for p in by_phase.get(source, ())]:
                found["hand_over"].append(last - max(ends))
            found["works"].append(max(p.units_done for p in parts) - last)
            found["mb"].append(sum(p.copied for p in parts) / 1e3)
            if cleared := [p.cleared for p in parts if p.cleared is not None]:
                found["clears"].append(max(cleared) - last)
            for p in parts:
                found["block_waits"].append(p.input_here - p.begins)
                found["unclean"].append(p.slot_clean - p.begins)
                found["block_works"].append(p.units_done - p.input_here)
                if p.products_done is not None:
                    found["sums"].append(p.units_done - p.products_done)
                if p.copied:
                    found["ahead"].append(max(p.input_here - p.last_copy, 0))
                    found["weights_late"].append(max(p.last_copy - p.input_here, 0))
        return {kind: {name: float(np.median(v)) / 1e3 for name, v in found.items()} for kind, found in of_kind.items()}
