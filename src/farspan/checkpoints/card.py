"""The model card: what the model is, how to use it, what was measured, and by which command."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import resources
from typing import Any

import torch
from huggingface_hub import ModelCardData

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
MODES = {"truncated": "context cut to the training length"}
ALL = "all fields"
THREE = partial(share_text, digits=3)


def render(
    name: str,
    model: FarspanForCausalLM,
    run: Run,
    *,
    license: str | None = None,
    base_model: str | None = None,
    original: str | None = None,
    rounded: bool = False,
) -> str:
    """Return the card as Markdown with YAML front matter; the sections are those of `card.md.jinja`.

    Args:
        run: the results about this model.
        base_model: the model that this one was made from, by its name on the hub, which becomes a link.
        original: the same as the text names it, perhaps a file.
        rounded: the weights are written in another dtype than they were measured in.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ValueError(
            "a model card needs jinja2, got an installation without it; install farspan[report]"
        ) from error
    config = model.config
    kinds = sorted({spec.kind for spec in config.attention_specs})
    front_matter = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        license=license,
        base_model=base_model,
        tags=["farspan", "long-context", *kinds],
    )
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["code"] = code
    text = (resources.files("farspan") / "checkpoints" / "card.md.jinja").read_text(encoding="utf-8")
    return environment.from_string(text).render(
        name=name,
        front_matter=str(front_matter.to_yaml()).strip(),
        original=original,
        facts=facts(model),
        kinds=kinds,
        dynamic=measured_dynamic(model, run),
        train_length=config.train_length,
        tables=[to_markdown(table) for table in tables(run)],
        sources=run.sources,
        rounded=rounded,
        version=version("farspan"),
        commit=commit(),
    )


def facts(model: FarspanForCausalLM) -> dict[str, str]:
    """Return what a reader asks for first."""
    config = model.config
    scaling = config.rotary().scaling
    method = "" if scaling is None else f"{(config.rope_parameters or {})['rope_type']}, factor {scaling.factor:g}"
    return {
        "Parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "Weights": str(model.dtype).removeprefix("torch."),
        "Layers": attention_text(config.attention_specs),
        "Hidden size": f"{config.hidden_size:,}",
        "Heads": f"{config.num_attention_heads} of width {config.head_dim}, {config.num_key_value_heads} for keys",
        "Vocabulary": f"{config.vocab_size:,}",
        "Training length": f"{config.train_length:,} tokens",
        "Cache": cache_text(model),
        **({"Position scaling": method} if method else {}),
    }


def attention_text(specs: Sequence[AttentionSpec]) -> str:
    """Return each kind of layer with its number.

    >>> attention_text((AttentionSpec("coca", window=128),) * 3 + (AttentionSpec("rope", rotary=False),))
    '3 coca-exact (window 128), 1 rope (without positions)'
    """
    parts = []
    for spec, count in Counter(specs).items():
        notes = [f"window {spec.window}"] if spec.window else []
        notes += ["without positions"] if not spec.rotary and spec.kind != "alibi" else []
        parts.append(f"{count} {spec.name}" + (f" ({', '.join(notes)})" if notes else ""))
    return ", ".join(parts)


@torch.no_grad()
def cache_text(model: FarspanForCausalLM) -> str:
    """Return the size of the cache at the training length, measured with one token per layer."""
    config, length = model.config, model.config.train_length
    width = (config.num_key_value_heads or 0) * (config.head_dim or 0)
    cache = model(torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=True).past_key_values
    held = full = 0
    for spec, layer in zip(config.attention_specs, cache.layers, strict=True):
        held += layer.nbytes * (1 if spec.linear else min(length, spec.window or length))
        full += 2 * width * model.dtype.itemsize * length
    return f"{held / 2**20:,.2f} MiB for {length:,} tokens, {held / full:.0%} of full RoPE attention's"


