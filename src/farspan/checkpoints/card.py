"""The model card: what the model is, how to use it, what was measured, and by which command."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from importlib import resources

from huggingface_hub import ModelCardData

from farspan.configuration_farspan import FarspanConfig
from farspan.evaluation.answers import field_name
from farspan.layers import AttentionSpec
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.report.results import (
    EVALUATIONS,
    Estimate,
    Record,
    Run,
    mean_of,
    perplexity_of,
    scaling_order,
    share_of,
)
from farspan.report.tables import Table, counts_text, grid, scaling_name, share_text, to_markdown
from farspan.results import commit, version

DYNAMIC, LOG = "dynamic_ntk-", "+log"
ALL = "minimal pairs"
"""The column of all fields together."""
THREE = partial(share_text, digits=3)


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
    text = (resources.files("farspan") / "checkpoints" / "card.md.jinja").read_text(encoding="utf-8")
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


# Tables


def tables(run: Run) -> list[Table]:
    """Make a table per kind of measurement, with a line for each scaling."""
    made = []
    for mode in dict.fromkeys(row.mode for row in run.of("perplexity") if row.mode != "truncated"):
        rows = run.of("perplexity", mode=mode)
        strides = ", ".join(f"{stride:,}" for stride in sorted({row.stride for row in rows}))
        made.append(_by_length(f"Perplexity by window length ({mode}, stride {strides})", rows, _control(run)))
    made.append(_by_length("Passkey accuracy by prompt length", run.of("passkey")))
    retrieval = [row for row in run.of("retrieval") if row.depth is None]
    for task in dict.fromkeys(row.task for row in retrieval):
        made.append(
            _by_length(f"Retrieval accuracy by prompt length: {task}", [x for x in retrieval if x.task == task])
        )
    bins = sorted({(row.start, row.stop) for row in run.of("positions")})
    entries = [
        (scaling_name(s), source, [mean_of([x[name] / x.tokens for x in _at(run, s, *b) if x[name]]) for b in bins])
        for s in _scalings(run.of("positions"))
        for source, name in (("loss", "nll"), ("context cut", "control_nll"))
    ]
    title = "Loss by position (nats per token)"
    made.append(grid("positions", title, (f"{a:,}–{b - 1:,}" for a, b in bins), entries, heading="Scaling", show=THREE))
    return [table for table in [*made, _short_context(run)] if table]


def _at(run: Run, scaling: str, start: int, stop: int) -> list[Record]:
    return run.of("positions", scaling=scaling, start=start, stop=stop)


def _scalings(rows: Iterable[Record]) -> list[str]:
    return sorted({row.scaling for row in rows}, key=scaling_order)


def _by_length(title: str, rows: list[Record], note: str = "") -> Table | None:
    lengths = sorted({row.length for row in rows})
    estimate = share_of if rows and "correct" in rows[0] else perplexity_of
    entries = [
        (scaling_name(s), "", [estimate([x for x in rows if (x.scaling, x.length) == (s, n)]) for n in lengths])
        for s in _scalings(rows)
    ]
    caption = f"Each number: {counts_text(cell for *_, cells in entries for cell in cells)}.{note}"
    return grid("", title, (f"{n:,}" for n in lengths), entries, caption=caption, heading="Scaling")


def _control(run: Run) -> str:
    """Give the perplexity of the truncation control."""
    found = run.of("perplexity", mode="truncated")
    return f" The same tokens with the context cut to the training length: {found[0].ppl:.2f}." if found else ""


def _short_context(run: Run) -> Table | None:
    """Show bits per byte for each window, then minimal pairs, all of them and by field."""
    windows = sorted({row.length for row in run.of("bits")})
    pairs = [row for row in run.of("pairs") if row.kind in ("all", "field")]
    fields = sorted({_field(row) for row in pairs}, key=lambda name: (name != ALL, name))
    entries = []
    for scaling in _scalings([*run.of("bits"), *pairs]):
        bits = [mean_of([x.bits_per_byte for x in run.of("bits", scaling=scaling, length=n)]) for n in windows]
        # Results from before fields had one spelling may have two rows for one: they are counted together.
        right = [[row for row in pairs if (row.scaling, _field(row)) == (scaling, name)] for name in fields]
        entries.append((scaling_name(scaling), "", [*bits, *map(_counted, right)]))
    heads = (*(f"bits per byte, windows of {n:,}" for n in windows), *fields)
    sizes = sorted({(row.bytes, row.texts) for row in run.of("bits")})
    counts = [f"{size:,} bytes of {n:,} text{'s' if n > 1 else ''}" for size, n in sizes]
    counts += [
        f"{name}: {sum(x.cases for x in pairs if (x.scaling, _field(x)) == (s, name)):,}"
        for s in _scalings(pairs)[:1]
        for name in fields
    ]
    caption = f"Counted over {'; '.join(counts)}."
    return grid("short", "Short context", heads, entries, caption=caption, heading="Scaling", show=THREE)


def _field(row: Record) -> str:
    return ALL if row.kind == "all" else field_name(row.field)


def _counted(rows: list[Record]) -> Estimate | None:
    return share_of([{name: sum(row[name] for row in rows) for name in ("cases", "correct")}])
