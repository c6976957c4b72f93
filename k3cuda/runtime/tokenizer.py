"""Text to token ids and back: rank BPE over the checkpoint's own vocabulary.

`tiktoken` does the merging and is imported at the first `encode`, so decoding and `--help` never pay for it. The file
is read here and not by `tiktoken.load`: that one keeps a copy under a hash of the path and reads the copy next time,
so a changed file at the same path would go unnoticed.
"""

import base64
import binascii
import json
import re
from functools import cached_property
from pathlib import Path

from ..errors import CheckpointError, K3Error, PromptTooLong
from .downloads import no_text

RANKS_FILE, CONFIG_FILE = "tiktoken.model", "tokenizer_config.json"
NUM_SPECIAL = 256  # ids after the base vocabulary, named or reserved
MAX_NAME_CHARS = 1000  # of a special token; real names have a few dozen
OPEN, CLOSE, SEP, END_OF_MSG = MARKERS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")

# A vocabulary of 326 tokens in the release's file layout, for made models.
MINI_TOKENIZER_DIR = Path(__file__).parent.parent / "data" / "mini_tokenizer"

# The release cuts text before BPE at these places. It changes ids, so it is part of parity; it also keeps the regex
# engine of tiktoken from giving up on a run of a million blanks.
WINDOW_CHARS, MAX_RUN_CHARS = 400_000, 25_000

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD, _TAIL = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_TAIL}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_TAIL}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

