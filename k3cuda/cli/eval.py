"""`k3cuda eval`: questions with known answers from a local file, scored. docs/eval.md has the form of files and what the numbers mean."""
from dataclasses import asdict

import click

from .. import __version__
from ..errors import BenchmarkError, UsageError
from ..runtime.scorers import SCORERS
from . import options
from .answers import open_llm, work_for_rank_0
from .eval_results import ResultsFile, differing, read_results
from .group import stop_code
from .output import Result, say
from .prompts import read_file

MAX_BATCH = 8
SEED = 0           # a fixed one, so that two evaluations can be compared answer by answer
DRAFT = ("draft_model", "num_drafts", "acceptance", "draft_sampling", "draft_rows", "confidence_threshold")   # as asked for
_DEMO_SCORER = "exact"
_ALIASES = {"int": "integer", "needle": "mrcr"}


class _Scorer(click.Choice):
    def convert(self, value, param, ctx):
        return super().convert(_ALIASES.get(value, value), param, ctx)


@click.command("eval", cls=options.Command)
@options.model_and_file
@options.flags(
    options.flag("--scorer", type=_Scorer(list(SCORERS)), help="How an answer is scored; not needed for the tasks of demo."),
    options.flag("--runs", type=click.IntRange(min=1), default=1, metavar="N", aliases=["--repeats"],
                 help="Answers to each question, with seeds of their own.  [default: 1]"),
    options.flag("--limit", type=click.IntRange(min=1), metavar="N", help="The first N questions only.  [default: all]"),
    options.flag("--results", metavar="FILE.jsonl", help="Write every answer there; where it exists, go on in it."),
    options.flag("--baseline", metavar="FILE.jsonl", help="Results of another evaluation to compare with."),
    options.flag("--json", is_flag=True, help="One JSON document instead of text."), options.OUTPUT)
@options.conversation
@options.sampling
@options.server_engine(MAX_BATCH)
def evaluate(model, file, scorer, runs, limit, results, baseline, json, output, system, reasoning_effort, no_think, no_progress, **flags):
    """Answer the questions of a file and score the answers. The FILE demo is the held-out sets of the demo model's own tasks."""
    from ..runtime import evaluation
    from ..runtime.named_models import DEMO
    from ..runtime.sampling import SamplingParams

    effort = options.effort(reasoning_effort, no_think, model)
    engine = options.engine_arguments(flags)
    params = SamplingParams(**options.sampling_arguments(flags) | {"seed": SEED if flags["seed"] is None else flags["seed"]})
    if engine["acceptance"] == "synthetic":
        raise UsageError("--acceptance synthetic makes text that means nothing", "leave it out to score answers")
    work_for_rank_0(model, **engine)
    text, scorer = _questions(file, scorer, limit, file == DEMO)
    items = evaluation.read_items(text, file, SCORERS[scorer], system)[:limit]
    theirs = None if baseline is None else _baseline(baseline)
    result, kept = Result(output), ResultsFile(results)
    with open_llm(model, not no_progress, **engine) as llm:
        setup = _setup(model, scorer, effort, params, llm, engine)
        kept.begin(setup, items)
        wanted = {(item.id, n): (item, n) for n in range(runs) for item in items}
        kept.answers |= {key: evaluation.rescored(a, wanted[key][0], SCORERS[scorer]) for key, a in kept.answers.items() if key in wanted}
        todo = [pair for key, pair in wanted.items() if key not in kept.answers]
        if len(todo) < len(wanted):
            say(f"{len(wanted) - len(todo)} of {len(wanted)} answers are in {results} already")
        code = _run(evaluation.run(llm, todo, params, params.seed, effort, SCORERS[scorer], 2 * engine["max_batch"]), kept, len(wanted), len(todo))
    kept.close()
    answers = [kept.answers[key] for key in wanted if key in kept.answers]
    document = {"model": model, "scorer": scorer, "wanted": len(wanted)} | evaluation.summary(answers)
    document |= {"tasks": _by_task(answers, evaluation) if file == DEMO else None, "setup": setup, "comparison": None}
    if theirs is not None:
        others = [evaluation.rescored(a, wanted[key][0], SCORERS[scorer]) for key, a in theirs[1].items() if key in wanted and a["error"] is None]
        document["comparison"] = evaluation.compare(answers, others) | {"differs": differing(theirs[0], setup)}
    result.document(document, 2) if json else result.write(_text(document))
    result.close()
    if code == 0 and document["failed"]:
        first = next(a for a in answers if a["error"] is not None)
        raise BenchmarkError(f"{document['failed']} of {len(wanted)} answers failed, the first one to {first['id']!r:.60}: {first['error']}",
                             "the score is over the others; with --results only these are tried again")
    return code


