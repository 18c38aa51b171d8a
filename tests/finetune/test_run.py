"""A recipe run for real, at toy size: what moves, what does not, what is left when it is stopped."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import farspan.training.loop as loop
import farspan_cli
from farspan import FarspanConfig, FarspanForCausalLM
from farspan.convert import from_pretrained
from farspan.convert.note import read_note
from farspan.data import prepare
from farspan.evaluation.laws import law_of
from farspan.finetune import Distillation, Recipe, Standing, finetune, open_origin
from farspan.finetune.weights import begun, give_lengths, merge_lora, resumed
from farspan.training.config import RunSection
from tests.finetune.folders import losses, made, recipe

DISTIL = recipe(
    {"objective": {"attention-output": 1.0}, "train": ["*.self_attn.*"]},
    {"objective": {"logit-kl": 1.0}},
    {"objective": {"logit-kl": 0.5, "next-token": 0.5}},
)

FAR_UNDER_NTK = {
    "objective": {"logit-kl": 1.0},
    "reach": 8,
    "rope_parameters": {"rope_type": "dynamic", "factor": 4.0},
    "train_length": 16,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    return made(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def whole(folders: tuple[Path, Path, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Distilled without interruption."""
    _, coca, source = folders
    out = tmp_path_factory.mktemp("whole") / "run"
    finetune(coca, {source: 1.0}, DISTIL, out)
    return out


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_distilling_lowers_every_loss_and_comes_near_the_original(
    folders: tuple[Path, Path, str], tmp_path: Path
) -> None:
    original, coca, source = folders
    steps = {"steps": 40, "peak_lr": 3e-3, "end_lr": 3e-4, "weight_decay": 0.0, "accumulation": 1}
    common = {"length": 32, "batch_size": 8, "optimizer": steps}
    longer = recipe({"objective": {"attention-output": 1.0}, **common}, {"objective": {"logit-kl": 1.0}, **common})
    done = finetune(coca, {source: 1.0}, longer, tmp_path / "out")
    for stage in ("stage-1-s0", "stage-2-s1"):
        curve = losses(tmp_path / "out" / stage)
        assert sum(curve[-5:]) < 0.7 * sum(curve[:5])
    text = torch.tensor([[byte + 1 for byte in b"6001 times 6001 is 36012001, and so it goes.\n"]])
    teacher = from_pretrained(original)
    with torch.no_grad():
        far, near = (
            Distillation(from_pretrained(path, attention=None), teacher, {"logit-kl": 1.0})(text)
            for path in (coca, done)
        )
    assert near < 0.5 * far


def test_a_recipe_leaves_models_and_an_account(whole: Path, folders: tuple[Path, Path, str]) -> None:
    _, coca, _ = folders
    assert {p.name for p in whole.iterdir()} == {"stage-1-s0", "stage-2-s1", "stage-3-s2", "model", "recipe.json"}
    assert (whole / "model" / "tokenizer.json").read_bytes() == (coca / "tokenizer.json").read_bytes()
    FarspanForCausalLM.from_pretrained(whole / "model")
    rows = json.loads((whole / "recipe.json").read_text())["rows"]
    assert [row["tokens"] for row in rows] == [8 * 4 * 16] * 3
    assert all(row["seconds"] > 0 for row in rows)
    assert rows[0]["trained_parameters"] < rows[0]["parameters"] == rows[1]["trained_parameters"]


def test_frozen_parameters_are_bit_identical_after_a_stage(whole: Path, folders: tuple[Path, Path, str]) -> None:
    before, after = weights(folders[1]), weights(whole / "stage-1-s0" / "model")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]) == (".self_attn." not in name), name


@pytest.mark.parametrize("key", ["t_proj", "k_proj"])
def test_the_published_stages_move_what_the_paper_says(
    key: str, folders: tuple[Path, Path, str], tmp_path: Path
) -> None:
    """Also of the original itself, which is the control: the same text without CoCA."""
    original, coca, source = folders
    path = coca if key == "t_proj" else original
    finetune(path, {source: 1.0}, Recipe.load("paper").capped(16).scaled(16 * 12), tmp_path / "out")
    moved = []
    for name in ("stage-1-t", "stage-2-qkv", "stage-3-all"):
        before, path = weights(path), tmp_path / "out" / name / "model"
        after = weights(path)
        moved.append({name.split(".")[-2] for name in after if not torch.equal(before[name], after[name])})
    assert moved[0] == {key}
    assert moved[1] == {"q_proj", key, "v_proj"}
    assert {"embed_tokens", "down_proj", "input_layernorm", "o_proj", key} <= moved[2]


