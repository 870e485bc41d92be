// The analysis of runs: record, checkpoints, generations, health.
const RUNS = DATA.runs;
const view = { run: 0 };
const body = el("div", {});
const LEVELS = { bad: "broken", warn: "look at it", note: "note" };

const numbers = (rows, key, x = "step") => {
  const kept = rows.filter((r) => r[key] !== undefined);
  return { x: kept.map((r) => r[x]), y: kept.map((r) => r[key]) };
};
const layersOf = (rows) => [...new Set(rows.flatMap((r) => Object.keys(r.layers || {})))].sort((a, b) => a - b);
const perLayer = (rows, get) => layersOf(rows).map((l) => ({ name: `layer ${l}`, x: rows.map((r) => r.step), y: rows.map((r) => get((r.layers || {})[l] || {}) ?? null), dots: rows.length < 24 })).filter((s) => s.y.some((y) => y !== null));

function add(grid, spec) {
  const series = spec.series.filter((s) => s.y.some((y) => y !== null && y !== undefined));
  if (series.length) grid.append(chart({ xName: "step", whole: true, ...spec, series }));
}

function findings(run) {
  const box = el("div", { class: "findings" });
  for (const f of run.findings) {
    box.append(el("div", { class: `card finding ${f.level}` }, el("div", {}, el("b", { class: "level" }, LEVELS[f.level]), el("b", {}, f.title)), el("p", {}, f.text), f.advice ? el("p", { class: "soft" }, f.advice) : null));
  }
  if (!run.findings.length) box.append(el("div", { class: "card finding good" }, el("b", { class: "level" }, "healthy"), "Nothing stands out."));
  return box;
}

function losses(run) {
  const grid = el("div", { class: "grid" }), { train, validate, probe } = run.records;
  add(grid, { title: "Loss", unit: "nats per token", height: 250, series: [
    { name: "training", faint: true, colour: "var(--c0)", ...numbers(train, "loss") },
    { name: "training, smoothed", colour: "var(--c0)", ...numbers(train, "smoothed_loss") },
    { name: "validation", colour: "var(--c1)", dots: validate.length < 60, ...numbers(validate, "val_loss") },
    { name: "validation, averaged weights", colour: "var(--c2)", dash: true, ...numbers(validate, "val_loss_average") },
  ] });
  const gains = validate.filter((r) => typeof r.memory?.gain === "number");
  add(grid, { title: "Gain from learning at test time", unit: "% of perplexity", zero: true, note: "How much lower the perplexity of tokens beyond the attention window is with writes than without. Below 0, writing does harm.", series: [{ x: gains.map((r) => r.step), y: gains.map((r) => 100 * r.memory.gain), dots: true }] });
  add(grid, { title: "Gradient norm", log: true, series: [{ ...numbers(train, "grad_norm") }] });
  add(grid, { title: "Learning rate", series: [{ ...numbers(train, "lr") }] });
  add(grid, { title: "Speed", unit: "tokens per second", zero: true, series: [{ ...numbers(train, "tokens_per_second") }] });
  add(grid, { title: "Needle in a haystack", note: "gain: nats by which the right fact makes the answer likelier than a wrong one", series: [{ name: "accuracy", dots: true, ...numbers(probe, "accuracy") }, { name: "gain", dots: true, ...numbers(probe, "gain") }] });
  return grid;
}

function gates(run) {
  const grid = el("div", { class: "grid" }), rows = run.records.validate.filter((r) => r.layers);
  add(grid, { title: "Gate between attention and memory", unit: "mean", note: "convex: 1 is attention alone; additive: 1 is all of the memory", series: perLayer(rows, (l) => l.gate?.mean) });
  add(grid, { title: "Gates that have decided", unit: "share below 0.1 or above 0.9", series: perLayer(rows, (l) => (l.gate ? l.gate.near_0 + l.gate.near_1 : undefined)) });
  add(grid, { title: "Retain", unit: "mean", series: perLayer(rows, (l) => l.retain?.mean) });
  add(grid, { title: "Inner learning rate", unit: "mean share of its range", series: perLayer(rows, (l) => l.lr?.mean) });
  add(grid, { title: "Momentum", unit: "mean", series: perLayer(rows, (l) => l.momentum?.mean) });
  add(grid, { title: "Window gate", unit: "mean", series: perLayer(rows, (l) => l.token?.mean) });
  add(grid, { title: "Fall of the surprise by writing", unit: "%", note: "How much lower the inner loss of a chunk is after it was written than before.", series: perLayer(rows, (l) => (l.surprise_before ? 100 * (1 - l.surprise_after / l.surprise_before) : undefined)) });
  add(grid, { title: "Effective rank", unit: "lowest of the fast maps", note: "exp of the entropy of the singular values: how many directions are in use.", series: perLayer(rows, (l) => l.effective_rank) });
  add(grid, { title: "Relearning", unit: "of a fresh memory", note: "Fall of the inner loss of a sequence's last chunk when it is written, relative to a fresh memory: 0 is a dead memory.", zero: true, series: perLayer(rows, (l) => l.relearning) });
  return grid;
}