def _questions(file: str, scorer: str | None, limit: int | None, is_demo: bool) -> tuple[str, str]:
    """(JSON lines, name of the scorer)."""
    if is_demo:
        from ..runtime.demo_tasks import SET_SIZE, TASKS, held_out_lines

        if scorer not in (None, _DEMO_SCORER):
            raise UsageError(f"--scorer: found {scorer} for the tasks of demo, whose answers are {_DEMO_SCORER}", "leave it out")
        most = SET_SIZE * len(TASKS)
        return held_out_lines(min(limit or most, most)), _DEMO_SCORER
    if scorer is None:
        raise UsageError(f"no --scorer for {file}", f"give one of {', '.join(SCORERS)}")
    return read_file(file), scorer


def _by_task(answers, evaluation) -> dict:
    """Counts and scores of each task by its name, as of all together."""
    from ..runtime.demo_tasks import task_of

    names = dict.fromkeys(task_of(a["id"]) for a in answers)
    return {name: evaluation.summary(a for a in answers if task_of(a["id"]) == name) for name in names}


def _baseline(path: str) -> tuple[dict, dict]:
    setup, answers, _ = read_results(path)
    if setup is None or not answers:
        raise UsageError(f"{path}: found no answers to compare with", "give the --results of another evaluation")
    return setup, answers


def _setup(model: str, scorer: str, effort: str, params, llm, engine: dict) -> dict:
    """All that decides about an answer besides its prompt. What the checkpoint's own defaults fill in is filled in."""
    backend = llm.backend
    return {"version": __version__, "model": model, "scorer": scorer, "reasoning_effort": effort,
            "sampling": asdict(params.resolved(llm.generation_config)) | {"stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids)},
            "max_model_len": llm.max_model_len, "tp": backend.tp, "kv_cache_dtype": backend.kv_cache_dtype, "decode_backend": backend.name,
            "gpu": backend.gpu, "draft": {name: engine[name] for name in DRAFT} if engine["draft_model"] else None}


def _run(answers, kept: ResultsFile, total: int, todo: int) -> int:
    """The exit code. What was answered before an interrupt is kept."""
    try:
        for number, answer in enumerate(answers, total - todo + 1):
            kept.add(answer)
            say(f"{number}/{total} {answer['id']}: " + (f"failed, {answer['error']}" if answer["error"] else
                                                         f"{answer['score']:g}, {answer['completion_tokens']} tokens, {answer['finish_reason']}"))
    except KeyboardInterrupt as stop:
        return stop_code(stop)
    finally:
        answers.close()
    return 0


def _score(d: dict) -> str:
    return "no answer was scored" if d["score"] is None else f"{d['score']:.4f}   95 % interval {d['low']:.4f} to {d['high']:.4f}, {d['items']} items"


def _text(d: dict) -> str:
    lines = [f"{d['scorer']} score   {_score(d)}", *(f"{name:<12}  {_score(part)}" for name, part in (d["tasks"] or {}).items()),
             f"answers   {d['answers']} of {d['wanted']}; {d['cut']} cut by length, {d['unread']} with nothing to score, {d['failed']} failed",
             f"tokens    {d['completion_tokens']}, {d['reasoning_tokens']} of them reasoning"]
    if d["acceptance_length"] is not None:
        lines.append(f"drafts    {d['acceptance_length']:.2f} tokens a verify step")
    if c := d["comparison"]:
        if not c["items"]:
            lines.append("baseline  no answer to the same prompts")
        else:
            p = "" if c["sign_test_p"] is None else f", sign test p = {c['sign_test_p']:.3g}"
            lines.append(f"baseline  {c['baseline']:.4f}, here {c['score']:.4f} on the {c['items']} items of both: {c['better']} better, {c['worse']} worse{p}")
        lines.append(f"differs   {', '.join(c['differs']) or 'nothing in the setup'}")
        lines += [f"changed   {x['id']} run {x['run']}: {x['baseline']:g} -> {x['score']:g}" for x in c["changed"]]
    return "\n".join(lines) + "\n"
