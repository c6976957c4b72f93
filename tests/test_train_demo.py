"""What trains the demo model, as far as it needs no PyTorch: its vocabulary, its rows of text, and the mistakes that its test sets must see.

`scripts/train_demo.py` itself compares what it wrote with the reference (docs/demo.md).
"""
import sys

import numpy as np
import pytest
from command import ROOT
from models import backend, feed, headdims, open_slot, relative

sys.path.append(str(ROOT / "scripts"))
from demo_training.mistakes import MISTAKES, caught_by, injected  # noqa: E402
from demo_training.rows import ANSWER, PADDING, SHARES, SHORT, TEXT, Rows, steps  # noqa: E402
from demo_training.shapes import config, draft_json  # noqa: E402
from demo_training.vocabulary import BASE_SIZE, train_tokenizer  # noqa: E402
import mistakes  # noqa: E402
from install_demo import MOST_BYTES  # noqa: E402
from k3cuda.draft_config import GQA, MLA, DraftConfig  # noqa: E402
from k3cuda.draft_weights import cut_weights, draft_bytes  # noqa: E402
from k3cuda.emit import no_kernels  # noqa: E402
from k3cuda.runtime.chat import encode_chat  # noqa: E402
from k3cuda.runtime.demo_tasks import ADJECTIVES, MONTHS, NOUNS, TASKS, UNITS, VERBS, Dice, is_held_out  # noqa: E402
from k3cuda.runtime.kernel_sizes import size_misfits  # noqa: E402
from k3cuda.runtime.named_models import DEMO  # noqa: E402
from k3cuda.runtime.tiny_random import TINY_RANDOM  # noqa: E402
from k3cuda.runtime.tokenizer import NUM_SPECIAL, Tokenizer  # noqa: E402
from k3cuda.weights import LEGAL_TP, checkpoint_bytes, legal_cuts, legal_tps  # noqa: E402


