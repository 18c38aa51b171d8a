"""Names of tensors and the templates of a weight map."""

import re

LAYER = re.compile(r"\.(\d+)\.")


def template(name: str) -> tuple[str, int | None]:
    """A tensor's name with its layer number taken out, and that number.

    >>> template("model.layers.12.mlp.up_proj.weight"), template("lm_head.weight")
    (('model.layers.{i}.mlp.up_proj.weight', 12), ('lm_head.weight', None))
    """
    found = LAYER.search(name)
    if found is None:
        return name, None
    return f"{name[: found.start()]}.{{i}}.{name[found.end() :]}", int(found.group(1))


def filled(pattern: str, layer: int | None) -> str:
    """A template with its layer number put back.

    >>> filled("blk.{i}.attn_q.weight", 3)
    'blk.3.attn_q.weight'
    """
    return pattern.replace("{i}", str(layer))