def measured_dynamic(model: FarspanForCausalLM, run: Run) -> str:
    """Return the arguments of `set_rope_parameters` for the smallest dynamic NTK that was measured, "" for none."""
    found = {row.scaling for kind in EVALUATIONS for row in run.of(kind)}
    names = {name.removesuffix(LOG) for name in found if name.endswith(LOG) == bool(model.config.log_length)}
    dynamic = sorted((name for name in names if name.startswith(DYNAMIC)), key=scaling_order)
    if not dynamic or model.config.rotary().scaling is not None:
        return ""
    factor, _, mode = dynamic[0].removeprefix(DYNAMIC).partition("/")
    return f'rope_type="dynamic", factor={float(factor)}' + (f', mode="{mode}"' if mode else "")


def code(text: str) -> str:
    """Return text as inline code, whatever it holds.

    >>> code("a `b` c")
    '`` a `b` c ``'
    """
    fence = "`"
    while fence in text:
        fence += "`"
    return f"{fence}{text}{fence}" if len(fence) == 1 else f"{fence} {text} {fence}"


# Tables


def tables(run: Run) -> list[Table]:
    """Make a table for each kind of measurement, with a line for each scaling."""
    positions, retrieval = run.of("positions"), [row for row in run.of("retrieval") if row.depth is None]
    pairs = [row for row in run.of("pairs") if row.kind in ("all", "field")]
    made = []
    for mode in dict.fromkeys(row.mode for row in run.of("perplexity")):
        rows = run.of("perplexity", mode=mode)
        strides = ", ".join(f"{stride:,}" for stride in sorted({row.stride for row in rows}))
        title = f"Perplexity by window length ({MODES.get(mode, mode)}, stride {strides})"
        made.append(_table(title, rows, perplexity_of))
    made.append(_table("Passkey accuracy by prompt length", run.of("passkey"), share_of))
    for task in dict.fromkeys(row.task for row in retrieval):
        rows = [row for row in retrieval if row.task == task]
        made.append(_table(f"Retrieval accuracy by prompt length: {task}", rows, share_of))
    for title, field in (("Loss by position", "nll"), ("Loss by position, context cut", "control_nll")):
        rows = [row for row in positions if row[field]]
        estimate = partial(_per_token, field)
        made.append(_table(f"{title} (nats per token)", rows, estimate, _range, lambda ends: ends[2], THREE))
    made.append(_table("Bits per byte by window length", run.of("bits"), _bits, show=THREE))
    made.append(_table("Minimal pairs", pairs, share_of, _field, lambda field: field[1], THREE))
    return [table for table in made if table]


def _table(
    title: str,
    rows: Sequence[Record],
    estimate: Callable[[list[Record]], Estimate | None],
    column: Callable[[Record], Any] = lambda row: row.length,
    head: Callable[[Any], str] = "{:,}".format,
    show: Callable[[float], str] | None = None,
) -> Table | None:
    """Make a table with a column for each value of `column`, named by `head`."""
    columns = sorted({column(row) for row in rows})
    entries = [
        (scaling_name(s), "", [estimate([x for x in rows if (x.scaling, column(x)) == (s, c)]) for c in columns])
        for s in sorted({row.scaling for row in rows}, key=scaling_order)
    ]
    caption = f"Each number: {counts_text(cell for *_, cells in entries for cell in cells)}."
    return grid("", title, map(head, columns), entries, caption=caption, heading="Scaling", show=show)


def _range(row: Record) -> tuple[int, int, str]:
    return row.start, row.stop, f"{row.start:,}–{row.stop - 1:,}"


def _field(row: Record) -> tuple[bool, str]:
    return (row.kind != "all", ALL if row.kind == "all" else row.field.replace("/", "_"))


def _per_token(field: str, rows: list[Record]) -> Estimate | None:
    return mean_of([row[field] / row.tokens for row in rows], tokens=sum(row.tokens for row in rows))


def _bits(rows: list[Record]) -> Estimate | None:
    return mean_of([row.bits_per_byte for row in rows], texts=sum(row.texts for row in rows))
