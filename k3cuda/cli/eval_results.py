"""The file that an evaluation writes answer by answer, and goes on in after it was stopped."""
import json

import click

from ..errors import UsageError
from .output import to_json, unwritable
from .prompts import read_file


def read_results(path: str) -> tuple[dict, dict, int]:
    """(setup, the last answer for each (id, run), bytes up to the last whole line).

    A last line without its end was being written when the evaluation stopped: it is left out.
    Raises UsageError: a file that cannot be read or holds something else.
    """
    lines = read_file(path).split("\n")   # what is written is ASCII: no other character can be taken for the end of a line
    setup, answers, length = None, {}, 0
    for number, line in enumerate(lines[:-1], 1):
        try:
            found = json.loads(line)
            if number == 1:
                setup = found["setup"] | {}
            else:
                answers[found["id"], found["run"]] = found | {name: found[name] for name in _READ}   # KeyError: no answer
        except (ValueError, TypeError, KeyError, RecursionError) as e:
            raise UsageError(f"{path}, line {number}: found no line of an evaluation", "give the results of k3cuda eval, or another --results") from e
        length += len(line.encode("utf-8")) + 1
    return setup, answers, length


_READ = ("prompt_sha256", "text", "score", "found", "finish_reason", "completion_tokens", "reasoning_tokens", "speculative", "error")


class ResultsFile:
    """Answers as JSON lines behind a line with the setup. Without a path they are kept in memory only.

    Attributes:
        answers: (id, run) -> answer, those of the file included, without those that failed: they are tried again.
    """

    def __init__(self, path: str | None):
        self._path, self._file, self._setup, self._length, self.answers = path, None, None, 0, {}
        if path is None:
            return
        try:
            self._file = open(path, "ab")
        except OSError as e:
            raise click.BadParameter(f"{path}: {e.strerror}", param_hint="--results") from e
        self._setup, answers, self._length = read_results(path)
        self.answers = {key: a for key, a in answers.items() if a["error"] is None}

    def begin(self, setup: dict, items) -> None:
        """Takes the file over. UsageError where its answers are of another setup, or of other prompts."""
        if self._setup is not None and (other := differing(self._setup, setup)):
            name = other[0]
            raise UsageError(f"{self._path}: its answers were made with {name} {self._setup.get(name)!r:.200}, now it is {setup.get(name)!r:.200}",
                             "give the same flags to go on, or another --results")
        prompts = {item.id: item.prompt_sha256 for item in items}
        for (name, _), answer in self.answers.items():
            if prompts.get(name, answer["prompt_sha256"]) != answer["prompt_sha256"]:
                raise UsageError(f"{self._path}: the answer to {name!r:.60} is one to another prompt", "give another --results")
        if self._file is not None:
            self._write(lambda: self._file.truncate(self._length))
            if self._setup is None:
                self._line({"setup": setup})

    def add(self, answer: dict) -> None:
        self.answers[answer["id"], answer["run"]] = answer
        if self._file is not None:
            self._line(answer)

    def close(self) -> None:
        if self._file is not None:
            self._write(self._file.close)

    def _line(self, value: dict) -> None:
        data = (to_json(value, ascii_only=True) + "\n").encode()
        self._write(lambda: (self._file.write(data), self._file.flush()))

    def _write(self, do) -> None:
        try:
            do()
        except OSError as e:
            raise unwritable(e) from e


def differing(one: dict, other: dict) -> list[str]:
    """Names of the entries that two setups do not have in common."""
    return [name for name in dict.fromkeys([*one, *other]) if one.get(name) != other.get(name)]
