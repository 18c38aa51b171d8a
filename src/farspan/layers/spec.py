"""What a layer's attention is, as a small frozen value."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from farspan.errors import require, require_choice, unknown

NAMES = ("rope", "alibi", "coca-exact", "coca-strict", "coca-slack", "cosformer", "linear-coca")
"""Every attention a model can be given by name."""

COCA_FORMS = ("exact", "strict", "slack")
KINDS = ("rope", "alibi", "coca", "cosformer", "linear-coca")


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention.

    >>> AttentionSpec.parse("coca-exact")
    AttentionSpec(kind='coca', form='exact', window=None, rotary=True)
    >>> AttentionSpec.parse({"kind": "coca", "form": "exact", "window": 128}).name
    'coca-exact'
    """

    kind: str
    """"rope", "alibi", "coca", "cosformer" or "linear-coca"."""
    form: str | None = None
    """For CoCA: "exact" (default), "strict" or "slack"."""
    window: int | None = None
    """See only the last `window` keys; None = all."""
    rotary: bool = True
    """False = no positions at all in this layer (NoPE; of a linear layer: no re-weighting). ALiBi never rotates."""

    def __post_init__(self) -> None:
        require_choice("kind", self.kind, KINDS)
        if self.kind == "coca":
            object.__setattr__(self, "form", self.form or "exact")
            require_choice("form", self.form, COCA_FORMS)
        else:
            require(self.form is None, f"form belongs to kind 'coca', got {self.form!r} for {self.kind!r}; remove it")
        if self.kind == "alibi":
            object.__setattr__(self, "rotary", False)
        require(
            self.window is None or not self.linear,
            f"window cannot be combined with kind {self.kind!r}, got {self.window!r}; its sums hold the whole text",
        )
        require(
            self.window is None or (isinstance(self.window, int) and self.window >= 1),
            f"window must be a whole number of keys ≥ 1 or None, got {self.window!r}; None sees everything",
        )

    @property
    def name(self) -> str:
        """The name among :data:`NAMES`."""
        return f"coca-{self.form}" if self.kind == "coca" else self.kind

    @property
    def linear(self) -> bool:
        """Whether the layer keeps sums in place of keys."""
        return self.kind in ("cosformer", "linear-coca")

    @property
    def collinear(self) -> bool:
        """Whether its keys are coefficients t ≥ 0, d/2 a head."""
        return self.kind in ("coca", "linear-coca")

    @classmethod
    def parse(cls, value: "str | Mapping[str, Any] | AttentionSpec") -> "AttentionSpec":
        """A spec from its name, from a mapping of its fields, or from itself."""
        if isinstance(value, AttentionSpec):
            return value
        if isinstance(value, str):
            require_choice("attention", value, NAMES)
            if value in KINDS:
                return cls(value)
            kind, _, form = value.partition("-")
            return cls(kind, form)
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
