"""The model card: what the model is, how to use it, what was measured, and by which command."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import TypeVar

from huggingface_hub import ModelCardData

from farspan.layers.spec import AttentionSpec
from farspan.models import FarspanForCausalLM
from farspan.report.collect import Run
from farspan.report.estimates import Estimate, perplexity_of, scaling_order, share_of
from farspan.report.names import scaling_name
from farspan.report.records import Passkey, Perplexity
from farspan.report.tables import Line, Table, counts_text, estimate_cell, to_markdown
from farspan.results import commit, version


@dataclass(frozen=True)
class Card:
    """What a card is made from."""

    name: str
    model: FarspanForCausalLM
    run: Run
    license: str | None = None
    base_model: str | None = None


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
        base_model=card.base_model,
        facts=facts(card.model),
        attention=attention_text(config.attention_specs),
        coca=any(spec.kind == "coca" for spec in config.attention_specs),
        half=config.cache_layout == "half",
        linear_coca=linear_coca,
        rotates=not linear_coca and any(spec.rotary and not spec.linear for spec in config.attention_specs),
        train_length=config.train_length,
        tables=[to_markdown(table) for table in tables(card.run)],
        sources=card.run.sources,
        version=version("farspan"),
        commit=commit(),
    )


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


def tables(run: Run) -> list[Table]:
    """Perplexity, a table for each way of counting, and passkey retrieval; a line for each scaling law."""
    made = []
    for mode in dict.fromkeys(row.mode for row in run.perplexity):
        if mode != "truncated":
            rows = tuple(row for row in run.perplexity if row.mode == mode)
            strides = sorted({row.stride for row in rows})
            title = f"Perplexity by window length ({mode}, stride {', '.join(f'{s:,}' for s in strides)})"
            made.append(_table(mode, title, rows, perplexity_of, _control(run)))
    if run.passkey:
        made.append(_table("passkey", "Passkey accuracy by prompt length", run.passkey, share_of))
    return made


Row = TypeVar("Row", Perplexity, Passkey)


def _table(
    name: str, title: str, rows: tuple[Row, ...], estimate: Callable[[list[Row]], Estimate | None], note: str = ""
) -> Table:
    lengths = sorted({row.length for row in rows})
    found = {
        law: [estimate([row for row in rows if (row.scaling, row.length) == (law, length)]) for length in lengths]
        for law in sorted({row.scaling for row in rows}, key=scaling_order)
    }
    lines = tuple(Line(scaling_name(law), "", tuple(map(estimate_cell, cells))) for law, cells in found.items())
    counted = counts_text([cell for cells in found.values() for cell in cells])
    caption = f"Each number: {counted}.{note}"
    return Table(name, title, caption, tuple(f"{n:,}" for n in lengths), lines, "Scaling")


def _control(run: Run) -> str:
    """The truncation control in two sentences, if it was measured."""
    found = perplexity_of([row for row in run.perplexity if row.mode == "truncated"][:1])
    if found is None:
        return ""
    return (
        f" The same tokens with their context cut to the training length have perplexity {estimate_cell(found).text}: "
        "a longer window helps where it is below that."
    )


def code(text: str) -> str:
    """Text as inline code, whatever is in it.

    >>> code("a `b` c")
    '`` a `b` c ``'
    """
    fence = "`"
    while fence in text:
        fence += "`"
    return f"{fence}{text}{fence}" if len(fence) == 1 else f"{fence} {text} {fence}"
