"""What rank 0 asks of the others for each call of a backend, as messages: a few hundred bytes a step, no object of Python's own."""
import functools
import json
from dataclasses import asdict

import numpy as np

from .backend import DraftAsk, Judge, StepRows
from .sampling import Draw, SamplingParams

_ROWS = ("token_ids", "slots", "positions", "logit_rows")
_LAW = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")   # what a draw depends on


def _rows(rows: StepRows) -> dict:
    return {name: getattr(rows, name).tolist() for name in _ROWS} | {"stand": rows.stand}


def _draw(draw: Draw) -> dict:
    law = json.dumps({name: getattr(draw.params, name) for name in _LAW})
    told = {"law": law, "seed": draw.seed, "position": draw.position, "stream": draw.stream, "after_sampled": draw.after_sampled}
    if draw.params.has_penalties:   # only they look at the text before
        told |= {"prompt_ids": list(draw.prompt_ids), "output_ids": list(draw.output_ids)}
    return told


@functools.lru_cache(maxsize=256)
def _params(law: str) -> SamplingParams:
    return SamplingParams(**json.loads(law))


def _drawn_from(told: dict) -> Draw:
    return Draw(params=_params(told.pop("law")), **told)


# For each call: its arguments as JSON, and back.
ENCODE = {
    "open_slot": lambda slot, pages: [slot, list(pages)],
    "copy_slot": lambda source, target, pages: [source, target, list(pages)],
    "step": lambda rows: [_rows(rows)],
    "sample": lambda draws: [[_draw(d) for d in draws]],
    "commit": lambda accepted: [np.asarray(accepted, bool).tolist()],
    "propose": lambda asks: [[asdict(a) for a in asks]],
    "accept": lambda judges: [[{"slot": j.slot, "draft_ids": list(j.draft_ids), "draws": [_draw(d) for d in j.draws]} for j in judges]],
}
DECODE = {
    "open_slot": lambda slot, pages: (slot, pages),
    "copy_slot": lambda source, target, pages: (source, target, pages),
    "step": lambda rows: (StepRows(*(np.array(rows[name], np.int32) for name in _ROWS), rows["stand"]),),
    "sample": lambda draws: ([_drawn_from(d) for d in draws],),
    "commit": lambda accepted: (np.array(accepted, bool),),
    "propose": lambda asks: ([DraftAsk(**a) for a in asks],),
    "accept": lambda judges: ([Judge(j["slot"], tuple(j["draft_ids"]), tuple(_drawn_from(d) for d in j["draws"])) for j in judges],),
}


def tokens_of(name: str, result) -> list:
    """What a call decided, which must be the same on every rank; empty for calls that decide nothing."""
    if name == "sample":
        return [drawn.token_id for drawn in result]
    if name == "accept":
        return [[judged.num_accepted, *(drawn.token_id for drawn in judged.drawn)] for judged in result]
    return [list(drafted.token_ids) for drafted in result] if name == "propose" else []
