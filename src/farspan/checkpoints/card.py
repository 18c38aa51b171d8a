"""The model card: what the model is, how to use it, what was measured, and by which command."""

from collections import Counter
from collections.abc import Sequence
from importlib import resources

import torch
from huggingface_hub import ModelCardData

from farspan.layers import AttentionSpec
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.report.results import Record, Run, find, perplexity_of, scaling_order, share_of
from farspan.report.tables import Table, counts_text, grid, scaling_name, to_markdown
from farspan.results import commit, version

MODES = {"truncated": "context cut to the training length"}


def render(
    name: str,
    model: FarspanForCausalLM,
    run: Run,
    *,
    license: str | None = None,
    base_model: str | None = None,
    original: str | None = None,
) -> str:
    """Return the card as Markdown with YAML front matter; the sections are those of `card.md.jinja`.

    Args:
        run: the results about this model.
        base_model: the model that this one was made from, by its name on the hub, which becomes a link.
        original: the same as the text names it, perhaps a file.
    """
    try:
        from jinja2 import StrictUndefined, Template
    except ImportError:
        raise ValueError("a model card needs jinja2, which is missing; install farspan[report]") from None
    kinds = sorted({spec.kind for spec in model.config.attention_specs})
    front_matter = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        license=license,
        base_model=base_model,
        tags=["farspan", "long-context", *kinds],
    )
    text = (resources.files("farspan") / "checkpoints" / "card.md.jinja").read_text(encoding="utf-8")
    template = Template(text, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return template.render(
        name=name,
        front_matter=str(front_matter.to_yaml()).strip(),
        original=original,
        facts=facts(model),
        kinds=kinds,
        train_length=model.config.train_length,
        tables=[to_markdown(table) for table in tables(run)],
        sources=run.sources,
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


# Tables


def tables(run: Run) -> list[Table]:
    """Make tables by length, with a line for each scaling: perplexity, passkeys, and each retrieval task."""
    named = list[tuple[str, list[Record]]]()
    for mode in dict.fromkeys(row.mode for row in run.of("perplexity")):
        rows = run.of("perplexity", mode=mode)
        strides = ", ".join(f"{stride:,}" for stride in sorted({row.stride for row in rows}))
        named.append((f"Perplexity by window length ({MODES.get(mode, mode)}, stride {strides})", rows))
    named.append(("Passkey accuracy by prompt length", run.of("passkey")))
    for task in dict.fromkeys(row.task for row in run.of("retrieval")):
        named.append((f"Retrieval accuracy by prompt length: {task}", run.of("retrieval", task=task, depth=None)))
    return [table for title, rows in named if (table := _table(title, rows)) is not None]


def _table(title: str, rows: Sequence[Record]) -> Table | None:
    estimate = perplexity_of if any("ppl" in row for row in rows) else share_of
    lengths = sorted({row.length for row in rows})
    entries = [
        (scaling_name(scaling), "", [estimate(find(rows, scaling=scaling, length=length)) for length in lengths])
        for scaling in sorted({row.scaling for row in rows}, key=scaling_order)
    ]
    caption = f"Each number: {counts_text(cell for *_, cells in entries for cell in cells)}."
    return grid("", title, map("{:,}".format, lengths), entries, caption=caption, heading="Scaling")
