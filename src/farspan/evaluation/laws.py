"""What results call the law that a model's angles follow."""

from farspan.ops import NTK, DynamicNTK, Linear, Llama3, YaRN
from farspan.ops.scaling import Scaling

NAMES: dict[type[Scaling], str] = {
    DynamicNTK: "ntk",
    Linear: "pi",
    YaRN: "yarn",
    NTK: "static-ntk",
    Llama3: "llama3",
}


def scaling_name(law: Scaling | None) -> str:
    """The name of a law with its factor, as rows of results have it under "scaling".

    >>> scaling_name(None), scaling_name(Linear(4.0)), scaling_name(DynamicNTK(4.0, 64, "per_request"))
    ('none', 'pi-4', 'ntk-4/per_request')
    """
    if law is None:
        return "none"
    mode = getattr(law, "mode", "per_query")
    return f"{NAMES[type(law)]}-{law.factor:g}" + ("" if mode == "per_query" else f"/{mode}")  # type: ignore[attr-defined]
