"""Calibration needs memory for the model, a layer and a batch, whatever the number of tokens."""

import pytest
import torch

from farspan import FarspanConfig, FarspanForCausalLM
from farspan.bench.timing import peak_bytes
from farspan.checkpoints import CalibrationConfig, calibrate, replace_attention
from farspan.checkpoints.calibrate import Inputs, Streams
from farspan.layers import AttentionSpec

WINDOW, HIDDEN, BATCH = 64, 128, 4


def test_tensors_in_memory_do_not_grow_with_the_tokens(one_thread: None) -> None:
    shape = {"hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4}
    teacher = FarspanForCausalLM(FarspanConfig.preset("tiny", attention="rope", **shape)).eval()
    ids, settings = torch.randint(0, 512, (512, WINDOW)), CalibrationConfig(steps=1, batch=BATCH)
    layer = sum(p.nbytes for p in teacher.model.layers[0].parameters())
    one_stream, batch = ids.numel() * HIDDEN * 4, BATCH * WINDOW * HIDDEN * 4
    allowed = 2 * layer + 32 * batch  # of a batch: queries, keys, scores, products, for teacher and student
    assert allowed < one_stream / 2  # else this would not see a stream, let alone the four it once held
    assert peak_bytes(lambda: calibrate(teacher, "coca-exact", ids, settings), "cpu") <= allowed


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_streams_are_the_models_hidden_states_on_both_sides(device: str) -> None:
    model = FarspanForCausalLM(FarspanConfig.preset("tiny", attention="rope")).eval().to(device)
    ids, layers = torch.randint(0, 512, (5, 12), device=device), model.model.layers
    with torch.no_grad():
        before = model(ids, output_hidden_states=True).hidden_states
        streams = Streams(model, ids, batch=2)
        streams.advance(layers[0], layers[0].self_attn, layers[0].self_attn)
        assert torch.allclose(streams.teacher, before[1], atol=1e-6)
        original = layers[1].self_attn
        streams.advance(layers[1], original, replace_attention(model, 1, AttentionSpec("coca", "exact")))
        after = model(ids, output_hidden_states=True).hidden_states
    inputs = Inputs(streams, layers[2], slice(1, 4))
    assert len(inputs) == 2
    norm = layers[2].input_layernorm
    for i, stream in enumerate((before[2], after[2])):
        assert torch.allclose(torch.cat([pair[i] for pair in inputs]), norm(stream[1:4]), atol=1e-5)
    assert not torch.allclose(before[2], after[2], atol=1e-3)
