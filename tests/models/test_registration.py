"""Models are known to transformers' Auto classes in every process that holds a configuration."""

import pickle
import subprocess
import sys
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
    """A stand-in for vLLM's registry: what is tested is that the plugin registers with transformers itself."""
    FarspanConfig.preset("tiny").save_pretrained(tmp_path)
    in_new_process(
        "import sys, types\n"
        "archs = {}\n"
        "registry = types.SimpleNamespace(get_supported_archs=lambda: archs, register_model=archs.__setitem__)\n"
        "sys.modules['vllm'] = types.SimpleNamespace(ModelRegistry=registry)\n"
        "from farspan.vllm_plugin import register\n"
        "register(), register()\n"
        "assert list(archs) == ['FarspanForCausalLM']\n"
        "from transformers import AutoConfig, AutoModelForCausalLM\n"
        "from transformers.models.auto.configuration_auto import CONFIG_MAPPING\n"
        "assert CONFIG_MAPPING['farspan'] in AutoModelForCausalLM._model_mapping\n"
        f"config = AutoConfig.from_pretrained({str(tmp_path)!r})\n"
    )
