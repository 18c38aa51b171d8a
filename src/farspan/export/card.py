"""The model card: what the model is, how to use it, what was measured, and by which command."""

from collections import Counter
from dataclasses import dataclass
from importlib import resources

from huggingface_hub import ModelCardData

from farspan.configuration_farspan import FarspanConfig
from farspan.export.tables import tables
from farspan.layers import AttentionSpec
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.report.results import EVALUATIONS, Run, scaling_order
from farspan.report.tables import to_markdown
from farspan.results import commit, version

DYNAMIC, LOG = "dynamic_ntk-", "+log"


@dataclass(frozen=True)
class Card:
    """What a card is made from."""

    name: str
    model: FarspanForCausalLM
    run: Run
    license: str | None = None
    base_model: str | None = None
    """The model that this one was made from, by its name on the hub: a link, so that only that will do."""
    original: str | None = None
    """The same as the text names it, perhaps a file."""
    rounded: bool = False
    """The weights are written in another dtype than they were measured in."""


def render(card: Card) -> str:
    """The card as Markdown with YAML front matter; the sections are those of `card.md.jinja`."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ValueError(
            "a model card needs jinja2, got an installation without it; install farspan[report]"
        ) from error
    config = card.model.config
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["code"] = code
    linear_coca = any(spec.kind == "linear-coca" for spec in config.attention_specs)
    text = (resources.files("farspan") / "export" / "card.md.jinja").read_text(encoding="utf-8")
    return environment.from_string(text).render(
        name=card.name,
        front_matter=front_matter(card),
        original=card.original,
        facts=facts(card.model),
        attention=attention_text(config.attention_specs),
        coca=any(spec.kind == "coca" for spec in config.attention_specs),
        linear_coca=linear_coca,
        own_law=own_law(config),
        stretch=stretch(config, card.run),
        train_length=config.train_length,
        tables=[to_markdown(table) for table in tables(card.run)],
        sources=card.run.sources,
        rounded=card.rounded,
        version=version("farspan"),
        commit=commit(),
    )


def turning(config: FarspanConfig) -> list[AttentionSpec]:
    """The layers whose positions are the configuration's angles: cosFormer has a re-weighting of its own, ALiBi a bias.

    >>> [spec.name for spec in turning(FarspanConfig.preset("tiny", attention=["rope", "alibi", "cosformer", "rope"]))]
    ['rope', 'rope']
    """
    return [spec for spec in config.attention_specs if spec.rotary and spec.kind != "cosformer"]


def own_law(config: FarspanConfig) -> str:
    """The law that config.json gives the angles, as it stands there; "" where they turn as they were trained.

    >>> own_law(FarspanConfig.preset("tiny", rope_parameters={"rope_type": "linear", "factor": 2.0}))
    '`"rope_type": "linear"`, factor 2'
    """
    law = config.rotary().scaling
    if law is None or not turning(config):
        return ""
    return f'`"rope_type": "{(config.rope_parameters or {})["rope_type"]}"`, factor {law.factor:g}'


@dataclass(frozen=True)
class Stretch:
    """Dynamic NTK for a model without a law: what `set_rope_parameters` is told, and whether it was measured so."""

    arguments: str
    measured: bool


def stretch(config: FarspanConfig, run: Run) -> Stretch | None:
    """Dynamic NTK as it was measured of this model, otherwise with factor 4; None for a model that it does not fit."""
    layers = turning(config)
    fits = bool(layers) and all(spec.kind != "linear-coca" for spec in layers)  # whose sums cannot be turned again
    if not fits or config.rotary().scaling is not None:
        return None
    found = {row.scaling for kind in EVALUATIONS for row in run.of(kind)}
    told = {name.removesuffix(LOG) for name in found if name.endswith(LOG) == config.log_length}
    dynamic = [name for name in told if name.startswith(DYNAMIC)]
    factor, _, mode = min(dynamic, key=scaling_order, default=f"{DYNAMIC}4").removeprefix(DYNAMIC).partition("/")
    arguments = f'rope_type="dynamic", factor={float(factor)}' + (f', mode="{mode}"' if mode else "")
    return Stretch(arguments, bool(dynamic))


def front_matter(card: Card) -> str:
    """The YAML that the hub reads."""
    kinds = sorted({spec.kind for spec in card.model.config.attention_specs})
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        license=card.license,
        base_model=card.base_model,
        tags=["farspan", "long-context", *kinds],
    )
    return str(data.to_yaml()).strip()


def facts(model: FarspanForCausalLM) -> dict[str, str]:
    """Sizes that a reader asks for first."""
    config = model.config
    return {
        "Parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "Weights": str(model.dtype).removeprefix("torch."),
        "Layers": str(config.num_hidden_layers),
        "Hidden size": f"{config.hidden_size:,}",
        "Heads": f"{config.num_attention_heads} of width {config.head_dim}, {config.num_key_value_heads} for keys",
        "Vocabulary": f"{config.vocab_size:,}",
        "Training length": f"{config.train_length:,} tokens",
    }


def attention_text(specs: tuple[AttentionSpec, ...]) -> str:
    """Each kind of layer with its number.

    >>> attention_text((AttentionSpec("coca", window=128),) * 3 + (AttentionSpec("rope", rotary=False),))
    '3 layers coca-exact (window 128), 1 layer rope (without positions)'
    """
    parts = []
    for spec, count in Counter(specs).items():
        notes = [f"window {spec.window}"] if spec.window else []
        notes += ["without positions"] if not spec.rotary and spec.kind != "alibi" else []
        more = f" ({', '.join(notes)})" if notes else ""
        parts.append(f"{count} layer{'s' if count > 1 else ''} {spec.name}{more}")
    return ", ".join(parts)


def code(text: str) -> str:
    """Text as inline code, whatever is in it.

    >>> code("a `b` c")
    '`` a `b` c ``'
    """
    fence = "`"
    while fence in text:
        fence += "`"
    return f"{fence}{text}{fence}" if len(fence) == 1 else f"{fence} {text} {fence}"