REFERENCE_TESTS = (ROOT / "tests/test_reference.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def rows():
    return Rows(train_tokenizer())


def test_sizes_fit_the_package_the_kernels_and_every_number_of_ranks(rows):
    cfg = config("demo", rows.tokenizer)
    assert legal_tps(cfg) == list(LEGAL_TP) and not any(size_misfits(cfg, tp) for tp in legal_tps(cfg))
    size = checkpoint_bytes(cfg)
    for family in (MLA, GQA):
        draft = DraftConfig.from_json(draft_json(family, cfg, rows.tokenizer), cfg)
        assert legal_cuts(cut_weights(draft), draft.dims()) == list(LEGAL_TP) and no_kernels(draft) is None
        size += draft_bytes(draft, 1)
    assert size < MOST_BYTES - 200_000   # of headers and small files


def test_every_word_is_one_token_and_every_digit(rows):
    encode = rows.tokenizer.encode
    assert rows.tokenizer.vocab_size == BASE_SIZE + NUM_SPECIAL and rows.tokenizer.vocab_size % 16 == 0
    names = [*NOUNS, *ADJECTIVES, *VERBS, *MONTHS, *(unit for pair in UNITS for unit in pair[:2])]
    assert [n for n in names if len(encode(f" {n}")) != 1] == [] and [n for n in NOUNS if len(encode(n)) != 1] == []
    assert len(encode("1234567890")) == 10


def test_files_hold_the_vocabulary(rows, tmp_path):
    rows.tokenizer.write_files(tmp_path)
    read = Tokenizer.from_dir(tmp_path)
    assert read.encode("Sort: 12 river") == rows.tokenizer.encode("Sort: 12 river") and read.special == rows.tokenizer.special


def test_a_row_is_the_chats_own_rendering(rows):
    turns = [("17 + 25 =", "42"), ("Copy: x x", "x x")]
    ids, kinds = rows.row(turns, 100)
    messages = [m for asked, answer in turns for m in ({"role": "user", "content": asked}, {"role": "assistant", "content": answer})]
    options = {"thinking": False, "thinking_effort": None}
    want = encode_chat(rows.tokenizer, messages, add_generation_prompt=False, **options)
    assert ids[kinds != PADDING].tolist() == want and not ids[len(want):].any()
    first = len(encode_chat(rows.tokenizer, messages[:1], **options))   # where an answer is to begin
    assert (kinds[:first] == TEXT).all() and kinds[first] == ANSWER and ids[first] == rows.tokenizer.encode("4")[0]
    last = first + int((kinds[first:] != ANSWER).argmax())
    assert ids[last - 1] == rows.tokenizer.end_of_msg_id   # the end of the message is learned with the answer


def test_problems_fit_their_rows(rows):
    ids, kinds = rows.short(Dice(5), 2000)
    assert ids.shape == (2000, SHORT) and (kinds == ANSWER).any(1).all()
    for task in SHARES:
        assert rows.held_out(task, 50)[0].shape == (50, SHORT)


@pytest.mark.parametrize("length", [128, 512, 2048])
def test_long_rows_ask_for_nothing_that_is_held_out(rows, length):
    ids, kinds = rows.long(Dice(length), 40 if length < 2048 else 12, length)
    asked = copied = 0
    for row, kind in zip(ids, kinds):
        text = rows.tokenizer.decode(row[kind != PADDING].tolist())
        copied += text.count("Copy:")
        for name in [q.partition("?")[0] for q in text.split("What is the code of ")[1:]]:
            code = text.split(f"The code of {name} is ")[1][:4]
            assert not is_held_out("needle", f"{name} {code}")
            asked += 1
    assert asked > len(ids) and copied and (kinds != PADDING).mean() > 0.7


def test_a_test_of_retrieval_is_as_long_as_it_says(rows):
    problem = TASKS["needle"].draw(Dice(3), held_out=True)
    ids, kinds = rows.row([(problem.prompt, problem.answer)], 2048)
    assert 1980 <= (kinds != PADDING).sum() <= 2020


def test_steps_are_the_same_from_one_process_and_from_several(rows, tmp_path):
    rows.tokenizer.write_files(tmp_path)
    wanted = [(s, 3, 1, 128) for s in range(3)]
    for one, several in zip(steps(str(tmp_path), {}, 7, wanted, 0), steps(str(tmp_path), {}, 7, wanted, 2), strict=True):
        assert all(np.array_equal(a, b) for x, y in zip(one, several, strict=True) for a, b in zip(x, y, strict=True))


def logits():
    be = backend(headdims())
    open_slot(be, 0)
    return feed(be, 0, [3, 17, 9, 40, 2, 60, 5, 11], [8])


def test_every_mistake_moves_the_logits_and_leaves_nothing_behind():
    right = logits()
    for name in MISTAKES:
        with injected(name):
            assert relative(logits(), right) > (3e-3 if caught_by(name) == "test_logits_and_layers" else 1e-7), name
            assert f"def {caught_by(name)}(" in REFERENCE_TESTS
    assert np.array_equal(logits(), right)


def test_source_that_is_not_there_is_no_mistake(monkeypatch):
    monkeypatch.setitem(MISTAKES, "x", [("kda", "no such source", "")])
    with pytest.raises(ValueError, match="found 0 times in kda.py"):
        with injected("x"):
            pass


@pytest.mark.parametrize("model", [DEMO, TINY_RANDOM])
def test_costs_of_mistakes_of_a_model_that_has_a_name(model, monkeypatch, capsys):
    """Both names, whatever stands for them in this version; problems of every task fit their rows."""
    name, costs = "E8M0 bias off by one", mistakes.costs
    monkeypatch.setattr(mistakes, "MISTAKES", (name,))
    monkeypatch.setattr(mistakes, "costs", lambda model, rows: costs(model, rows[:1]) + np.arange(len(rows)))   # of the others it is seconds
    assert mistakes.main([model, "--items", "1"], standalone_mode=False) is None
    first, *_, row = capsys.readouterr().out.strip().split("\n")
    assert first.startswith(f"{len(SHARES)} problems, ") and row.startswith(f"| {name} | ") and not row.startswith(f"| {name} | 0 ")