_RUNS = re.compile(r"\s+|\S+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_AGAIN = "fetch the file again from the release"


def split_long_runs(text: str):
    """Yield the pieces of `text` that BPE sees on their own: windows of 400,000 characters, cut again after every
    25,000 characters of one unbroken run of blanks or of non-blanks."""
    for low in range(0, len(text), WINDOW_CHARS):
        window, start = text[low : low + WINDOW_CHARS], 0
        if len(window) > MAX_RUN_CHARS:
            for run in _RUNS.finditer(window):
                for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
                    yield window[start:cut]
                    start = cut
        yield window[start:]


def within(pieces, most: int | None) -> list[int]:
    """All ids of an iterator of lists. PromptTooLong once more than `most` have come, where there are any more to come: they are not encoded."""
    ids = []
    for piece in pieces:
        if most is not None and len(ids) > most:
            raise PromptTooLong.of(f"more than {most}", most)
        ids += piece
    return ids


class Tokenizer:
    """The vocabulary of one checkpoint: base tokens 0..n-1, then `num_special` special ids.

    Args:
        ranks: token bytes -> id; ids must be 0..n-1 and every single byte a token.
        special: name -> id of the named special tokens; ids without a name are called `<|reserved_token_ID|>`.
        num_special: how many special ids follow the base vocabulary.
        source: what messages call this vocabulary.

    Raises:
        CheckpointError: ids with gaps, a byte without a token, a special id out of range or named twice, or one of
            the four structural markers missing.
    """

    def __init__(
        self, ranks: dict[bytes, int], special: dict[str, int], num_special: int = NUM_SPECIAL, *, source="tokenizer"
    ):
        _check_ranks(ranks, source)
        self.num_base, self.vocab_size = len(ranks), len(ranks) + num_special
        self._ranks, self._bytes = ranks, sorted(ranks, key=ranks.__getitem__)
        self.special = self._name_all(special, source)
        self.open_id, self.close_id, self.sep_id, self.end_of_msg_id = (self.special[name] for name in MARKERS)

    @classmethod
    def from_dir(cls, path) -> "Tokenizer":
        """Read `tiktoken.model` and `tokenizer_config.json` of a checkpoint folder; CheckpointError if damaged."""
        path = Path(path)
        return cls(_read_ranks(path / RANKS_FILE), _read_special(path / CONFIG_FILE), source=str(path))

    def write_files(self, path) -> None:
        """Write both files into the folder `path` in the layout of the release."""
        lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(self._bytes))
        # As in the release: the three markers inside a message are not flagged special.
        inner = {OPEN, CLOSE, SEP}
        named = {
            str(token_id): {"content": name, "special": name not in inner}
            for name, token_id in sorted(self.special.items(), key=lambda item: item[1])
            if name != _reserved(token_id)
        }
        config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": named}
        (Path(path) / RANKS_FILE).write_bytes(b"".join(lines))
        (Path(path) / CONFIG_FILE).write_bytes((json.dumps(config, ensure_ascii=False, indent=2) + "\n").encode())

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Ids of `text`. Names of special tokens are ordinary text unless `allow_special`: text of a caller must never
        become a marker. Lone surrogates count as U+FFFD; empty text has no ids. K3Error where tiktoken itself fails."""
        return [i for ids in self.encoded(text, allow_special) for i in ids]

    def encoded(self, text: str, allow_special: bool = False):
        """The same piece by piece: an iterator of lists."""
        for piece in split_long_runs(text):
            if _SURROGATE.search(piece):
                piece = piece.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            try:
                yield self._encoding.encode(piece, allowed_special="all") if allow_special else self._encoding.encode_ordinary(piece)
            except BaseException as e:   # Rust's panics are no Exception, so that nothing would catch them on their way
                if type(e).__name__ != "PanicException":
                    raise
                raise K3Error(f"tiktoken ended at a text of {len(piece)} characters: {e}",
                              "start the process again; where the same text ends it each time, please report the text") from None

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; none for a special, reserved or out-of-range id."""
        return self._bytes[token_id] if 0 <= token_id < self.num_base else b""

    def decode(self, ids) -> str:
        """Text of finished `ids`, U+FFFD for bytes that are no UTF-8; use `TextStream` while ids still arrive."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    @cached_property
    def _encoding(self):
        import tiktoken

        return tiktoken.Encoding("k3", pat_str=PATTERN, mergeable_ranks=self._ranks, special_tokens=self.special)

    def _name_all(self, special: dict[str, int], source: str) -> dict[str, int]:
        names = {token_id: _reserved(token_id) for token_id in range(self.num_base, self.vocab_size)}
        for name, token_id in special.items():
            if token_id not in names:
                raise CheckpointError(
                    f"{source}: {name!r} has id {token_id}, wanted one of {self.num_base}..{self.vocab_size - 1}",
                    f"check that {RANKS_FILE} and {CONFIG_FILE} come from one release",
                )
            if names[token_id] != _reserved(token_id):
                raise CheckpointError(f"{source}: id {token_id} is named {names[token_id]!r} and {name!r}", _AGAIN)
            names[token_id] = name
        ids = {name: token_id for token_id, name in names.items()}
        if len(ids) < len(names):
            name, token_id = next((name, i) for i, name in names.items() if ids[name] != i)
            raise CheckpointError(f"{source}: ids {token_id} and {ids[name]} are both named {name!r}", _AGAIN)
        if missing := [name for name in MARKERS if name not in ids]:
            raise CheckpointError(
                f"{source}: no special token {' '.join(missing)} in {CONFIG_FILE}, wanted {' '.join(MARKERS)}",
                "this vocabulary cannot hold the chat format of Kimi K3; use the files of a K3 release",
            )
        return ids


def _reserved(token_id: int) -> str:
    return f"<|reserved_token_{token_id}|>"


def _check_ranks(ranks: dict[bytes, int], source: str) -> None:
    present = set(ranks.values())
    gap = next((rank for rank in range(len(ranks)) if rank not in present), None)
    if gap is not None:
        raise CheckpointError(
            f"{source}: {len(ranks)} tokens, but none of rank {gap}; wanted ranks 0..{len(ranks) - 1} without gaps",
            _AGAIN,
        )
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise CheckpointError(
            f"{source}: no token for {len(missing)} of the 256 single bytes, first 0x{missing[0]:02x}; wanted all",
            _AGAIN,
        )


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks, lines_of = {}, {}
    for number, line in enumerate(_read_bytes(path).splitlines(), 1):
        if not line.strip():
            continue
        where, fields = f"{path}, line {number}", line.split()
        try:
            token, rank = base64.b64decode(fields[0], validate=True), _digits(fields[1])
            if len(fields) > 2 or not token:
                raise ValueError
        except (ValueError, IndexError, binascii.Error):
            found = repr(line[:40].decode("latin-1")) + ("..." if len(line) > 40 else "")
            raise CheckpointError(f"{where}: found {found}, wanted base64 token, blank, rank", _AGAIN) from None
        if token in ranks:
            raise CheckpointError(f"{where}: token {fields[0][:40].decode()} already has rank {ranks[token]}", _AGAIN)
        if rank in lines_of:
            raise CheckpointError(f"{where}: rank {rank} was given to line {lines_of[rank]} already", _AGAIN)
        ranks[token], lines_of[rank] = rank, number
    _check_ranks(ranks, str(path))
    return ranks


def _digits(field: bytes) -> int:
    # int() alone would also take "+5", "1_0" and, for other reasons of its own, refuse 5,000 digits.
    if not field.isdigit() or len(field) > 9:
        raise ValueError(field)
    return int(field)


def _read_special(path: Path) -> dict[str, int]:
    try:
        config = json.loads(_read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: no JSON ({str(error)[:120]})", _AGAIN) from None
    tokens = config.get("added_tokens_decoder") if isinstance(config, dict) else None
    if not isinstance(tokens, dict):
        raise CheckpointError(f'{path}: no added_tokens_decoder, wanted id: {{"content": name}}', _AGAIN)
    special = {}
    for key, entry in tokens.items():
        name = entry.get("content") if isinstance(entry, dict) else None
        if not (isinstance(name, str) and name and key.isascii() and key.isdigit() and len(key) <= 9):
            raise CheckpointError(
                f'{path}: added_tokens_decoder entry {key[:40]!r} names no token, wanted id: {{"content": name}}',
                _AGAIN,
            )
        if len(name) > MAX_NAME_CHARS or _SURROGATE.search(name):  # tiktoken fails at such names, but only at the first text
            raise CheckpointError(
                f"{path}: added_tokens_decoder entry {key!r} has the name {name[:40]!r} of {len(name)} characters, "
                f"wanted Unicode text of up to {MAX_NAME_CHARS}",
                _AGAIN,
            )
        if name in special:
            raise CheckpointError(f"{path}: ids {special[name]} and {key} are both named {name!r}", _AGAIN)
        special[name] = int(key)
    return special


def _read_bytes(path: Path) -> bytes:
    if kind := no_text(path):
        raise CheckpointError(f"{path}: found {kind[0]}, wanted a tokenizer file of a Kimi K3 release", kind[1])
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})", "name the folder of a checkpoint") from None
