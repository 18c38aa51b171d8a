"""Text comes from any checkpoint as `generate` gives it, in a chat too; what cannot be used raises one line."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from farspan.checkpoints import generate
from farspan.convert import from_pretrained
from tests.checkpoints.sources import with_tokenizer
from tests.command_line import called

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}{% if add_generation_prompt %} a:{% endif %}"
)


def with_template(folder: Path, template: object) -> Path:
    file = with_tokenizer(folder) / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    return folder


def test_text_comes_in_pieces_and_is_what_generate_gives(tmp_path: Path) -> None:
    source, pieces = with_tokenizer(tmp_path), list[str]()
    model, tokenizer = from_pretrained(source), AutoTokenizer.from_pretrained(source)
    prompt = tokenizer("some words", return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=30, do_sample=False, pad_token_id=0, eos_token_id=0)
    expected = tokenizer.decode(ids[0, prompt.input_ids.shape[1] :], skip_special_tokens=True)
    assert generate(source, "some words", max_new_tokens=30, show=pieces.append) == expected == "".join(pieces)
    assert len(pieces) > 1
    sampled = [generate(source, "some words", max_new_tokens=9, temperature=2.0, seed=seed) for seed in (0, 0, 1)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_a_chat_is_the_template_and_then_text(tmp_path: Path) -> None:
    source = with_template(tmp_path, TEMPLATE)
    status, out, err = called("generate", source, "--chat", "why?", "--max-new-tokens", 9)
    assert status == 0, err
    assert out == generate(source, "user: why?; a:", max_new_tokens=9) + "\n"
    assert out != generate(source, "why?", max_new_tokens=9) + "\n"


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        (None, ("--chat", "a"), "--chat needs a tokenizer with a chat template, got one without; leave --chat out"),
        ("{% for m in messages %}", ("--chat", "a"), "(TemplateSyntaxError: "),
        ("{{ ''.__class__.__mro__ }}", ("--chat", "a"), "the model's chat template fails (SecurityError: "),
        ("{# nothing #}", ("--chat", "a"), "prompt must have at least one token"),
        (5, ("--chat", "a"), "(TypeError: "),
        (None, ("",), "prompt must have at least one token"),
        (None, ("a\ud800b",), "the model's tokenizer fails (TypeError: "),
        (None, ("a", "--temperature", "1e-320"), "temperature must be 0 or 0.001 … 1000, got 1e-320"),
        (None, ("a", "--temperature", "nan"), "got nan"),
    ],
    ids=ascii,
)
def test_bad_templates_and_arguments(
    template: object, options: tuple[object, ...], message: str, tmp_path: Path
) -> None:
    source = with_tokenizer(tmp_path) if template is None else with_template(tmp_path, template)
    status, out, err = called("generate", source, *options)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize("command", [("generate", "a"), ("export", "--out", "hub")], ids=str)
def test_a_model_without_its_tokenizer(command: tuple[str, str], tmp_path: Path, monkeypatch: Any) -> None:
    source = with_tokenizer(tmp_path / "source")
    (source / "tokenizer.json").unlink()
    (source / "tokenizer_config.json").unlink()
    monkeypatch.chdir(tmp_path)
    status, _, err = called(command[0], source, *command[1:])
    assert (status, err.count("\n")) == (2, 1)
    assert "must come with its tokenizer" in err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_settings_of_generate_come_along(tmp_path: Path) -> None:
    source = with_tokenizer(tmp_path)
    text = generate(source, "some words", max_new_tokens=12)
    ids = AutoTokenizer.from_pretrained(source)(text).input_ids
    settings = {"eos_token_id": [ids[5], 0], "temperature": 0.5, "top_p": 0.9, "do_sample": True}
    (source / "generation_config.json").write_text(json.dumps(settings))
    held = from_pretrained(source).generation_config
    assert (held.eos_token_id, held.temperature, held.top_p) == ([ids[5], 0], 0.5, 0.9)
    assert len(generate(source, "some words", max_new_tokens=12)) < len(text)
