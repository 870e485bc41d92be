"""transformers.Trainer on a Mnemos model: nothing special is needed. Runs in seconds on a CPU.

python examples/transformers_trainer.py
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import mnemos.models  # noqa: F401 — makes the models known to transformers
from mnemos.data import DataConfig, open_data
from mnemos.models import presets


class Rows(torch.utils.data.Dataset):
    """A fixed number of rows of text as a dataset of the kind transformers expects."""

    def __init__(self, batches, count: int):
        self.rows = []
        for batch in batches:
            self.rows += [{"input_ids": row, "labels": row} for row in batch["input_ids"]]
            if len(self.rows) >= count:
                break

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return self.rows[i]


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="titans-mag")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", help="keep the model here")
    options = parser.parse_args(arguments)

    with tempfile.TemporaryDirectory() as folder:
        data = open_data(DataConfig(seq_len=128, batch_size=8, cache_dir=folder))
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(presets.config(options.preset, size="nano", num_hidden_layers=2))
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = Trainer(model, settings, train_dataset=Rows(data.train, 256), eval_dataset=Rows(data.validation, 32))
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
        print(f"held-out loss: {before:.3f} before, {after:.3f} after {options.steps} steps")
        ids = torch.tensor([data.tokenizer.encode("def ")])
        print(
            data.tokenizer.decode(model.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=0)[0].tolist())
        )
        if options.out:
            model.save_pretrained(options.out)
            data.tokenizer.save(options.out)
        return after


if __name__ == "__main__":
    main()
