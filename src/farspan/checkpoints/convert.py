"""Load a checkpoint as a farspan model, give it another attention, and write it to a folder."""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from farspan.checkpoints.calibrate import CalibrationConfig, CalibrationReport, calibrate, needs_fit
from farspan.checkpoints.configuration import config_of, valid_config
from farspan.checkpoints.replace import AUTO, Target, replace_attention
from farspan.checkpoints.sources import Source, open_source, quiet, tokenizer_of
from farspan.configuration_farspan import FarspanConfig
from farspan.errors import require
from farspan.modeling_farspan import FarspanForCausalLM
from farspan.results import write_result
from farspan.utils import Progress, atomic_path, check_folder, lock, read_settings, silent

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
CALIBRATION_TOKENS = 262_144
REACH_SEQUENCES, REACH_WINDOWS = 4, 4
"""Sequences, of so many windows each, on which the reach of layers is measured."""
REACH_TEXT = "stdlib"
"""What reach is measured on without other text: the Python standard library's sources, which are always there."""
SHARD_SIZE = "5GB"
NOTE = "conversion.json"


# Reading


def load(
    source: Source,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    config: FarspanConfig | None = None,
    progress: Progress = silent,
) -> FarspanForCausalLM:
    """Load a source as our model with its own attention: the same logits. dtype None keeps the source's.

    `config` replaces the source's, for the same tensors at other lengths and angles. Memory holds the model and one
    tensor more.
    """
    model = _empty_model(source, config)
    names = _check_tensors(source, model)
    dtype = dtype or source.dtype
    for done, name in enumerate(names):
        # A copy: what safetensors gives is a view of the file, which may change or vanish.
        stored = source.read(name)
        tensor = stored.to(device=device, dtype=dtype, copy=True)
        require(
            # aminmax gives NaN where there is one, and makes no copy, unlike isfinite.
            bool(torch.stack(tensor.aminmax()).isfinite().all()),
            f"tensor {name!r} in {str(source.path)!r} must hold finite numbers as {dtype}, got NaN or infinity in "
            f"{stored.dtype}; download it again, or choose a wider dtype",
        )
        del stored  # its file is mapped for as long
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor))
        progress(done + 1, len(names), "reading", phase="reading")
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.config.dtype = dtype
    if source.generation is not None:
        model.generation_config = source.generation
    return model.eval()


def _empty_model(source: Source, config: FarspanConfig | None = None) -> FarspanForCausalLM:
    config = config or config_of(source)
    with valid_config(source.config, source.where), torch.device("meta"):
        return FarspanForCausalLM(config)


def _check_tensors(source: Source, model: FarspanForCausalLM) -> list[str]:
    """Return the names to read. Raise for the first tensor that is unknown, missing or of another shape."""
    path = str(source.path)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    known = {source.stored(name) for name in shapes}
    unknown = [name for name in source.shapes if name not in known and not name.endswith(".rotary_emb.inv_freq")]
    remedy = "check num_hidden_layers, biases and model_type"
    if any(".lora_" in name for name in unknown):
        remedy = "merge LoRA weights first"
    require(
        not unknown,
        f"tensors {unknown[:3]} in {path!r} are unknown to a {source.config.get('model_type')} model of "
        f"{model.config.num_hidden_layers} layers; {remedy}",
    )
    tied = model.config.tie_word_embeddings
    names = [name for name in shapes if name != HEAD or not tied]
    for name in names:
        found = source.shapes.get(source.stored(name))
        require(
            found == shapes[name],
            f"tensor {name!r} in {path!r} must have shape {shapes[name]} by the configuration, got {found or 'none'}; "
            "download it again, or check hidden_size, head counts and vocab_size",
        )
    require(
        not tied or _head_is_embedding(source),
        f"tensor {HEAD!r} must equal {EMBEDDING!r} where tie_word_embeddings is true; "
        "set tie_word_embeddings to false in config.json",
    )
    return names


def _head_is_embedding(source: Source) -> bool:
    if source.stored(HEAD) not in source.shapes:
        return True
    head, embedding = source.read(HEAD), source.read(EMBEDDING)
    return head.shape == embedding.shape and torch.equal(head.float(), embedding.float())


COUNTS = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "coca_activation", "causal"),
    *("cosformer_max_length", "cosformer_beyond", "cosformer_activation", "polar_activation", "kv_shift"),
    "train_length",
)
"""Fields of a configuration that change what the same tensors compute, beside those that :func:`fingerprint` adds."""