def test_a_recipe_stopped_anywhere_goes_on_to_the_same_model(
    whole: Path, folders: tuple[Path, Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, coca, source = folders
    original, calls = loop._Run.advance, []

    def crash(self, step: int) -> None:
        calls.append(step)
        if len(calls) in (6, 15, 26):
            raise RuntimeError("power cut")
        original(self, step)

    monkeypatch.setattr(loop._Run, "advance", crash)
    often = RunSection(checkpoint_every=3)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="power cut"):
            finetune(coca, {source: 1.0}, DISTIL, tmp_path / "run", run=often)
    finetune(coca, {source: 1.0}, DISTIL, tmp_path / "run", run=often)
    for stage in ("stage-1-s0", "stage-2-s1", "stage-3-s2"):
        assert losses(tmp_path / "run" / stage) == losses(whole / stage)
    ours, theirs = weights(tmp_path / "run" / "model"), weights(whole / "model")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_stage_of_far_positions_keeps_its_training_length_and_law(
    folders: tuple[Path, Path, str], tmp_path: Path
) -> None:
    _, coca, source = folders
    near = finetune(coca, {source: 1.0}, recipe({"objective": {"logit-kl": 1.0}}), tmp_path / "near")
    done = finetune(coca, {source: 1.0}, recipe(FAR_UNDER_NTK), tmp_path / "far")
    config = FarspanForCausalLM.from_pretrained(done).config
    assert (config.train_length, law_of(config)) == (16, "ntk-4")
    logarithmic = replace(recipe(FAR_UNDER_NTK), log_length=True)
    same = finetune(coca, {source: 1.0}, logarithmic, tmp_path / "log")
    assert law_of(FarspanForCausalLM.from_pretrained(same).config) == "ntk-4+log"
    assert torch.equal(weights(same)["model.norm.weight"], weights(done)["model.norm.weight"])  # trained without
    assert not torch.equal(weights(near)["model.norm.weight"], weights(done)["model.norm.weight"])


FAR = recipe({"reach": 4, "rope_parameters": {"rope_type": "yarn"}}).stages[0]


@pytest.mark.parametrize(
    "options", [{"attention": "rope", "log_length": True}, {"attention": {"kind": "coca", "window": 8}}], ids=str
)
def test_far_positions_are_refused_where_they_would_mean_something_else(options: dict) -> None:
    model = FarspanForCausalLM(FarspanConfig.preset("tiny", train_length=16, **options))
    with pytest.raises(ValueError, match=r"reach of stage s0 must be 1 for a model with windows.* got 4"):
        give_lengths(model, FAR)


def test_a_factor_follows_from_what_positions_reach() -> None:
    model = FarspanForCausalLM(FarspanConfig.preset("tiny", train_length=16))
    give_lengths(model, FAR)
    assert law_of(model.config) == "yarn-4"


def test_a_run_from_before_there_was_a_reach_is_the_same_run(folders: tuple[Path, Path, str], tmp_path: Path) -> None:
    _, coca, source = folders
    near, far = recipe({}), recipe({"reach": 2})
    finetune(coca, {source: 1.0}, near, tmp_path / "near")
    settings = json.loads((tmp_path / "near" / "stage-1-s0" / "model" / "trainer.json").read_text())["config"]
    assert "reach" not in settings["stage"]
    with pytest.raises(ValueError, match=r"stage.reach is 2, but .* was started with None"):
        finetune(coca, {source: 1.0}, far, tmp_path / "near")
    finetune(coca, {source: 1.0}, far, tmp_path / "far")
    with pytest.raises(ValueError, match=r"stage.reach is None, but .* was started with 2"):
        finetune(coca, {source: 1.0}, near, tmp_path / "far")


def test_a_finished_recipe_is_not_repeated(whole: Path, folders: tuple[Path, Path, str]) -> None:
    _, coca, source = folders
    before = (whole / "model" / "model.safetensors").stat().st_mtime_ns
    reports: list[Standing] = []
    assert finetune(coca, {f"{source}/": 1.0}, DISTIL, whole, report=reports.append) == whole / "model"
    assert (whole / "model" / "model.safetensors").stat().st_mtime_ns == before
    assert not reports


def test_progress_runs_over_all_stages(folders: tuple[Path, Path, str], tmp_path: Path) -> None:
    _, coca, source = folders
    reports: list[Standing] = []
    two = recipe({}, {"length": 8})
    finetune(coca, {source: 1.0}, two, tmp_path / "out", report=reports.append)
    assert [r.done for r in reports] == [8 * 4 * 16, 8 * 4 * 16 + 8 * 4 * 8]
    assert {r.total for r in reports} == {two.tokens}


def test_a_folder_holds_one_recipe(whole: Path, folders: tuple[Path, Path, str]) -> None:
    _, coca, source = folders
    with pytest.raises(ValueError, match=r"stage.length is 12, but .*stage-1-s0 was started with 16"):
        finetune(coca, {source: 1.0}, DISTIL.capped(12), whole)
    more = Recipe(DISTIL.description, (*DISTIL.stages, recipe({"name": "more"}).stages[0]))
    with pytest.raises(ValueError, match=r"finished model of another recipe, of .* and not .*, stage-4-more"):
        finetune(coca, {source: 1.0}, more, whole)
    with pytest.raises(ValueError, match=r"finished model of another recipe, of .*stage-3-s2 and not .*stage-2-s1;"):
        finetune(coca, {source: 1.0}, Recipe("", DISTIL.stages[:2]), whole)


def test_merged_lora_gives_the_logits_of_the_unmerged(folders: tuple[Path, Path, str], tmp_path: Path) -> None:
    _, coca, source = folders
    stages = recipe({"lora": {"r": 2, "alpha": 8, "target_modules": ["q_proj", "t_proj", "down_proj"]}})
    done = finetune(coca, {source: 1.0}, stages, tmp_path / "out")
    ids = torch.randint(1, 257, (2, 20))
    unmerged = resumed(tmp_path / "out" / "stage-1-s0" / "model", stages.stages[0]).eval()
    with torch.no_grad():
        apart, plain = unmerged(ids).logits, FarspanForCausalLM.from_pretrained(done)(ids).logits
        began = from_pretrained(coca, attention=None)(ids).logits
    assert (apart - plain).abs().max() <= 1e-5
    assert (apart - began).abs().max() > 1e-3
    before, after = weights(coca), weights(done)
    assert before.keys() == after.keys()  # nothing of PEFT is left
    changed = {name.split(".")[-2] for name in after if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "t_proj", "down_proj"}


@pytest.mark.parametrize("stage", [{"lora": {"r": 2}}, FAR_UNDER_NTK], ids=["lora", "far positions"])
def test_a_stage_goes_on_where_it_stopped(
    stage: dict, folders: tuple[Path, Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, coca, source = folders
    stages, often = recipe(stage), RunSection(checkpoint_every=3)
    finetune(coca, {source: 1.0}, stages, tmp_path / "whole", run=often)
    original = loop._Run.advance

    def crash(self, step: int) -> None:
        if step == 5:
            raise RuntimeError("power cut")
        original(self, step)

    monkeypatch.setattr(loop._Run, "advance", crash)
    with pytest.raises(RuntimeError, match="power cut"):
        finetune(coca, {source: 1.0}, stages, tmp_path / "cut", run=often)
    monkeypatch.undo()
    finetune(coca, {source: 1.0}, stages, tmp_path / "cut", run=often)
    assert losses(tmp_path / "cut" / "stage-1-s0") == losses(tmp_path / "whole" / "stage-1-s0")


def test_merging_nothing_changes_nothing(folders: tuple[Path, Path, str]) -> None:
    stage = recipe({"lora": {"r": 2}}).stages[0]
    merged = merge_lora(begun(folders[1], stage))  # B starts at zero
    plain = from_pretrained(folders[1], attention=None)
    assert {n: p.shape for n, p in merged.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}
    assert all(torch.equal(a, b) for a, b in zip(merged.parameters(), plain.parameters(), strict=True))


def test_a_converted_folder_and_what_is_made_of_it_say_where_they_are_from(
    whole: Path, folders: tuple[Path, Path, str], tmp_path: Path
) -> None:
    original, coca, _ = folders
    assert read_note(coca) == read_note(whole / "model") == original
    assert read_note(original) is None
    (tmp_path / "conversion.json").write_text("[]")
    with pytest.raises(ValueError, match="must be a JSON object"):
        read_note(tmp_path)


@pytest.mark.parametrize("law", ["linear", "yarn"])
def test_long_recipes_stretch_the_angles_to_their_rows(law: str, folders: tuple[Path, Path, str]) -> None:
    name = {"linear": "long-pi", "yarn": "long-yarn"}[law]
    model = begun(folders[1], Recipe.load(name).capped(128).stages[0])
    rope = model.config.rope_parameters
    assert (rope["rope_type"], rope["factor"], model.config.train_length) == (law, 4.0, 128)
    rotary = model.model.layers[0].self_attn.rotary
    assert rotary == model.config.rotary()
    if law == "yarn":
        assert rope["original_max_position_embeddings"] == 32


def test_a_dynamic_law_measures_against_the_stages_own_training_length(folders: tuple[Path, Path, str]) -> None:
    stage = recipe({"train_length": 16, "length": 64, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}})
    model = begun(folders[1], stage.stages[0])
    assert model.config.rotary().scaling.train_length == 16


def test_rows_longer_than_512_can_be_distilled(folders: tuple[Path, Path, str], tmp_path: Path) -> None:
    _, coca, source = folders
    rope = {"rope_type": "dynamic", "factor": 4.0}
    long = recipe(
        {
            "objective": {"logit-kl": 1.0, "attention-output": 0.5},
            "length": 600,
            "batch_size": 1,
            "rope_parameters": rope,
            "passkey_share": 0.05,
            "optimizer": {"steps": 3, "accumulation": 1},
        }
    )
    finetune(coca, {source: 1.0}, long, tmp_path / "out")
    assert len(losses(tmp_path / "out" / "stage-1-s0")) == 3


@pytest.mark.parametrize("law", ["linear", "yarn"])
@pytest.mark.parametrize("said", [True, False])
def test_stretching_twice_compounds(law: str, said: bool, folders: tuple[Path, Path, str], tmp_path: Path) -> None:
    """32 → 64 → 128 is factor 4, whether or not the stages say what the training length is."""
    stages = recipe(
        *({"length": n, "train_length": n if said else 0, "rope_parameters": {"rope_type": law}} for n in (64, 128))
    ).stages
    begun(folders[1], stages[0]).save_pretrained(tmp_path / "once")
    model = begun(tmp_path / "once", stages[1])
    assert model.config.rope_parameters["factor"] == 4.0
    plain = begun(folders[1], stages[1])
    assert model.config.rotary() == plain.config.rotary()


def test_a_law_does_not_silently_replace_another(folders: tuple[Path, Path, str], tmp_path: Path) -> None:
    stretched = begun(folders[1], recipe({"length": 64, "rope_parameters": {"rope_type": "linear"}}).stages[0])
    stretched.save_pretrained(tmp_path / "pi")
    for rope in ({"rope_type": "yarn"}, {"rope_type": "dynamic", "factor": 4.0}):
        with pytest.raises(ValueError, match=r"must keep to the model's own law, pi-2, got '(yarn|dynamic)'"):
            begun(tmp_path / "pi", recipe({"length": 128, "rope_parameters": rope}).stages[0])
    dropped = begun(tmp_path / "pi", recipe({"rope_parameters": {"rope_type": "default"}}).stages[0])
    assert dropped.config.rotary().scaling is None


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ({"train": ["*.k_proj.*"]}, r"train of stage s1 must name parameters, got '\*.k_proj.\*'"),
        ({"length": 10_000_000}, "length must be below the tokens available, got 10000000"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters of stage s1 need a factor > 1, got 0.5"),
        (
            {"passkey_share": 0.02},
            "length of stage s1 must be at least 246 tokens .* got 16; use longer rows",
        ),
        ({"lora": {"r": 2, "target_modules": ["k_proj"]}}, "lora.target_modules must be linear layers .*got 'k_proj'"),
        ({"lora": {"r": 2, "target_modules": ["lm_head"]}}, "lora.target_modules must be .*got 'lm_head'"),
    ],
)
def test_a_bad_later_stage_is_refused_before_the_first_is_trained(
    later: dict, message: str, folders: tuple[Path, Path, str], tmp_path: Path
) -> None:
    _, coca, source = folders
    with pytest.raises(ValueError, match=message):
        finetune(coca, {source: 1.0}, recipe({}, later), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_meant_is_refused(folders: tuple[Path, Path, str], tmp_path: Path) -> None:
    original, coca, source = folders
    out = tmp_path / "out"
    with pytest.raises(
        ValueError, match=r"train of stage s0 must name parameters, got '\*.k_proj.\*', which fits none"
    ):
        finetune(coca, {source: 1.0}, recipe({"train": ["*.k_proj.*"]}), out)
    with pytest.raises(ValueError, match=r"checkpoint must be a folder or a .gguf file, got '.*gone', which does not"):
        finetune(tmp_path / "gone", {source: 1.0}, recipe({}), out)
    with pytest.raises(ValueError, match=r"--teacher is needed by stage s0, got none, and .* does not say"):
        finetune(original, {source: 1.0}, recipe({"objective": {"logit-kl": 1.0}}), out)
    with pytest.raises(ValueError, match=r"--teacher must exist, got '.*gone'"):
        finetune(coca, {source: 1.0}, recipe({"objective": {"logit-kl": 1.0}}), out, teacher=tmp_path / "gone")
    with pytest.raises(ValueError, match=r"--teacher must be left out for a recipe .* text alone, got '.*model'"):
        finetune(coca, {source: 1.0}, recipe({}), out, teacher=original)
    with pytest.raises(ValueError, match=r"--teacher must be left out .* got '.*gone'"):
        finetune(coca, {source: 1.0}, recipe({}), out, teacher=tmp_path / "gone")
    with pytest.raises(ValueError, match=r"--teacher must exist, got '.*gone'"):
        open_origin(coca, {source: 1.0}, recipe({}), teacher=tmp_path / "gone")
    with pytest.raises(ValueError, match=r"factor > 1, got 0.5 for length 16 and a model trained at 32"):
        finetune(coca, {source: 1.0}, recipe({"rope_parameters": {"rope_type": "linear"}}), out)
    with pytest.raises(ValueError, match=r"lora.target_modules must be linear layers .*got 'k_proj'"):
        finetune(coca, {source: 1.0}, recipe({"lora": {"r": 2, "target_modules": ["k_proj"]}}), out)
    text = tmp_path / "text.txt"
    text.write_text("some words to make tokens of\n" * 500)
    prepare([str(text)], str(tmp_path / "other"), tokenizer=300, valid_share=0.0, workers=1)
    with pytest.raises(ValueError, match=r"--data must be made with the model's tokenizer, got another in"):
        finetune(coca, {str(tmp_path / "other"): 1.0}, recipe({}), out)


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["farspan", "finetune", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        farspan_cli.main()
    return int(stopped.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "distil"], "did you mean 'distill'"),
        (["--length", "128"], "length of stage attention must be at least 246 tokens for a passkey text"),
        (
            ["--recipe", "paper", "--teacher", "nowhere"],
            "--teacher must be left out for a recipe that",
        ),
        (["--teacher", "nowhere"], "--teacher must exist, got 'nowhere'"),
        (["--recipe", "TOML"], "configuration key stages[0].lenght"),
        (["--data", "DATA=none"], "--data must be DIR or DIR=WEIGHT"),
        (["--recipe", "paper", "--precision", "fp8"], "--precision must be one of"),
    ],
)
def test_the_command_line_refuses_in_one_line(
    arguments: list[str],
    message: str,
    folders: tuple[Path, Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, coca, source = folders
    (tmp_path / "mine.toml").write_text("[[stages]]\nname = 'a'\nlenght = 5")
    given = [a.replace("DATA", source).replace("TOML", str(tmp_path / "mine.toml")) for a in arguments]
    given += [] if "--data" in given else ["--data", source]
    assert command(monkeypatch, coca, *given, "--out", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_ctrl_c_says_where_it_stopped_and_the_same_command_goes_on(
    folders: tuple[Path, Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, coca, source = folders
    given = [coca, "--data", source, "--recipe", "paper", "--length", 16, "--tokens", 240, "--out", tmp_path / "out"]
    original = loop._Run.advance

    def press(self, step: int) -> None:
        original(self, step)
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop._Run, "advance", press)
    assert command(monkeypatch, *given) == 130
    assert capsys.readouterr().err.splitlines() == [
        "stopping after this training step; Ctrl-C again stops sooner, back at step 0",
        "interrupted; stopped at step 3; the same command continues",
    ]
    monkeypatch.setattr(loop._Run, "advance", original)
    assert command(monkeypatch, *given) == 0
    assert [
        row["optimizer"]["steps"] for row in json.loads((tmp_path / "out" / "recipe.json").read_text())["rows"]
    ] == [5] * 3


def test_the_command_line_applies_a_recipe(
    folders: tuple[Path, Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, coca, source = folders
    sizes = ["--length", 246, "--tokens", 6400]  # the shortest rows that a passkey text of bytes fits into
    assert command(monkeypatch, coca, "--data", f"{source}=2", *sizes, "--out", tmp_path / "out") == 0
    rows = json.loads((tmp_path / "out" / "recipe.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["attention", "logits", "text"]
    said = capsys.readouterr().out
    for row in rows:  # 32 rows a step at the recipe's own budget
        steps = row["optimizer"]["steps"]
        assert f"stage {row['name']}: {steps} steps of 1 row of 246 tokens\n" in said
        assert row["batch_size"] == 1
    assert all(row["name"] in said for row in rows)
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()
