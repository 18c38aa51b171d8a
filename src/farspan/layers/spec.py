"""What a layer's attention is, as a small frozen value."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from farspan.errors import require, require_choice, unknown

NAMES = ("rope", "alibi", "coca-exact", "coca-strict", "coca-slack", "cosformer")
"""Every attention a model can be given by name."""

COCA_FORMS = ("exact", "strict", "slack")


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention.

    >>> AttentionSpec.parse("coca-exact")
    AttentionSpec(kind='coca', form='exact', window=None, rotary=True)
    >>> AttentionSpec.parse({"kind": "coca", "form": "exact", "window": 128}).name
    'coca-exact'
    """

    kind: str
    """"rope", "alibi", "coca" or "cosformer"."""
    form: str | None = None
    """For CoCA: "exact" (default), "strict" or "slack"."""
    window: int | None = None
    """See only the last `window` keys; None = all."""
    rotary: bool = True
    """False = no positions at all in this layer (NoPE; cosFormer without re-weighting). ALiBi never rotates."""

    def __post_init__(self) -> None:
        require_choice("kind", self.kind, ("rope", "alibi", "coca", "cosformer"))
        if self.kind == "coca":
            object.__setattr__(self, "form", self.form or "exact")
            require_choice("form", self.form, COCA_FORMS)
        else:
            require(self.form is None, f"form belongs to kind 'coca', got {self.form!r} for {self.kind!r}; remove it")
        if self.kind == "alibi":
            object.__setattr__(self, "rotary", False)
        require(
            self.window is None or self.kind != "cosformer",
            f"window cannot be combined with kind 'cosformer', got {self.window!r}; its sums hold the whole text",
        )
        require(
            self.window is None or (isinstance(self.window, int) and self.window >= 1),
            f"window must be a whole number of keys ≥ 1 or None, got {self.window!r}; None sees everything",
        )

    @property
    def name(self) -> str:
        """The name among :data:`NAMES`."""
        return f"coca-{self.form}" if self.kind == "coca" else self.kind

    @classmethod
    def parse(cls, value: "str | Mapping[str, Any] | AttentionSpec") -> "AttentionSpec":
        """A spec from its name, from a mapping of its fields, or from itself."""
        if isinstance(value, AttentionSpec):
            return value
        if isinstance(value, str):
            require_choice("attention", value, NAMES)
            kind, _, form = value.partition("-")
            return cls(kind, form or None)
        require(
            isinstance(value, Mapping),
            f"attention must be a name or a mapping for each layer, got {value!r}; choose from {', '.join(NAMES)}",
        )
        options = [field.name for field in fields(cls)]
        for key in value:
            if key not in options:
                raise unknown("attention key", key, options)
        require("kind" in value, f"attention needs a 'kind' in each layer's mapping, got {dict(value)!r}")
        return cls(**value)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for a configuration file."""
        return asdict(self)
