"""The keys of a draft's config.json from every level that may hold them. What nobody asked for and could matter is refused."""
import logging

from .config import TOKEN_IDS, checked_value

log = logging.getLogger("k3cuda")

# Levels below the top, the first to be asked first: training tools put a draft's own fields or its layers into these.
LEVELS = ("dflash_config", "transformer_layer_config")
# Names, training settings and sizes of training batches: nothing of a forward pass.
_SILENT = {"architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "auto_map", "use_cache", "initializer_range",
           "attention_dropout", "max_window_layers", "_name_or_path", "_torchspec_version", "torchspec_version", "speculators_version",
           "speculators_model_type", "speculators_config", "num_anchors", "max_anchors", "confidence_head_alpha", "ce_loss_alpha",
           "l1_loss_alpha", "loss_decay_gamma", "on_policy_sampling", "on_policy_warmup_ratio", *TOKEN_IDS, *LEVELS}
REQUIRED = object()
_WANTED = {bool: "true or false", str: "text", dict: "an object", list: "a list of names"}


class Keys:
    """Hands out values by name and remembers which were asked for.

    Attributes:
        problems: everything wrong so far, in words; shared with whoever reads.
    """

    def __init__(self, top: dict):
        self.problems: list[str] = []
        self._levels = {"": top}
        for name in LEVELS:
            inner = top.get(name)
            if inner is not None and not isinstance(inner, dict):
                self.problems.append(f"{name}: found {type(inner).__name__}, wanted an object")
            elif inner is not None:
                self._levels = {name + ".": inner} | self._levels
        self._asked: set[str] = set()

    def take(self, name: str, kind, default=REQUIRED):
        """The value of `name` as int, float, bool, str, dict, list (of names) or tuple (of integers), `default` where it is missing or null.

        Different values at two levels are a contradiction, and None comes back, as it does for a value of the wrong kind.
        """
        self._asked.add(name)
        found = {prefix + name: level[name] for prefix, level in self._levels.items() if level.get(name) is not None}
        if not found:
            if default is REQUIRED:
                self.problems.append(f"{name}: missing")
                return None
            return default
        (where, value), *others = found.items()
        for other, also in others:
            if also != value or type(also) is not type(value):
                self.problems.append(f"{where}: found {value!r:.60}, but {other}: {also!r:.60}")
                return None
        if kind in _WANTED:
            if isinstance(value, kind) and (kind is not list or all(isinstance(x, str) for x in value)):
                return value
            self.problems.append(f"{where}: found {value!r:.60}, wanted {_WANTED[kind]}")
            return None
        return checked_value(value, kind, where, self.problems)

    def fixed(self, name: str, want) -> None:
        """A key that may be there, with one value only."""
        found = self.take(name, type(want), want)
        if found is not None and found != want:
            self.problems.append(f"{name}: found {found!r:.60}, wanted {want!r}")

    def refuse_rest(self) -> None:
        """Every key that nobody asked for is a problem, unless it never changes a forward pass or is unset."""
        unset = []
        for prefix, level in self._levels.items():
            for key in sorted(set(level) - self._asked - _SILENT):
                if level[key] is None or level[key] is False:
                    unset.append(prefix + key)
                else:
                    self.problems.append(f"{prefix}{key[:60]}: unknown key with value {str(level[key])[:60]!r} could change the model")
        if unset:
            log.info("draft config: ignored unset keys %s", ", ".join(unset))
