"""Training configs: a run's config.yaml mutated, read, and made into the config of a model."""

from __future__ import annotations

from pathlib import Path
from random import Random

import yaml
from fuzz_mutations import change_bytes, change_json
from fuzz_target import Mismatch, Target

from mnemos.train import ModelConfig, TrainConfig

ALIASES = ["&a0 [x, x]", *(f"&a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60))]  # 2**60 words, if written out
TRICKS = (
    f"steps: [{', '.join(ALIASES)}]\n",
    f"model: {{set: [{', '.join(ALIASES)}]}}\n",
    f"data: [{', '.join(ALIASES)}]\n",
    f"optim: {{lr: [{', '.join(ALIASES)}]}}\n",
    "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]\n",
    "!!python/object/apply:os.system ['true']\n",
    "model: &m {preset: titans-mag, set: *m}\n",
    "steps: 2020-99-99\n",
    "steps: 1_0:60\n",
    "? [1, 2]\n: 3\n",
    "[" * 3000,
    "{a: " * 3000,
    "- " * 3000,
    "\ufeffsteps: 10\n",
    "steps: .nan\n",
)


class Configs(Target):
    """`TrainConfig.load`, then its model's config, and its text again."""

    kind = "config"

    def build(self) -> None:
        presets = ("titans-mag", "titans-mac", "atlas-mag", "qk-mag", "transformer")
        configs = [TrainConfig(model=ModelConfig(preset=name), steps=10, name="a") for name in presets]
        self.trees = [config.to_dict() for config in configs]
        self.texts = [yaml.safe_dump(tree, sort_keys=False) for tree in self.trees]

    def mutate(self, rng: Random, folder: Path) -> None:
        chosen = rng.randrange(len(self.trees))
        kind = rng.random()
        if kind < 0.25:
            data = change_bytes(rng, self.texts[chosen].encode(), [x.encode() for x in self.texts])
        elif kind < 0.3:
            data = (rng.choice(["", self.texts[chosen]]) + rng.choice(TRICKS)).encode()
        else:
            tree = self.trees[chosen]
            for _ in range(rng.choice([1, 1, 2, 3])):
                tree = change_json(rng, tree)
            try:
                data = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).encode(errors="surrogatepass")
            except RecursionError:
                data = b"[" * 2000
        (folder / "config.yaml").write_bytes(data)

    def use(self, rng: Random, folder: Path) -> None:
        config = TrainConfig.load(folder / "config.yaml")
        self.step("loaded")
        config.save(folder / "again.yaml")
        if TrainConfig.load(folder / "again.yaml") != config:
            raise Mismatch("a config read from its own text is another")
        self.step("used")
