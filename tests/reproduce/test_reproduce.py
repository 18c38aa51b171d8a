"""A reproduction runs end to end, goes on after any interruption, and survives a step that fails."""

import json
import signal
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from farspan.reproduce import Preset, main_table, reproduce
from farspan.reproduce.preset import NAMES
from farspan.reproduce.steps import Work, plan
from farspan.utils import lock
from tests.command_line import called, refusal, started
from tests.reproduce.checkpoints import write_texts

TOML = """
[corpus]
train = { "%s" = 1.0 }
[training]
model = { preset = "tiny", options = { num_hidden_layers = 2, hidden_size = 32, intermediate_size = 48 } }
data = { length = 16, batch_size = 4 }
optimizer = { steps = 6, accumulation = 1 }
[evaluation]
scalings = ["none", "dynamic_ntk-4"]
perplexity_lengths = [16, 64]
long = [32]
long_stride = 16
texts = 2
text_tokens = 128
position_tokens = 64
passkey_lengths = [240]
cases = 2
new_tokens = 3
[models]
rope = { seeds = 2 }
coca-exact = {}
[models.small]
attention = "hybrid-pope"
length = 32
options = { window = 8, global_every = 2 }
scalings = ["none+log"]
measures = "small"
[models.longer]
start = "rope"
recipe = "pi-4k"
length = 32
tokens = 128
measures = "longer"
[measures.longer]
scalings = ["own"]
passkey_lengths = []
position_tokens = 0
[measures.small]
retrieval_tasks = ["abcdigits"]
retrieval_lengths = [240]
"""
ROPE = "[models.rope]\n"
CONVERSION = "[models.a]\nstart = 'checkpoint'\nattention = 'coca-exact'\n"
OFTEN = "import farspan.reproduce.run as run; run.POLL_SECONDS = 0.05"
TELL = (
    OFTEN
    + """
attempt = run._attempt
run._attempt = lambda step, *more: (print("doing", step.name, flush=True), attempt(step, *more))[1]
"""
)


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_texts(folder / "text.jsonl", "Document", 120)
    (folder / "preset.toml").write_text(TOML % (folder / "text.jsonl"))
    return folder / "preset.toml"


