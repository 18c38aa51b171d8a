"""What results call the law that a model's angles follow."""

from farspan.configuration_farspan import FarspanConfig
from farspan.errors import require
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.ops import NTK, DynamicNTK, Linear, Llama3, YaRN
from farspan.ops.rotary import Scaling

NAMES: dict[type[Scaling], str] = {
    DynamicNTK: "ntk",
    Linear: "pi",
    YaRN: "yarn",
    NTK: "static-ntk",
    Llama3: "llama3",
}


LOG = "+log"


def scaling_name(law: Scaling | None) -> str:
    """The name of a law with its factor, as rows of results have it under "scaling".

    >>> scaling_name(None), scaling_name(Linear(4.0)), scaling_name(DynamicNTK(4.0, 64, "per_request"))
    ('none', 'pi-4', 'ntk-4/per_request')
    """
    if law is None:
        return "none"
    mode = getattr(law, "mode", "per_query")
    return f"{NAMES[type(law)]}-{law.factor:g}" + ("" if mode == "per_query" else f"/{mode}")


def law_of(config: FarspanConfig) -> str:
    """The name of a model's law; "+log" says that its scores grow with the logarithm of the length.

    >>> law_of(FarspanConfig.preset("tiny", log_length=True))
    'none+log'
    """
    return scaling_name(config.rotary().scaling) + (LOG if config.log_length else "")


def give_law(model: FarspanForCausalLM, name: str) -> None:
    """Let a model follow the law of this name: "none", or dynamic NTK or YaRN with a factor; each also with "+log".

    A law of the model's own is dropped, unless it is the one asked for.

    >>> model = FarspanForCausalLM(FarspanConfig.preset("tiny"))
    >>> give_law(model, "ntk-4/per_request+log")
    >>> model.config.rotary().scaling, model.config.log_length
    (DynamicNTK(factor=4.0, train_length=64, mode='per_request'), True)
    """
    log, name = name.endswith(LOG), name.removesuffix(LOG).removesuffix("/per_query")
    own = model.config.rotary().scaling
    law, _, mode = name.partition("/")
    kind, _, factor = law.partition("-")
    same = scaling_name(own) == name
    require(same or kind in ("none", "ntk", "yarn"), f"law must be none, ntk-FACTOR or yarn-FACTOR, got {name!r}")
    model.set_log_length(log)
    if same:
        return
    if own is not None:
        model.set_rope_parameters(rope_type="default")
    if kind == "yarn":
        model.set_rope_parameters(rope_type="yarn", factor=float(factor))
    elif kind == "ntk":
        model.set_rope_parameters(rope_type="dynamic", factor=float(factor), mode=mode or "per_query")
