"""The loop: a schedule in steps, a loss on answers, held-out scores on the way, a state that a later call goes on from."""
import json
import time
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from k3cuda.runtime.demo_tasks import NEEDLE_TOKENS

from .captured import Captured
from .model import K3
from .optimizer import Optimizer, balance
from .rows import ANSWER, LONG_TASK, PADDING, Rows, steps

TEXT_WEIGHT = 0.1     # of a token that is no answer
WARM, COOL = 0.03, 0.4   # parts of the steps in which the rate rises, and falls to 0
BIAS_RATE, EARLY_BIAS, EARLY = 2e-3, 1e-2, 0.1   # of the router's biases; the second for the first part of the steps, when loads are most uneven
SOON = 0.2            # of the steps: where their number is put right if steps take longer than was measured before
AGAIN = 0.57          # of the steps: where it is chosen again, from what a step takes by then; rows are long from 0.5 on
SLACK = 1.04          # looks at the held-out sets and saved states beside the steps
ENOUGH = 0.9          # of the steps: a model that was stopped behind it is as good as done, its rate is a quarter and less
EVAL_EVERY = 0.05     # part of the steps between two looks at the held-out sets


@dataclass(frozen=True)
class Schedule:
    """What a step is made of.

    Attributes:
        count: steps. short: rows of one problem. long_tokens: tokens of rows with long texts.
        lengths: (part of the steps after which it begins, length of a long row).
    """

    count: int
    short: int
    long_tokens: int
    lengths: tuple[tuple[float, int], ...]

    def length(self, step: int) -> int:
        return next(length for start, length in reversed(self.lengths) if step >= start * self.count)

    def sizes(self, step: int) -> tuple[int, int, int]:
        length = self.length(step)
        return self.short, self.long_tokens // length, length

    def rate(self, step: int) -> float:
        done = step / self.count
        return min(1, (step + 1) / (WARM * self.count), (1 - done) / COOL)

    def is_cooling(self, step: int) -> bool:
        return step >= (1 - COOL) * self.count


