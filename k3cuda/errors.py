"""Every error a user can meet. Each carries the exit code of the command line and a hint: the way out."""


class K3Error(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: what was found and what was wanted.
        hint: the way out, one sentence, or "" where the message already is one.

    Attributes:
        code: exit code of the command line (docs/cli.md lists them).
    """

    code = 1

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.message, self.hint = message, hint

    def __str__(self):
        return f"{self.message}; {self.hint}" if self.hint else self.message


class UsageError(K3Error):
    """A flag, argument or request field that no model could satisfy."""

    code = 2


class RequestError(UsageError):
    """A conversation or request that cannot be rendered; `name` is stable and meant for programs."""

    def __init__(self, name: str, message: str, hint: str = ""):
        super().__init__(message, hint)
        self.name = name


class ConfigError(K3Error):
    """config.json describes a model we do not run, or one that cannot be cut as asked."""

    code = 3


class CheckpointError(K3Error):
    """Files missing, damaged or not matching the config. `findings` lists every problem of one run."""

    code = 3

    def __init__(self, message: str, hint: str = "", findings=()):
        super().__init__(message, hint)
        self.findings = tuple(findings)


class OutOfMemory(K3Error):
    """Not enough GPU memory, host memory or disk."""

    code = 4


def out_of_memory(error: MemoryError) -> OutOfMemory:
    """Which memory it was: CuPy's error of a full GPU is a MemoryError too."""
    if type(error).__module__.startswith("cupy"):
        return OutOfMemory(f"not enough GPU memory: {error}", "end what else uses the GPU (nvidia-smi lists it), or lower --max-model-len")
    return OutOfMemory("not enough host memory", "close other programs, or lower --max-model-len")


class DeviceError(K3Error):
    """No usable GPU, driver too old, architecture unsupported, NVRTC or NCCL missing."""

    code = 5


class CompileError(DeviceError):
    """NVRTC refused a kernel; `log` is all it said."""

    def __init__(self, message: str, hint: str = "", log: str = ""):
        super().__init__(message, hint)
        self.log = log


class StepTimeout(DeviceError):
    """A block of a step in one launch waited too long for another: the launch ended itself, and with it all that the process had on the GPU."""


class PromptTooLong(K3Error):
    """A prompt that is empty or does not fit the context."""

    code = 6

    @classmethod
    def of(cls, found, context: int) -> "PromptTooLong":
        """`found`: how many tokens it has, in words or as a number."""
        return cls(f"the prompt has {found} tokens, the context holds {context} and the answer needs one of them", "shorten the prompt or raise max_model_len")


class NumericalError(K3Error):
    """A row of logits that is not finite: nothing can be sampled from it."""

    code = 7


class RanksDiffer(NumericalError):
    """Two ranks that must decide alike decided differently."""


class BenchmarkError(K3Error):
    """A benchmark ran, but a check of its own says that its numbers must not be believed."""

    code = 8


class RankDied(K3Error):
    """A rank ended without saying why."""

    code = 9


class ExchangeTimeout(RankDied):
    """A rank did not send its part of a collective in time."""


def loses_model(error: BaseException | None) -> bool:
    """Whether the model that it came from is lost with it: every later call would fail too, until another process loads it."""
    return isinstance(error, (DeviceError, RankDied, RanksDiffer)) and not isinstance(error, CompileError)


class PlanError(K3Error):
    """The description tables contradict themselves, or rows break the contract of a backend: a bug of ours, never of the user."""


class Aborted(K3Error):
    """The request was stopped from outside before it ended."""

    code = 130
