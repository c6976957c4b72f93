"""Stored prefixes on a model, whichever backend runs it."""
import numpy as np

from k3cuda import LLM, SamplingParams
from k3cuda.runtime.checkpoint import Checkpoint


def same_bytes_with_and_without(model, **options) -> None:
    """Log-probabilities to the bit: KDA states, conv windows and pages of the cache are all in the copy."""
    vocab_size = Checkpoint.open(model).cfg.vocab_size
    first, other, end = (np.random.default_rng(seed).integers(0, vocab_size, n).tolist() for seed, n in ((0, 130), (1, 10), (2, 10)))
    prompts, found = [first, first, first[:100] + other, first[:100] + end], []
    for prefix_cache in (0, 2):
        with LLM(model, max_batch=1, max_model_len=256, prefix_cache=prefix_cache, **options) as llm:
            outputs = [llm.generate(p, SamplingParams(max_tokens=3, seed=i, logprobs=2, ignore_eos=True))[0] for i, p in enumerate(prompts)]
            turn = llm.generate([*first, *outputs[0].token_ids, *other], SamplingParams(max_tokens=3, seed=9, logprobs=2, ignore_eos=True))[0]
        found.append([o.logprobs for o in (*outputs, turn)])
        cached = [o.stats.cached_tokens for o in (*outputs, turn)]
        assert cached == ([0, 128, 0, 64, 128] if prefix_cache else [0] * 5), cached
    assert found[0] == found[1]
