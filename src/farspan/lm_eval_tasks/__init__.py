"""Tasks for EleutherAI's lm-eval: what `farspan eval` measures, on any model that lm-eval can run, offline.

::

    lm_eval --model hf --model_args pretrained=DIR,trust_remote_code=True,max_length=4096 \\
        --include_path "$(farspan tasks-path)" --tasks farspan_passkey --metadata '{"length": 2048, "cases": 100}'

Give `max_length`, or lm-eval cuts texts to the model's `max_position_embeddings`. It does not import farspan before it
loads the model: a farspan model comes from `farspan export`, with ``trust_remote_code=True``.
"""

from pathlib import Path

PATH = Path(__file__).parent
"""What lm-eval's ``--include_path`` takes."""
