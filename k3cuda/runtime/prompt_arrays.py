"""What callers pass as prompts: text, lists, NumPy and CuPy arrays, anything that speaks DLPack. One list comes out."""
import numbers

import numpy as np

from ..errors import PromptTooLong, UsageError

_WANTED = "text, token ids, or a list of either"


def as_prompts(prompts) -> list[str | list[int]]:
    """Text or ids of each prompt, in order.

    Args:
        prompts: a string; a list of integers (one prompt); a list of strings and lists of integers; or an integer array [tokens] or
            [prompts, tokens] of NumPy, CuPy or another library.
    Returns:
        one entry a prompt; [] for an empty list. Whether ids lie inside the vocabulary is not looked at.
    Raises:
        UsageError: anything else.
    """
    if isinstance(prompts, str):
        return [prompts]
    if is_array(prompts):
        array = _integers(prompts)
        if array.ndim not in (1, 2):
            raise UsageError(f"prompts: found an array with shape {array.shape}, wanted [tokens] or [prompts, tokens]")
        return [array.tolist()] if array.ndim == 1 else array.tolist()
    if not isinstance(prompts, (list, tuple)):
        raise UsageError(f"prompts: found {type(prompts).__name__}, wanted {_WANTED}")
    if prompts and all(_is_id(p) for p in prompts):
        return [[int(p) for p in prompts]]
    return [p if isinstance(p, str) else as_ids(p) for p in prompts]


def as_ids(ids) -> list[int]:
    """Ids of one prompt from a list of integers or an integer array [tokens]."""
    if is_array(ids):
        array = _integers(ids)
        if array.ndim != 1:
            raise UsageError(f"token ids: found an array with shape {array.shape}, wanted [tokens]")
        return array.tolist()
    if not isinstance(ids, (list, tuple)):
        raise UsageError(f"prompts: found {type(ids).__name__} for one of them, wanted {_WANTED}")
    for i in ids:
        if not _is_id(i):
            raise UsageError(f"token ids: found {i!r:.60}, wanted integers")
    return [int(i) for i in ids]


def as_tokens(ids) -> tuple[list[int], bool]:
    """Ids from one integer, or from what `as_ids` takes; and whether it was an integer."""
    if isinstance(ids, str):
        raise UsageError("token ids: found text, wanted integers", "encode it with the tokenizer of the LLM")
    if _is_id(ids):
        return [int(ids)], True
    if is_array(ids):
        ids = _integers(ids)
        if ids.ndim == 0:
            return [int(ids)], True
    return as_ids(ids), False


def checked_ids(ids, vocab_size: int) -> list[int]:
    """Ids of one sequence. Raises PromptTooLong where there is none, UsageError where they are no integers inside the vocabulary."""
    try:
        array = np.asarray(ids)
    except (ValueError, TypeError, OverflowError) as e:
        raise UsageError(f"token ids: {e}", "give one list of integers a prompt") from e
    if array.size == 0:
        raise PromptTooLong("the prompt is empty", "give at least one token")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UsageError(f"token ids: found an array of {array.dtype} with shape {array.shape}, wanted integers [tokens]")
    if array.min() < 0 or array.max() >= vocab_size:
        bad = int(array[(array < 0) | (array >= vocab_size)][0])
        raise UsageError(f"token id {bad} is outside the vocabulary of {vocab_size}")
    return array.tolist()


def is_array(x) -> bool:
    # NumPy's scalars have __array__ too: they are numbers here.
    return any(hasattr(x, name) for name in ("__array__", "__cuda_array_interface__", "__dlpack__")) and not isinstance(x, np.generic)


def _is_id(x) -> bool:
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def _integers(x) -> np.ndarray:
    """On the host, whatever device it came from."""
    try:
        array = _from_device(x) if hasattr(x, "__cuda_array_interface__") else np.asarray(x) if hasattr(x, "__array__") else np.from_dlpack(x)
    except (TypeError, ValueError, BufferError, RuntimeError) as e:
        raise UsageError(f"token ids: {type(x).__name__} could not be read ({e})", "pass a NumPy array or a list") from e
    if array.dtype.kind not in "iu":
        raise UsageError(f"token ids: found an array of {array.dtype}, wanted integers")
    return array


def _from_device(x) -> np.ndarray:
    try:
        import cupy
    except ImportError as e:
        raise UsageError(f"token ids: {type(x).__name__} lies on a GPU, and CuPy is not installed", "pass a NumPy array") from e
    return cupy.asnumpy(x)
