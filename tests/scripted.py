"""A backend that says what it is told to, and a fixture that makes LLMs on it."""
import numpy as np
import pytest
from fake_backend import FakeBackend

from k3cuda import LLM, SamplingParams, llm as llm_module
from k3cuda.errors import CheckpointError
from k3cuda.runtime.open_model import Model
from k3cuda.runtime.tokenizer import MINI_TOKENIZER_DIR, Tokenizer

TOKENIZER = Tokenizer.from_dir(MINI_TOKENIZER_DIR)
END = TOKENIZER.end_of_msg_id
GREEDY = SamplingParams(temperature=0, max_tokens=12)
USER = [{"role": "user", "content": "hi"}]


class Scripted(FakeBackend):
    """Says `script` from the end of the prompt on, then end of message for ever; without a script, what the hash says."""

    script = None

    def _law(self, slot, position):
        tokens = (self.slots[slot].tokens + self.pending[slot])[:position + 1]
        if self.script is None or self.bad(tokens):
            return super()._law(slot, position)
        start = self.starts.setdefault(slot, position)
        row = np.zeros(self.cfg.vocab_size, np.float32)
        row[self.script[position - start] if position - start < len(self.script) else END] = 50  # far above all others
        return row

    def open_slot(self, slot, pages):
        super().open_slot(slot, pages)
        self._begin(slot)

    def copy_slot(self, source, target, pages):
        super().copy_slot(source, target, pages)
        self._begin(target)

    def _begin(self, slot):
        self.starts = getattr(self, "starts", {})
        self.starts.pop(slot, None)


@pytest.fixture
def fake(monkeypatch):
    """Makes LLMs on a scripted backend."""
    made = []

    def make(script=None, *, tokenizer=TOKENIZER, generation_config=None, seed=None, eos_ids=(END,), prefix_cache=0, model="checkpoint", **backend):
        opened = Scripted(TOKENIZER.vocab_size, **backend)
        opened.script = None if script is None else TOKENIZER.encode(script, allow_special=True)
        parts = Model(opened, tokenizer, generation_config or {}, eos_ids, CheckpointError("no tokenizer here"), prefix_cache)
        monkeypatch.setattr(llm_module, "open_model", lambda *_, **__: parts)
        made.append(LLM(model, seed=seed))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


# Chat answers, as the script of a backend.
THOUGHT = "why not<|close|>think<|sep|><|open|>response<|sep|>"
CLOSED = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
