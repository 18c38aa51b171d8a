"""transformers' own `CausalLMModelTest` on our models, from the checkout that FARSPAN_TRANSFORMERS names.

PyPI does not have its tests. Take the tag of the installed version. ``-o addopts=`` admits its markers; httpx and
parameterized must be installed::

    git clone --depth 1 --branch v5.22.2 https://github.com/huggingface/transformers
    FARSPAN_TRANSFORMERS=transformers python -m pytest -o addopts= tests/transformers_suite
"""

import importlib
import os
import sys
import types
import unittest
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(os.environ.get("FARSPAN_TRANSFORMERS") or "none")
if not (SOURCE / "tests" / "causal_lm_tester.py").exists():
    pytest.skip("FARSPAN_TRANSFORMERS names no checkout of transformers", allow_module_level=True)

from transformers.models.auto import modeling_auto  # noqa: E402

from farspan import FarspanConfig, FarspanForCausalLM, FarspanModel  # noqa: E402

NOT_RUN = {"fsdp": "FSDPTesterMixin", "tensor_parallel": "TensorParallelTesterMixin", "pipeline": "PipelineTesterMixin"}
"""Parts that need several GPUs or datasets."""
GLOBAL = {"kind": "rope", "rotary": False}
ATTENTIONS: dict[str, Any] = {"rope": "rope", "exact": "coca-exact", "hybrid": [{"kind": "pope", "window": 16}, GLOBAL]}


def borrow() -> Any:
    """Import its test modules, whose package is called `tests` like ours, and give the name back."""
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "tests"}
    sys.path.insert(0, str(SOURCE.resolve()))
    try:
        for name, mixin in NOT_RUN.items():
            stub = sys.modules[f"tests.test_{name}_mixin"] = types.ModuleType(f"tests.test_{name}_mixin")
            setattr(stub, mixin, type(mixin, (), {}))
        return importlib.import_module("tests.causal_lm_tester")
    finally:
        sys.path.pop(0)
        for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
            sys.modules[f"transformers_{name}"] = sys.modules.pop(name)
        sys.modules.update(ours)


theirs = borrow()
# Their tests look up here which class takes labels.
modeling_auto.MODEL_MAPPING_NAMES["farspan"] = "FarspanModel"
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["farspan"] = "FarspanForCausalLM"


def suite(name: str) -> type:
    """Make the test class of one attention."""

    class Tester(theirs.CausalLMModelTester):  # type: ignore[name-defined,misc]
        base_model_class, config_class, causal_lm_class = FarspanModel, FarspanConfig, FarspanForCausalLM
        attention = ATTENTIONS[name]

    return type(f"Test{name.title()}", (theirs.CausalLMModelTest, unittest.TestCase), {"model_tester_class": Tester})


TestRope, TestExact, TestHybrid = (suite(name) for name in ATTENTIONS)
