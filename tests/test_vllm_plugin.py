"""Models are known to transformers' Auto classes in every process, vLLM's too; docs/ecosystem.md has a run with it."""

import pickle
import subprocess
import sys
import tomllib
from pathlib import Path

from farspan import FarspanConfig

ASK = """
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification
for auto in (AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification):
    assert type(auto.from_config(config)).__module__.startswith("farspan."), auto
"""


def in_new_process(code: str) -> None:
    subprocess.run([sys.executable, "-c", code + ASK], check=True, timeout=120)


def test_an_unpickled_config_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "config.pickle"
    path.write_bytes(pickle.dumps(FarspanConfig.preset("tiny", attention="coca-exact")))
    in_new_process(f"import copy, pickle\nconfig = copy.deepcopy(pickle.load(open({str(path)!r}, 'rb')))\n")


def test_the_plugin_alone_is_enough(tmp_path: Path) -> None:
    """vLLM loads the entry point in every process; a stand-in for its registry counts what is registered."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["vllm.general_plugins"].items()
    FarspanConfig.preset("tiny").save_pretrained(tmp_path)
    in_new_process(
        "import sys, types\n"
        "from importlib.metadata import EntryPoint\n"
        f"register = EntryPoint({name!r}, {value!r}, 'vllm.general_plugins').load()\n"
        "assert 'vllm' not in sys.modules\n"
        "archs = {}\n"
        "registry = types.SimpleNamespace(get_supported_archs=lambda: archs, register_model=archs.__setitem__)\n"
        "sys.modules['vllm'] = types.SimpleNamespace(ModelRegistry=registry)\n"
        "register(), register()\n"
        "from transformers import AutoConfig, AutoModelForCausalLM\n"
        "from transformers.models.auto.configuration_auto import CONFIG_MAPPING\n"
        "assert [AutoModelForCausalLM._model_mapping[CONFIG_MAPPING['farspan']].__name__] == list(archs)\n"
        f"config = AutoConfig.from_pretrained({str(tmp_path)!r})\n"
    )