def fingerprint(source: Source) -> str:
    """Return a digest that two checkpoints share if they hold one model: as a folder, in shards or as a GGUF file.

    Numbers count as float32, as `farspan eval` reads them: a copy in fewer bits is another model. A head that equals
    the embedding counts as tied to it. Tensors are read one by one, these two together.
    """
    model, plain = _empty_model(source), FarspanConfig()
    config, names = model.config, _check_tensors(source, model)
    if HEAD in names and _head_is_embedding(source):
        names.remove(HEAD)
    # Only what differs from the defaults, so that a new field changes no older digest.
    meaning: dict[str, Any] = {n: getattr(config, n) for n in COUNTS if getattr(config, n) != getattr(plain, n)}
    meaning["attention"] = [[spec.name, spec.window, spec.rotary] for spec in config.attention_specs]
    # "law" is the scaling: a key of recorded digests.
    meaning |= {"base": config.rotary().base, "law": repr(config.rotary().scaling)}
    if config.log_length == "step":  # each row of a result says whether a temperature was on; this is another one
        meaning["log_length"] = "step"
    meaning["epsilon"] = float(torch.tensor(config.rms_norm_eps))  # GGUF files keep it in float32
    digest = sha256(json.dumps(meaning, sort_keys=True).encode())
    for name in sorted(names):
        tensor = source.read(name).to(torch.float32).contiguous()
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy())  # type: ignore[arg-type]
    return digest.hexdigest()


# Writing


@contextmanager
def new_folder(out: Path) -> Iterator[None]:
    """Hold `out` for this process, to write a model there. Raise unless it is new or empty, and nobody else's.

    The lock lies beside the folder, which appears complete or not at all.
    """
    path = out.resolve()
    require(path != Path.cwd(), "out must be a new folder, got the current one; name another")
    name = f".{path.name}.lock"
    with lock(path.parent, name=name):
        try:
            check_folder(out)
            yield
        finally:
            (path.parent / name).unlink(missing_ok=True)


