"""vLLM's plugin, as far as it can be seen without vLLM; docs/ecosystem.md has a run with it."""

import subprocess
import sys
import tomllib
from pathlib import Path


def test_the_entry_point_names_a_function_that_loads_without_vllm() -> None:
    """vLLM loads it in every process; loading must register the model, and pip must not need vLLM."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    (name, value), *others = project["entry-points"]["vllm.general_plugins"].items()
    assert not others
    code = (
        "import sys\nfrom importlib.metadata import EntryPoint\n"
        f"register = EntryPoint({name!r}, {value!r}, 'vllm.general_plugins').load()\n"
        "from transformers import AutoConfig\n"
        "assert callable(register) and AutoConfig.for_model('farspan').model_type == 'farspan'\n"
        "assert 'vllm' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_architecture_is_the_one_that_checkpoints_name() -> None:
    from farspan import FarspanForCausalLM
    from farspan.vllm_plugin import ARCHITECTURE

    assert FarspanForCausalLM.__name__ == ARCHITECTURE
