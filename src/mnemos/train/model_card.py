"""The model card of an exported model: README.md with YAML front matter, from the records of its run.

The records may come from a stranger: numbers are checked to be numbers, and text is cut and freed of markup.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from ..version import __version__
from .telemetry import read_metrics

MAX_TEXT = 80  # characters of one value
MAX_ROWS = 24  # rows of a suite's table
MAX_RESULTS_BYTES = 16 * 2**20
COMPUTE_OPTIMAL_TOKENS = 20  # per parameter, Hoffmann et al. 2022
# Columns that describe how a suite measures, not what it found.
HIDDEN_COLUMNS = ("settings", "seed", "generated", "prompt", "answer", "seconds")

CARD = """---
{front_matter}---

# {name}

A sequence model {kind} (`{preset}`, {parameters} parameters), trained with Mnemos {version}.

| | |
|---|---|
{model}

## Training

| | |
|---|---|
{training}

## Evaluation

{evaluation}

## Limits

{limits}

## Use

```python
{imports}

import mnemos.models  # makes the model known to transformers

folder = "."  # the folder of this file
model = AutoModelForCausalLM.from_pretrained(folder)
{use}
```

{after_use}"""

TEXT_USE = """tokenizer = AutoTokenizer.from_pretrained(folder)

ids = tokenizer("The ", return_tensors="pt").input_ids
state = model.state(ids)  # the state after reading: `state.save(path)` keeps it
print(tokenizer.decode(model.generate(ids, max_new_tokens=20)[0]))"""
IDS_IMPORTS = "import torch\nfrom transformers import AutoModelForCausalLM"
IDS_USE = """
ids = torch.tensor([[1, 2, 3]])
state = model.state(ids)  # the state after reading: `state.save(path)` keeps it
print(model.generate(ids, max_new_tokens=20))"""


def model_card(run: str | os.PathLike, checkpoint: str | os.PathLike, model: Any, average: bool = False) -> str:
    """The text of a model card, for the model of a run's checkpoint.

    run: folder of the run. checkpoint: folder of the checkpoint that the model comes from. average: the weights are the average.
    """
    from ..models.fingerprint import fingerprint
    from ..models.folder import read_object

    run, checkpoint = Path(run), Path(checkpoint)
    state = read_object(checkpoint / "state.json")
    config = _mapping(state.get("config"))
    settings = {part: _mapping(config.get(part)) for part in ("model", "data", "optim", "schedule")}
    step, tokens = _step(checkpoint), _number(state.get("tokens"))
    parameters = sum(p.numel() for p in model.parameters())
    has_tokenizer = (run / "tokenizer").is_dir()
    validated = _validated(run, step, average)
    preset = _word(settings["model"].get("preset")) or "custom"
    sources = [_source(s) for s in settings["data"].get("sources") or () if isinstance(s, str)]
    front = {
        "library_name": "mnemos",
        "pipeline_tag": "text-generation",
        "tags": ["mnemos", preset, "test-time-training", "neural-memory"],
        "datasets": [s for s in sources if re.fullmatch(r"[\w.-]+/[\w.-]+", s)],
    }
    return CARD.format(
        front_matter=yaml.safe_dump({k: v for k, v in front.items() if v}, sort_keys=False, allow_unicode=True),
        name=_text(run.resolve().name),
        kind="whose memory learns at test time" if model.config.has_memory else "without a memory",
        preset=preset,
        parameters=f"{parameters:,}",
        version=__version__,
        model=_pairs(_model_rows(model, settings["model"], parameters)),
        training=_pairs(_training_rows(config, settings, sources, step, tokens, average, validated)),
        evaluation=_evaluation(run, fingerprint(model)),
        limits="\n".join(f"* {line}" for line in _limits(model, parameters, tokens)),
        imports="from transformers import AutoModelForCausalLM, AutoTokenizer" if has_tokenizer else IDS_IMPORTS,
        use=TEXT_USE if has_tokenizer else IDS_USE,
        after_use="The state holds all that the model keeps of the tokens it has read: pass it as `past_key_values` to continue from it.\n"
        "The papers behind the preset are listed in Mnemos' page `docs/papers.md`; cite them, and Mnemos by its `CITATION.cff`.\n",
    )


def _model_rows(model: Any, chosen: dict[str, Any], parameters: int) -> list[tuple[str, str]]:
    config = model.config
    changed = [_text(item) for item in chosen.get("set") or () if isinstance(item, str)]
    rows = [
        ("preset and size", f"`{_word(chosen.get('preset')) or 'custom'}`, `{_word(chosen.get('size')) or 'custom'}`"),
        ("changed fields", ", ".join(f"`{item}`" for item in changed) or "none"),
        ("parameters", f"{parameters:,}"),
        ("layers, width", f"{config.num_hidden_layers}, {config.hidden_size}"),
        ("vocabulary", f"{config.vocab_size:,} tokens"),
    ]
    if config.has_memory:
        memory = config.memory_config
        rows.append(("memory", f"`{memory.structure}`, rule `{memory.rule}`, chunks of {memory.chunk_size} tokens"))
    else:
        rows.append(("memory", "none"))
    return rows


def _training_rows(config, settings, sources, step, tokens, average, validated) -> list[tuple[str, str]]:
    data, optim, schedule = settings["data"], settings["optim"], settings["schedule"]
    shape = [_number(v) for v in (data.get("batch_size"), data.get("seq_len"), config.get("accumulate"))]
    rows = [
        ("data", ", ".join(f"`{source}`" for source in sources) or "not recorded"),
        ("tokens", f"{tokens:,.0f}" if tokens is not None else "not recorded"),
        ("steps", f"{step:,}" + (", average of the weights" if average else "")),
        ("sequences", "{} × {} sequences of {} tokens per step".format(*_whole(shape[2], shape[0], shape[1]))),
        (
            "optimiser",
            f"`{_word(optim.get('name'))}`, learning rate {_short(optim.get('lr'))}, `{_word(schedule.get('name'))}`",
        ),
        ("seed", _short(config.get("seed"))),
    ]
    for key, about in (("val_loss", "validation loss, nats per token"), ("bits_per_byte", "validation, bits per byte")):
        value = _number(validated.get(key))
        if value is not None:
            rows.append((about, f"{value:.4f}"))
    return rows


def _limits(model: Any, parameters: int, tokens: float | None) -> Iterable[str]:
    if tokens is not None:
        few = tokens < COMPUTE_OPTIMAL_TOKENS * parameters
        yield f"It was trained on {tokens / parameters:.3g} tokens per parameter" + (
            f"; compute-optimal training takes about {COMPUTE_OPTIMAL_TOKENS}." if few else "."
        )
    yield "Validation uses held-out text of the same sources; the loss on other text can be much higher."
    if model.config.has_memory:
        yield "The memory has a fixed size: beyond its capacity, new facts overwrite old ones."
        yield "Recall of long texts depends on the training: `mnemos eval --suite needle vitality` measures it."
        if model.config.memory_config.anchor == "chunk":
            yield "`chunk_size` is part of the model: another value computes another function."
    yield "It has not been tuned to follow instructions or to be safe. Treat its text as untrusted."


def _evaluation(run: Path, weights: str) -> str:
    """Tables of the run's eval.json, if it was measured with these weights."""
    missing = "Not evaluated. `mnemos eval` with this folder measures perplexity, recall and the benefit of test-time learning."
    path = run / "eval.json"
    try:
        if path.stat().st_size > MAX_RESULTS_BYTES:
            return missing
        found = json.loads(path.read_text(encoding="utf-8"))
        suites = found["suites"] if found["model"]["weights"] == weights else {}
        tables = [
            f"### {_text(name)}\n\n{table}" for name, suite in suites.items() if (table := _table(suite.get("rows")))
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return missing
    return "Measured by `mnemos eval` on these weights.\n\n" + "\n\n".join(tables) if tables else missing


def _table(rows: Any) -> str:
    """The scalar columns of a suite's rows as a Markdown table; empty if there are none."""
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    names = list(dict.fromkeys(k for row in rows for k, v in row.items() if isinstance(v, str | int | float)))
    names = [name for name in names if name not in HIDDEN_COLUMNS]
    if not names:
        return ""
    lines = [names, ["---"] * len(names), *([_short(row.get(name)) for name in names] for row in rows[:MAX_ROWS])]
    lines[0] = [_text(name.replace("_", " ")) for name in names]
    more = f"\n\n{len(rows) - MAX_ROWS} more rows are left out." if len(rows) > MAX_ROWS else ""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + more


def _validated(run: Path, step: int, average: bool) -> dict[str, Any]:
    """The last validation of the checkpoint's step; nothing for averaged weights, whose loss is recorded under another name."""
    rows = [] if average else [row for row in read_metrics(run, "validate") if row.get("step") == step]
    return rows[-1] if rows else {}


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if is_number and math.isfinite(value) else None


def _whole(*values: float | None) -> list[str]:
    return ["?" if value is None else f"{value:,.0f}" for value in values]


def _word(value: Any) -> str:
    return value if isinstance(value, str) and re.fullmatch(r"[\w.+-]{1,40}", value) else ""


def _text(value: str) -> str:
    """A stranger's text as one line without markup of Markdown or HTML."""
    return re.sub(r"[^\w .,:;=()/@%+*?-]", "", " ".join(value.split()))[:MAX_TEXT]


def _source(source: str) -> str:
    """The name of a source, without the folders of the machine that it was on."""
    is_local = os.path.isabs(source) or source.startswith((".", "~")) or source.count("/") > 1
    name = Path(source.rstrip("/")).name if is_local else source
    return _text(name) or "unnamed"


def _short(value: Any) -> str:
    number = _number(value)
    if number is None:
        return _text(value) if isinstance(value, str) else ""
    return f"{number:,.0f}" if number == int(number) and abs(number) < 1e15 else f"{number:.4g}"


def _pairs(rows: list[tuple[str, str]]) -> str:
    return "\n".join(f"| {name} | {value} |" for name, value in rows)