def save(model: FarspanForCausalLM, out: Path, carry: Callable[[Path], None], *, config: Any = None) -> None:
    """Write a model and what travels with it to a folder that appears complete or not at all.

    Args:
        carry: puts tokenizer, notes, a card or source into the folder that it is given.
        config: the config.json of another family, in place of ours.
    """
    with atomic_path(out.resolve()) as folder:
        try:
            with quiet():
                model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
        except SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(int(number[1]) if number else 0, str(error)) from error
        if config is not None:
            raw = {**config, "dtype": str(model.dtype).removeprefix("torch.")}
            (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        carry(folder)
        # As the umask has them: safetensors writes for the owner alone.
        rights = (folder / "config.json").stat().st_mode
        for file in folder.glob("*.safetensors"):
            file.chmod(rights)


def write_note(folder: Path, source: Path, **more: Any) -> None:
    """Record in a model's folder where its original is."""
    note = {"schema": 1, "source": str(source.absolute()), **more}
    (folder / NOTE).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")


def read_note(folder: Path) -> Path | None:
    """Return the original of a converted folder; None where nothing is said."""
    if not (folder / NOTE).is_file():
        return None
    source = read_settings(folder / NOTE, "checkpoint").get("source")
    require(isinstance(source, str), f"'source' in {str(folder / NOTE)!r} must be a path; remove the file")
    return Path(str(source))


# Converting


@dataclass(frozen=True)
class Conversion:
    """What :func:`convert_folder` did."""

    report: CalibrationReport | None
    """How well the layers were fitted, if there was text for it."""
    copied: tuple[int, ...]
    """Layers that changed without a fit: their weights are the original's, but not yet what they compute."""
    global_layers: tuple[int, ...] = ()
    reach: tuple[float, ...] = ()
    """Of each layer, if the global layers were chosen by measurement."""


def from_pretrained(
    path: str | os.PathLike[str],
    attention: str | None = "rope",
    *,
    window: int | None = None,
    global_every: int | None = None,
    global_layers: Sequence[int] | str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: Progress = silent,
) -> FarspanForCausalLM:
    """Load a LLaMA, Mistral, Qwen2, Qwen3 or SmolLM checkpoint as a farspan model.

    New layers start from copied weights, which is far from the source; :func:`convert_folder` fits them on text.

    Args:
        path: a folder with config.json and safetensors, a .gguf file, or a farspan folder.
        attention: "rope" gives the source's logits; None keeps what a farspan folder has; the others, and `window`,
            `global_every` and `global_layers`, are explained at :class:`Target`. Under dynamic NTK the logits of one
            forward pass are the source's, but `generate` takes one base for prompt and new tokens, where transformers
            changes it under a cache of older angles.
        dtype: of the weights; None keeps the source's (float32 for GGUF).

    ::

        model = farspan.convert.from_pretrained("SmolLM2-135M", attention="coca-exact")
    """
    target, source = Target(attention, window, global_every, global_layers), open_source(Path(path))
    target.specs(config_of(source))  # raises for an impossible target, before any work
    ids = _reach_ids(source, target, ())
    model = load(source, dtype=dtype, device=device, progress=progress)
    _give_attention(model, target, reach_ids=ids, progress=progress)
    return model


def _give_attention(
    model: FarspanForCausalLM,
    target: Target,
    calibration: Tensor | None = None,
    calibration_config: CalibrationConfig | None = None,
    *,
    reach_ids: Tensor | None = None,
    progress: Progress = silent,
) -> Conversion:
    """Replace a RoPE model's attention, fitted if there is text for it, otherwise from copied weights.

    `reach_ids` are sequences to choose the global layers on, where these are "auto".
    """
    before, reach = model.config.attention_specs, list[float]()
    if reach_ids is not None:
        target, reach = target.measured(model, reach_ids, progress)
    specs, report = target.specs(model.config), None
    if calibration is not None:
        report = calibrate(model, target, calibration, calibration_config, progress=progress)
    else:
        for layer, spec in enumerate(specs):
            if spec != before[layer]:
                replace_attention(model, layer, spec)
    if target.hybrid:
        model.set_log_length(True)
    changed = [i for i, (new, old) in enumerate(zip(specs, before, strict=True)) if needs_fit(new, old)]
    everywhere = [i for i, spec in enumerate(specs) if target.hybrid and spec.window is None]
    return Conversion(report, tuple(changed if report is None else ()), tuple(everywhere), tuple(reach))


def convert_folder(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    attention: str | None = None,
    *,
    text: Sequence[str] = (),
    tokens: int = CALIBRATION_TOKENS,
    length: int = 512,
    calibration_config: CalibrationConfig | None = None,
    window: int | None = None,
    global_every: int | None = None,
    global_layers: Sequence[int] | str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: Progress = silent,
) -> Conversion:
    """Do what :func:`from_pretrained` does, and write a new folder: the model, its tokenizer, conversion.json (the
    source, the global layers and the reach that chose them) and calibration.json, the report.

    Args:
        text: sources as `farspan data` takes them. `tokens` of it, in sequences of `length` (at most the training
            length, and a layer's window), calibrate; "auto" is measured on it, too.
    """
    require(
        not text or attention is not None,
        f"calibration needs attention, the one to fit, got {', '.join(text)} without; give for example coca-exact",
    )
    out = Path(out)
    with new_folder(out):
        target, opened = Target(attention, window, global_every, global_layers), open_source(Path(source))
        config = config_of(opened)
        windows = [spec.window or length for spec in target.specs(config)]
        carried = opened.carried()  # first, so that a broken tokenizer is found before any work
        length = min(length, config.train_length, *windows)
        ids = sequences(opened, text, max(2, tokens // length), length) if text else None
        reach_ids = _reach_ids(opened, target, text)
        model = load(opened, dtype=dtype, device=device, progress=progress)
        done = _give_attention(model, target, ids, calibration_config, reach_ids=reach_ids, progress=progress)

        def carry(folder: Path) -> None:
            for name, content in carried.items():
                (folder / name).write_bytes(content)
            if attention is not None:
                layers = {"global_layers": done.global_layers} if done.global_layers else {}
                reach = {"reach": done.reach, "reach_measured_on": list(text) or [REACH_TEXT]} if done.reach else {}
                write_note(folder, Path(source), **layers, **reach)
            if done.report is not None:
                rows, on = list(done.report.layers), str(model.device)
                write_result(folder / "calibration.json", rows, device=on, seed=0, kind="calibration")

        save(model, out, carry)
    return done


def _reach_ids(source: Source, target: Target, text: Sequence[str]) -> Tensor | None:
    """Return sequences to choose global layers on, if the target asks for it."""
    if target.global_layers != AUTO:
        return None
    length = min(config_of(source).train_length, REACH_WINDOWS * target.keys)
    return sequences(source, text or (REACH_TEXT,), REACH_SEQUENCES, length)


def sequences(source: Source, text: Sequence[str], wanted: int, length: int) -> Tensor:
    """Return ids (sequences, length) from text sources: an eighth from each document, more only if there are few."""
    from farspan.data import documents

    tokenizer, found, spare = tokenizer_of(source), list[Tensor](), list[Tensor]()
    share = max(1, wanted // 8)
    for document in documents(text):
        if len(found) >= wanted:
            break
        part = document.text[: wanted * length * 10]  # few tokens are longer than ten characters
        with quiet():
            ids = torch.tensor(tokenizer(part).input_ids, dtype=torch.long)
        pieces = ids[: len(ids) // length * length].view(-1, length)
        found += pieces[:share]
        spare += islice(pieces[share:], max(0, wanted - len(spare)))
    found = [*found, *spare][:wanted]
    require(
        len(found) >= 2,
        f"text must give at least two sequences of {length} tokens, got {len(found)} from {', '.join(text)}; "
        "use longer texts",
    )
    return torch.stack(found)