@pytest.fixture(scope="module")
def whole(toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reproduction by one process, from the command line, without interruption."""
    out = tmp_path_factory.mktemp("whole")
    status, said, err = called("reproduce", "--preset", toml, "--out", out)
    assert status == 0, err + said
    shown = said.splitlines()
    assert shown[1].split() == ["┃", "perplexity", "at", "┃", "16", "┃", "64", "┃"]
    assert max(map(len, shown[:-1])) <= 80
    assert shown[-1] == f"page: {out / 'report' / 'index.html'}"
    return out


def same_rows(one: Path, other: Path) -> None:
    names = {path.name for path in (one / "results").iterdir()}
    assert names == {path.name for path in (other / "results").iterdir()}
    for name in names:
        pair = (json.loads((folder / "results" / name).read_text())["rows"] for folder in (one, other))
        for row, expected in zip(*pair, strict=True):
            for key in {"final_loss", "nll", "correct", "control_nll"} & expected.keys():
                assert row[key] == expected[key], name


def stamps(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (folder / "results").iterdir()}


def test_everything_is_measured_once_and_ends_in_a_page(toml: Path, whole: Path) -> None:
    names = {path.stem for path in (whole / "results").iterdir()}
    assert names == {
        *("train-rope-s0", "train-rope-s1", "train-coca-exact-s0", "train-small-s0"),
        *(
            f"{kind}-{model}-{scaling}{far}"
            for model in ("rope-s0", "rope-s1", "coca-exact-s0")
            for scaling in ("none", "dynamic_ntk-4")
            for kind, far in (("ppl", ""), ("ppl", "-from-64"), ("passkey", "-from-240"), ("positions", ""))
        ),
        *("ppl-small-s0-none+log", "ppl-small-s0-none+log-from-64", "passkey-small-s0-none+log-from-240"),
        *("positions-small-s0-none+log", "retrieval-small-s0-none+log-from-240"),
        *("train-longer-s0", "train-longer-s1"),
        *(f"ppl-longer-{seed}-own{far}" for seed in ("s0", "s1") for far in ("", "-from-64")),
    }
    result = json.loads((whole / "results" / "ppl-rope-s0-none.json").read_text())
    assert (result["kind"], result["schema"]) == ("perplexity", 2)
    assert [(row["length"], row["mode"]) for row in result["rows"]] == [(16, "sliding"), (16, "truncated")]
    assert {(row["variant"], row["seed"], row["scaling"]) for row in result["rows"]} == {("rope", 0, "none")}
    small = json.loads((whole / "results" / "train-small-s0.json").read_text())["rows"][0]
    assert (small["train_length"], small["tokens"]) == (32, 6 * 4 * 16)  # as many tokens as the others
    longer = json.loads((whole / "results" / "train-longer-s0.json").read_text())["rows"][0]
    assert (longer["train_length"], longer["tokens"], longer["steps"]) == (32, 6 * 4 * 16 + 4 * 32, 6 + 4)
    scaled = json.loads((whole / "results" / "ppl-longer-s1-own.json").read_text())["rows"]
    assert {row["scaling"] for row in scaled} == {"linear-2"}
    before = stamps(whole)
    page, failed = reproduce(Preset.load(toml), whole)
    assert "RoPE" in page.read_text()
    assert not failed
    assert stamps(whole) == before
    table = main_table(whole)
    assert [row[0] for row in table[1:]] == [
        *("coca-exact", "coca-exact + dynamic_ntk-4", "longer + linear-2"),
        *("rope", "rope + dynamic_ntk-4", "small + none+log"),
    ]


def test_two_processes_share_the_steps_and_one_may_be_killed(toml: Path, whole: Path, tmp_path: Path) -> None:
    command = partial(started, "reproduce", "--preset", toml, "--out", tmp_path, before=TELL)
    with ExitStack() as running:
        both = [running.enter_context(command()) for _ in "ab"]
        deadline = time.monotonic() + 240
        while len(list(tmp_path.glob("results/*.json"))) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        both[0].process.kill()
        done = [one.wait() for one in both]
    assert [one.returncode for one in done] == [-signal.SIGKILL, 0], done
    steps = [line for one in done for line in one.stdout.splitlines() if line.startswith("doing")]
    assert len(steps) - len(set(steps)) <= 1  # what was killed is done again
    same_rows(tmp_path, whole)


@pytest.mark.usefixtures("no_page")
def test_a_step_in_other_hands_is_waited_for(toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farspan.reproduce.run.POLL_SECONDS", 0.05)
    seen: list[str] = []
    original = Work.train

    def train(self: Work, name: str, *more: Any, **how: Any) -> None:
        seen.append(name)
        original(self, name, *more, **how)

    monkeypatch.setattr(Work, "train", train)
    done = tmp_path / "out" / "results" / "ppl-coca-exact-s0-none.json"
    reproduce(Preset.load(toml), tmp_path / "out", only=["tokens"])
    with lock(tmp_path / "out" / "locks", name="train rope seed 0.lock"):
        chosen = partial(reproduce, Preset.load(toml), tmp_path / "out", only=["train", "ppl", "rope", "coca-exact"])
        runner = threading.Thread(target=chosen)
        runner.start()
        deadline = time.monotonic() + 240
        while not done.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert seen[0] == "coca-exact"
        assert not (tmp_path / "out" / "results" / "train-rope-s0.json").exists()
    runner.join()
    assert (tmp_path / "out" / "results" / "ppl-rope-s0-none.json").exists()
    assert len(seen) == 3


@pytest.mark.usefixtures("no_page")
def test_a_failed_step_is_named_and_the_rest_go_on(
    toml: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Work.train

    def fails(self: Work, name: str, *more: Any, **how: Any) -> None:
        if name == "rope":
            raise RuntimeError("out of\nmemory")
        original(self, name, *more, **how)

    monkeypatch.setattr(Work, "train", fails)
    given = ["reproduce", "--preset", toml, "--out", tmp_path, "--only", "rope,coca-exact,ppl"]
    status, out, _ = called(*given)
    assert status == 1
    assert "failed: train rope seed 0: RuntimeError: out of memory" in out
    assert "failed: train rope seed 1: RuntimeError: out of memory" in out
    assert not list((tmp_path / "results").glob("*rope*"))
    assert (tmp_path / "results" / "ppl-coca-exact-s0-dynamic_ntk-4.json").exists()
    states = {row["step"]: row["state"] for row in json.loads((tmp_path / "status.json").read_text())}
    assert states["train rope seed 0"] == "failed"
    assert states["ppl rope seed 0 none"] == "pending"
    monkeypatch.undo()
    monkeypatch.setattr("farspan.report.write_report", lambda folder: Path(folder) / "report" / "index.html")
    assert called(*given)[0] == 0
    name = "ppl-rope-s1-none.json"
    rows = [json.loads((folder / "results" / name).read_text())["rows"] for folder in (tmp_path, whole)]
    assert rows[0] == rows[1]


def test_a_folder_keeps_to_its_preset_and_is_no_other_commands(toml: Path, whole: Path, tmp_path: Path) -> None:
    preset = Preset.load(toml)
    other = replace(preset, training={**preset.training, "optimizer": {"steps": 7, "accumulation": 1}})
    with pytest.raises(ValueError, match=r"this reproduction began with training.optimizer.steps = 6, got 7; keep it"):
        reproduce(other, whole)
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError, match=r"begun by farspan reproduce, got .* with 'config.json'; choose another name"):
        reproduce(preset, tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_shipped_presets_plan_what_is_needed_first(name: str, tmp_path: Path) -> None:
    steps = plan(Preset.load(name), tmp_path)
    assert steps[0].name == "tokens source-0"
    assert len({step.result for step in steps}) == len({step.name for step in steps}) == len(steps)
    for number, step in enumerate(steps):
        assert set(step.needs) <= {before.name for before in steps[:number]}
    fixed = ("alibi", "cosformer", "linear-coca", "elu")
    assert not any("ntk" in step.name and step.name.split()[1].startswith(fixed) for step in steps)


@pytest.mark.usefixtures("no_page")
def test_a_fine_tuned_model_says_what_its_base_was_shown(toml: Path, tmp_path: Path) -> None:
    preset = Preset.load(toml)
    training = {**preset.training, "data": {"length": 256, "batch_size": 1, "passkey_share": 0.04}}
    models = {"rope": preset.models["rope"], "longer": replace(preset.models["longer"], length=512, tokens=1024)}
    assert not reproduce(replace(preset, training=training, models=models), tmp_path, only=["finetune"]).failed
    row = json.loads((tmp_path / "results" / "train-longer-s0.json").read_text())["rows"][0]
    assert (row["passkey_share"], row["retrieval_share"]) == (0.04, 0.0)


@pytest.mark.usefixtures("no_page")
def test_the_published_cosformer_is_measured_inside_its_training_length(toml: Path, tmp_path: Path) -> None:
    """Past it "raise" raises: window and truncation control stay inside."""
    small = Preset.load(toml)
    preset = replace(Preset.load("cosformer-lm"), corpus=small.corpus, training=small.training)
    lengths = {name: preset.measured(name).perplexity_lengths for name in preset.models}
    assert lengths["cosformer"] == [Preset.load("gpu").base_config.data.length]
    assert lengths["cosformer-decay"][-1] == 32_768
    evaluation = replace(small.evaluation, scalings=["none"], long=[], passkey_lengths=[], position_tokens=0)
    measures = {"inside": {"perplexity_lengths": [16]}}
    preset = replace(preset, evaluation=evaluation, measures=measures)
    assert not reproduce(preset, tmp_path, only=["cosformer", "ppl"]).failed
    for seed in (0, 1):
        rows = json.loads((tmp_path / "results" / f"ppl-cosformer-s{seed}-none.json").read_text())["rows"]
        assert [(row["length"], row["mode"]) for row in rows] == [(16, "sliding"), (16, "truncated")]


def test_the_short_demo_of_layouts_has_checkpoints_on_the_way() -> None:
    config = Preset.load("hybrid-cpu").base_config
    assert config.run.checkpoint_every < config.optimizer.steps


def test_shares_of_interpolation_differ_in_steps_and_not_in_batches() -> None:
    preset = Preset.load("pi")
    for name in (name for name, model in preset.models.items() if model.start):
        (stage,) = preset.recipe(name).stages
        rows, steps = {"4k": (4, 4096), "8k": (2, 8192)}, {"5": 305, "10": 610}
        _, kind, length, share = name.rsplit("-", 3)
        assert (stage.batch_size, stage.length) == rows[length]
        assert stage.train_length == stage.length
        assert stage.optimizer.steps == steps[share]
        assert bool(stage.rope_parameters) == (kind == "pi")


def test_a_seed_is_complete_before_the_next_with_quick_measures_first_and_the_longest_last(tmp_path: Path) -> None:
    steps = [step.name for step in plan(Preset.load("hybrid"), tmp_path)]
    first = steps[: steps.index("train rope seed 1")]
    done = {"train hybrid-8k seed 0", "ppl pope seed 0 none", "retrieval hybrid-pope seed 0 none+log"}
    assert done | {"passkey hybrid-rope seed 0 none+log from 131072"} <= {*first}
    assert first.index("positions hybrid-pope seed 0 none+log") < first.index("retrieval rope seed 0 none")
    assert not any("seed 1" in step or "seed 2" in step for step in first)
    assert all("1048576" in step and "hybrid" in step for step in steps[-15:])
    assert not any("1048576" in step for step in steps[:-15])


def test_only_chooses_models_and_kinds_with_what_they_need(tmp_path: Path) -> None:
    def names(preset: str, *only: str) -> list[str]:
        return [step.name for step in plan(Preset.load(preset), tmp_path, list(only))]

    some = names("hybrid", "rope", "positions")
    assert some == [
        "tokens source-0",
        *(
            f"{step} rope seed {seed}{scaling}"
            for seed in range(3)
            for step, scaling in (("train", ""), ("positions", " none"), ("positions", " dynamic_ntk-4"))
        ),
    ]
    assert names("cpu", "table1") == names("cpu")
    assert names("gpu", "train")[-1] == "train coca-exact seed 1"
    with pytest.raises(ValueError, match=r"--only must name some of table1, .*, got 'table9'; separate"):
        names("cpu", "table9")
    with pytest.raises(ValueError, match=r"--only must name some of tokens, train, alibi, got 'ppl'"):
        plan(Preset.parse({"models": {"alibi": {}}}), tmp_path, ["alibi", "ppl"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "gppu"], "preset must be one of 'cosformer-cpu', 'cosformer-gpu', "),
        (["--only", "table9"], "--only must name some of table1, table3, figure1"),
        (["--text", "books=many"], "--text must be SOURCE or SOURCE=WEIGHT with a weight above 0, got 'books=many'"),
        (["--text", "nowhere.txt=1"], "source must exist, got 'nowhere.txt'"),
        (["--held-out", "nowhere.txt"], "source must exist, got 'nowhere.txt'"),
        (["--tokenizer", "nowhere.json"], "tokenizer must be 'bytes', a tokenizer.json"),
        (["--preset", "cosformer-cpu", "--only", "listop"], "--only must name some of cosformer-"),
        (
            ["--preset", "cosformer-cpu", "--labelled", "a"],
            "labelled must name three files, for training, for choices and",
        ),
        (["--preset", "cosformer-cpu", *["--labelled", "a"] * 3], "--labelled must be a JSONL file, got 'a'"),
        (["--tokenizer", "5"], "tokenizer must be a name, a folder or a size of 257 … 1048576, got 5"),
    ],
)
def test_bad_input_exits_2_with_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    assert message in refusal("reproduce", *arguments, "--out", "x", cwd=tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 10}, "vocab_size must be at least the 257 tokens of the data, got 10"),
        ({"pad_token_id": 400}, "pad_token_id must be 0 … 256, got 400"),
        ({"attn_implementation": "flash_attention_2"}, "must be one that is installed, got 'flash_attention_2'"),
        ({"learned_positions": 5}, "learned_positions must be 0 in a causal model, got 5"),
    ],
)
def test_models_that_cannot_be_are_noticed_before_texts_are_tokenized(
    options: dict[str, Any], message: str, toml: Path, tmp_path: Path
) -> None:
    preset = Preset.load(toml)
    bad = replace(preset, models={"rope": replace(preset.models["rope"], options=options)})
    with pytest.raises(ValueError, match=message):
        reproduce(bad, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_texts_that_are_too_short_are_noticed_before_they_are_tokenized(toml: Path, tmp_path: Path) -> None:
    preset = Preset.load(toml)
    long = replace(preset, evaluation=replace(preset.evaluation, text_tokens=2000))
    with pytest.raises(ValueError, match="--held-out must have a document of at least 2000 tokens, got none in"):
        reproduce(long, tmp_path / "out")
    data = {**preset.training["data"], "passkey_share": 0.04}
    with pytest.raises(
        ValueError, match=r"training length of rope must be at least \d+ tokens for a passkey .*, got 16"
    ):
        reproduce(replace(preset, training={**preset.training, "data": data}), tmp_path / "out")
    small = {**preset.measures["small"], "retrieval_tasks": ["abcdigits", "cwe"]}
    with pytest.raises(ValueError, match="length must leave space for task 'cwe', got 240; use a longer one"):
        reproduce(replace(preset, measures={**preset.measures, "small": small}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[models.ropee]", "must be one of .* got 'ropee'; did you mean 'rope'?"),
        ("models = [", "is not valid TOML"),
        ("[evaluation]", "models must name at least one model, got none"),
        ("[models]\na = 3", "models.a must be .*, got 3"),
        ("base = 'hybrid'\nmodels = 3", r"models must be tables \[models.NAME\], got 3"),
        ("base = 'hybird'", "preset must be one of .* got 'hybird'; did you mean 'hybrid'?"),
        ("[models.rope]\nlenth = 3", "configuration key models.rope.lenth must be one of .* did you mean 'length'?"),
        ("[models.rope]\nlength = 3", r"models.rope.length must divide the 256 × 512 tokens of a step"),
        ("[models.rope]\noptions = { windo = 3 }", "options of preset '350m' must be a model's fields, got 'windo'"),
        ("[models.'a/b']", "names of models must be letters, digits, - and _, got 'a/b'"),
        (
            "[models.rope]\nmeasures = 'ful'\n[measures.full]",
            "models.rope.measures must be one of 'full', got 'ful'; did",
        ),
        ("[models.rope]\nmeasures = 'full'", r"models.rope.measures must be left out without .*, got 'full'; add that"),
        ("[models.rope]\nscalings = ['ntk4']", r"models.rope.scalings must be own, none, ntk-F.* got 'ntk4'"),
        ("[measures.full]\ncase = 3\n[models.rope]\nmeasures = 'full'", "key measures.full.case must be one of"),
        (ROPE + "[evaluation]\nretrieval_tasks = ['cew']", "retrieval_tasks must be one of .* did you mean 'cwe'"),
        (ROPE + "[evaluation]\nperplexity_lengths = [-64]", "perplexity_lengths.0. must be greater than or .* got -64"),
        (ROPE + "[evaluation]\nperplexity_lengths = [99999]", "text_tokens must be at least the longest window 99999"),
        (ROPE + "[evaluation]\nlong = [4]\nlong_cases = [1, 2]", "long_cases must have a number for each limit"),
        (ROPE + "[corpus]\ntrain = { a = -1 }", "corpus.train.a must be greater than 0, got -1"),
        (ROPE + "[corpus]\nlabelled = ['a', 'b', 'c']", "--labelled is for a preset that has tasks, such as cosformer"),
        ("[models.x]\nstart = 'a'", "models.x.start must be one of '', 'checkpoint', got 'a'; it must come before"),
        (
            "[models.rope]\n[tasks.mqar]\nlength = 64\n[models.x]\nstart = 'rope'",
            "models.x.start .* got 'rope'; .* not be for tasks",
        ),
        (ROPE + "[models.x]\nstart = 'rope'\nseeds = 2", "models.x.seeds must be at most 1, as 'rope' has them, got 2"),
        (CONVERSION + "seeds = 2", "models.a.seeds must be at most 1, as 'checkpoint' has them, got 2"),
        ("[models.rope]\n[models.x]\nstart = 'rope'\nrecipe = 'distill'", "recipe of x must not distil where"),
        (CONVERSION + "[models.x]\nstart = 'a'\nrecipe = 'papr'", "--recipe must be one of .* mean 'paper'"),
        (CONVERSION.replace("exact", "exat"), "must be one of .* got 'coca-exat'; did you mean 'coca-exact'"),
        (CONVERSION + "global_every = 3", "global_every and global_layers need attention, the name of a hybrid, got"),
        (
            CONVERSION.replace("coca-exact", "hybrid-rope") + "global_every = 3\nglobal_layers = [1]",
            r"give global_every or global_layers, got 3 and \[1\]",
        ),
        (ROPE + "[tasks.lm]\nlength = 1", "tasks.lm.length must be greater than or equal to 2, got 1"),
        (ROPE + "[tasks.listops]\nlength = 7", "tasks.listops.length must be 2000 with this generator, got 7"),
        (ROPE + "[tasks.finetuning]\nsteps = 3", "tasks.finetuning.pretraining_steps must be at least 1, got 0"),
        (ROPE + "[tasks.listop]", "tasks must be one of .* got 'listop'; did you mean 'listops'?"),
        (
            ROPE + "[tasks.listops]\nstep = 3",
            "configuration key tasks.listops.step must be one of .* did you mean 'steps'?",
        ),
    ],
)
def test_a_preset_that_cannot_be_meant_raises(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Preset.load(path)


def test_a_preset_with_a_base_has_its_values_and_names_its_models(tmp_path: Path) -> None:
    preset = Preset.parse(
        {
            "base": "hybrid",
            "training": {"optimizer": {"steps": 7}},
            "evaluation": {"long": [], "long_cases": []},
            "models": {"x": {"attention": "pope"}, "rope": {"seeds": 1}},
        }
    )
    hybrid, optimizer = Preset.load("hybrid"), preset.base_config.optimizer
    assert (optimizer.steps, optimizer.peak_lr) == (7, hybrid.base_config.optimizer.peak_lr)
    assert (preset.evaluation.long, preset.evaluation.cases) == ([], 100)
    assert list(preset.models) == ["x", "rope"]
    assert preset.models["rope"] == replace(hybrid.models["rope"], seeds=1)