class Trainer:
    """Args: folder: where tokenizer, state and log are. device: "cuda" or "cpu". is_captured: steps are CUDA graphs. options: of `Rows`, beside the tokenizer.
    watched: held-out items of a task that are looked at on the way.

    Attributes:
        schedule: must be set before `run`, which may choose another number of steps unless `is_fixed`.
        measured: seconds of a step by the length of its long rows, once `measure` has run.
    """

    def __init__(self, model: K3, tokenizer, folder, seed: int, workers: int, device: str, options: dict, watched: int = 100, is_captured: bool = False):
        self.model, self.folder, self.seed, self.workers, self.device, self.options = model.to(device), folder, seed, workers, device, options
        self.optimizer, self.step, self.schedule, self.watched = Optimizer(model.named_parameters()), 0, None, watched
        self.is_fixed, self.measured = False, {}
        self.rows = Rows(tokenizer, **options)
        self.log_file = (folder / "train.jsonl").open("a")
        self.is_captured, self._sets = is_captured, {}
        self._captured = Captured(self._gradients, self.model.parameters()) if is_captured else None

    def log(self, **values) -> None:
        line = json.dumps(values)
        print(line, flush=True)
        self.log_file.write(line + "\n")
        self.log_file.flush()

    def tensors(self, batches):
        return [tuple(torch.from_numpy(array).to(self.device) for array in arrays) for arrays in batches]

    def losses(self, ids, kinds):
        """Sum of weighted losses and of weights: of answers, and of other text."""
        hidden = self.model(ids, kinds != PADDING)[:, :-1]
        of_tokens = F.cross_entropy(self.model.logits(hidden).flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        kinds = kinds[:, 1:].flatten()
        answer, text = (kinds == ANSWER).float(), ((kinds != ANSWER) & (kinds != PADDING)).float()
        return (of_tokens * answer).sum() / answer.sum(), (of_tokens * text).sum() / text.sum()

    def backward(self, batches) -> torch.Tensor:
        """Gradients of one step; [batches, 2] losses, detached, loads of the experts, and how many choices were left out."""
        return self._captured(batches) if self._captured else self._gradients(self.tensors(batches))

    def _gradients(self, batches):
        found, loads, left_out = [], None, 0
        for ids, kinds in batches:
            answer, text = self.losses(ids.long(), kinds)
            ((answer + TEXT_WEIGHT * text) / len(batches)).backward()
            found.append(torch.stack([answer.detach(), text.detach()]))
            loads = self.model.loads if loads is None else [a + b for a, b in zip(loads, self.model.loads)]
            left_out = left_out + self.model.left_out
        return torch.stack(found), loads, left_out

    def measure(self, short: int, long_tokens: int, lengths) -> float:
        """Mean seconds of a step over the whole schedule, from a few of each kind; gradients are thrown away."""
        ends = [start for start, _ in lengths[1:]] + [1.0]
        mean = 0.0
        for (start, length), end in zip(lengths, ends):
            batches = self.rows.step(self.seed, 1 << 40, short, long_tokens // length, length)   # a step that no run comes to
            for i in range(3):
                began = self.now()
                self.backward(batches)
                seconds = self.now() - began
            self.log(measured_length=length, seconds=round(seconds, 4))
            mean += seconds * (end - start)
            self.measured[length] = seconds
        for _ in range(2):   # the first update sets up what all others find: ten times as long
            self.backward(batches)
            began = self.now()
            self.optimizer.step(0.0)
            update = self.now() - began
        self.optimizer.count = 0
        for values in self.optimizer.state.values():
            for x in values:
                torch._foreach_zero_(x) if isinstance(x, list) else x.zero_()
        self.measured = {length: seconds + update for length, seconds in self.measured.items()}
        return mean + update

    def now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.monotonic()

    def run(self, until: float) -> bool:
        """Trains to the schedule's end, or to the time `until` (of time.monotonic), and keeps the state; False where much is left to do."""
        every, began, saved = max(1, round(EVAL_EVERY * self.schedule.count)), time.monotonic(), time.monotonic()
        soon, again = round(SOON * self.schedule.count), round(AGAIN * self.schedule.count)
        if self.step >= again:   # an earlier call has chosen, and the rate may be falling
            again = float("inf")
        expected, first, recent, cooled = 0.0, None, None, None
        for batches in steps(str(self.folder), self.options, self.seed, self._wanted(), self.workers):
            first = first or self.now()   # text has begun to come
            expected += self.measured.get(self.schedule.length(self.step), 0.0)
            losses, loads, left_out = self.backward(batches)
            rate = self.schedule.rate(self.step)
            if until < float("inf") and self.schedule.is_cooling(self.step):   # steps may still turn out slower: at the end of the time the rate is 0 whatever
                cooled = cooled or time.monotonic()
                rate = min(rate, max(0.0, (until - time.monotonic()) / (until - cooled)) if cooled < until else 0.0)
            self.optimizer.step(rate)
            balance(self.model, loads, EARLY_BIAS if self.step < EARLY * self.schedule.count else BIAS_RATE * min(1, 2 * rate))
            self.step += 1
            recent = recent or (self.step, self.now())   # behind the first step: neither the start of the workers nor what a device does once is a step's time
            if self.step % max(1, every // 5) == 0:
                (short, short_text), (long, long_text) = (losses.tolist() * 2)[:2]   # without long rows the same twice
                self.log(step=self.step, of=self.schedule.count, s=round(time.monotonic() - began, 1), length=self.schedule.length(self.step - 1),
                         short=round(short, 4), long=round(long, 4), short_text=round(short_text, 3), long_text=round(long_text, 3),
                         left_out=float(left_out), fullest=round(max(float(x.max() / x.mean()) for x in loads), 2))
            if self.step % every == 0 or self.step == self.schedule.count:
                self.log(step=self.step, held_out=self.scores(self.watched))
                recent = (self.step, self.now())
            if not self.is_fixed and until < float("inf"):
                if self.step == soon and (slower := (self.now() - first) / (expected * SLACK) if expected else 1) > 1:
                    self._reschedule(self.step + int((self.schedule.count - self.step) / slower))
                    again = round(AGAIN * self.schedule.count)
                if again <= self.step > recent[0]:   # not right behind a look at the held-out sets: there is nothing to measure
                    again = float("inf")
                    seconds = (self.now() - recent[1]) / (self.step - recent[0])
                    self._reschedule(min(self.step + int((until - self.now()) / (seconds * SLACK)), 2 * self.schedule.count))
            if self.step == self.schedule.count:
                break
            if time.monotonic() > until:
                self.save()
                return self.step >= ENOUGH * self.schedule.count
            if time.monotonic() - saved > 120:
                self.save()
                saved = time.monotonic()
        self.save()
        return True

    def _wanted(self):
        step = self.step
        while step < self.schedule.count:
            yield step, *self.schedule.sizes(step)
            step += 1

    def _reschedule(self, count: int) -> None:
        """Another number of steps; the rate has not begun to fall yet."""
        count = max(count, self.step + 1)
        self.log(at_step=self.step, steps_before=self.schedule.count, steps=count)
        self.schedule = replace(self.schedule, count=count)

    @torch.no_grad()
    def scores(self, count: int) -> dict[str, float]:
        """Share of held-out items whose whole answer, its end included, is the likeliest at every place: what greedy decoding gives exactly."""
        cfg = self.model.cfg
        found, room, self.model.room = {}, self.model.room, cfg.num_experts / cfg.num_experts_per_token   # as when decoding, nobody is left out
        for task in (*self.rows.shares, LONG_TASK):
            at_once = 8 if task == LONG_TASK else 250
            if task == LONG_TASK and self.schedule.length(min(self.step, self.schedule.count - 1)) < NEEDLE_TOKENS:
                continue   # rows were never so long yet
            if (task, count) not in self._sets:
                self._sets[task, count] = self.rows.held_out(task, count)
            ids, kinds = self._sets[task, count]
            right = []
            for part in range(0, count, at_once):
                x, kind = self.tensors([(ids[part:part + at_once], kinds[part:part + at_once])])[0]
                x = x.long()
                best = self.model.logits(self.model(x, kind != PADDING)[:, :-1]).argmax(-1)
                right.append(((best == x[:, 1:]) | (kind[:, 1:] != ANSWER)).all(1).float())
            found[task] = round(float(torch.cat(right).mean()), 3)
        self.model.room = room
        return found

    def end(self, count: int, began: float) -> None:
        """The log's last line: steps that were trained, whatever the schedule wanted; scores of `count` held-out items a task; seconds since `began`."""
        self.log(trained=self.step, held_out=self.scores(count), s=round(time.monotonic() - began, 1))

    def save(self) -> None:
        path = self.folder / "state.pt"
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step,
                    "schedule": self.schedule.__dict__, "seed": self.seed}, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def load(self) -> None:
        found = torch.load(self.folder / "state.pt", map_location=self.device, weights_only=True)
        if found["seed"] != self.seed:
            raise SystemExit(f"{self.folder / 'state.pt'} was made with seed {found['seed']}, now it is {self.seed}: give another folder")
        self.model.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
        self.step, self.schedule = found["step"], Schedule(**found["schedule"])

