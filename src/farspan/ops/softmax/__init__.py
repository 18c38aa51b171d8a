"""Softmax attention: the shared core, and the RoPE and ALiBi baselines on it."""