function checkpoints(run) {
  const grid = el("div", { class: "grid" }), rows = run.readings;
  const steps = rows.map((r) => r.step), each = (get) => (rows[0]?.layers || []).map((l, i) => ({ name: `layer ${l.index}`, x: steps, y: rows.map((r) => get(r.layers[i]) ?? null), dots: true }));
  const kinds = { learning: "with learning", frozen: "no test-time learning", off: "memory off" };
  add(grid, { title: "Perplexity of the text", log: true, series: Object.entries(kinds).map(([key, name]) => ({ name, x: steps, y: rows.map((r) => r.perplexity[key] ?? null), dots: true })) });
  const sum = (l, key) => (l.maps.length ? Math.sqrt(l.maps.reduce((a, m) => a + m[key] ** 2, 0)) : undefined);
  add(grid, { title: "Memory norm before the text", unit: "initial weights, all maps", series: each((l) => sum(l, "start")) });
  add(grid, { title: "Memory norm after the text", unit: "all maps", series: each((l) => sum(l, "end")) });
  add(grid, { title: "Effective rank after the text", unit: "last map", series: each((l) => l.maps[l.maps.length - 1]?.rank) });
  add(grid, { title: "Distance from the initial weights", unit: "|W − W₀| / |W₀| after the text", series: each((l) => l.distance) });
  add(grid, { title: "Relearning", unit: "of a fresh memory", note: "Fall of the inner loss of the text's last chunk when it is written, relative to a fresh memory: 0 is a dead memory.", zero: true, series: each((l) => l.relearning) });
  add(grid, { title: "Gate to memory", unit: "mean on the text", series: each((l) => l.route) });
  add(grid, { title: "Memory's share of the norm", unit: "mean on the text", series: each((l) => l.share) });
  add(grid, { title: "Retain", unit: "mean on the text", series: each((l) => l.retain) });
  return grid;
}

function generations(run) {
  const grid = el("div", { class: "grid" });
  for (const r of run.readings) if (r.sample) grid.append(el("section", { class: "card" }, el("h3", {}, `step ${fmt(r.step)}`), el("p", { class: "soft" }, "from the checkpoint, the likeliest tokens"), el("p", { class: "quote" }, r.sample)));
  for (const s of run.samples) grid.append(el("section", { class: "card" }, el("h3", {}, `step ${fmt(s.step)}`), el("p", { class: "soft" }, "drawn while training"), el("p", { class: "quote" }, s.text)));
  return grid;
}

function show() {
  const run = RUNS[view.run], s = run.summary;
  const tiles = el("div", { class: "tiles" });
  for (const [name, value] of [
    ["steps", fmt(s.step)], ["training loss", fmt(s.loss)], ["validation loss", fmt(s.val_loss)], ["best", fmt(s.best)], ["bits per byte", fmt(s.bits_per_byte)],
    ["learning gain", s.learning_gain === null ? "–" : percent(s.learning_gain)], ["tokens per second", fmt(Math.round(s.tokens_per_second ?? NaN))], ["bad steps", fmt(s.bad_steps)],
  ]) if (value !== "–") tiles.append(tile(name, value));
  const parts = [tiles, el("p", { class: "soft" }, run.about), el("h2", {}, "Health"), findings(run)];
  const section = (title, note, grid) => { if (grid.children.length) parts.push(el("h2", {}, title), note ? el("p", { class: "soft" }, note) : "", grid); };
  section("Training and validation", "", losses(run));
  section("Gates over the run", "As measured on held-out text at every validation.", gates(run));
  section("Checkpoint by checkpoint", run.text ? `Every checkpoint on disk read ${run.text}.` : "", checkpoints(run));
  section("Generations", "", generations(run));
  if (run.records.event.length) parts.push(el("h2", {}, "Events"), el("ul", { class: "events card", tabindex: 0, "aria-label": "events" }, ...run.records.event.map((e) => el("li", {}, el("b", {}, `step ${fmt(e.step)} `), e.message || ""))));
  body.replaceChildren(...parts);
}

function comparison() {
  const names = ["run", "model", "step", "loss", "validation", "best", "learning gain", "bad steps"];
  const rows = RUNS.map((r) => [r.name, r.summary.model, fmt(r.summary.step), fmt(r.summary.loss), fmt(r.summary.val_loss), fmt(r.summary.best), percent(r.summary.learning_gain), fmt(r.summary.bad_steps)]);
  const grid = el("div", { class: "grid" });
  const over = (key, kind) => RUNS.map((r, i) => ({ name: r.name, colour: colour(i, RUNS.length), dots: kind === "validate", ...numbers(r.records[kind], key, "tokens") }));
  add(grid, { title: "Training loss", unit: "smoothed, nats", xName: "tokens", series: over("smoothed_loss", "train") });
  add(grid, { title: "Validation loss", unit: "nats", xName: "tokens", series: over("val_loss", "validate") });
  return [el("h2", {}, "Side by side"), el("div", { class: "card" }, table(names, rows)), grid];
}

PAGE.append(el("header", {}, el("h1", {}, RUNS.map((r) => r.name).join(", ")), el("p", { class: "soft" }, "A run, checkpoint by checkpoint.")));
if (RUNS.length > 1) {
  PAGE.append(...comparison());
  PAGE.append(el("div", { class: "controls", style: "margin-top:24px" }, chips("Run", RUNS.map((r, i) => [i, r.name]), 0, (i) => { view.run = Number(i); show(); })));
}
PAGE.append(body);
show();
