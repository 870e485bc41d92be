// The inspector: one text, one or two models, coloured by a value of their memories.
const PANELS = DATA.panels;
const QUANTITIES = [
  ["surprise", "Surprise", "The inner loss of a token, by the weights its chunk began with, before the token is written."],
  ["gradient_norm", "Momentary surprise", "The norm of the gradient that the token writes, summed over its window, before the learning rate."],
  ["momentum_norm", "Past surprise", "The norm of the surprise accumulator after the token."],
  ["lr", "Learning rate", "The inner learning rate (lr): how strongly a token is written."],
  ["retain", "Retain", "Share of the memory that is kept at this token. 1 forgets nothing."],
  ["momentum", "Momentum", "Share of the surprise accumulator that is kept at this token. 0 where the memory has none."],
  ["gate", "Window gate", "The weight of a token inside the window of a write. 1 if the memory has no gate."],
  ["route", "Routing", "How far the gate lets the memory in, mean over its heads: 0 is attention alone, 1 is all of the memory."],
  ["share", "Memory's share", "The norm of the memory's output, as a fraction of the norms of both parts. The other part is attention."],
  ["loss", "Loss", "Loss of the whole model for a token given all previous ones, in nats."],
  ["writing", "Help of writing", "Loss with no test-time learning minus loss. Orange: writing at test time helped here; blue: it hurt."],
  ["memory", "Help of memory", "Loss with memory off (output 0) minus loss. Orange: the memory helped here; blue: it hurt."],
];
const SIGNED = new Set(["writing", "memory"]);
const WHOLE_MODEL = new Set(["loss", "writing", "memory"]);
const SAME = PANELS.length === 2 && PANELS[0].tokens.length === PANELS[1].tokens.length && PANELS[0].tokens.every((t, i) => t === PANELS[1].tokens[i]);
const has = (name) => PANELS.some((p) => p.values[name] || p.layers.some((l) => l.values[name]));
const OFFERED = QUANTITIES.filter(([name]) => has(name));
const DEPTH = Math.max(...PANELS.map((p) => p.layers.length));
const firstLayer = () => {
  const found = PANELS[0].layers.findIndex((l) => Object.keys(l.values).length);
  return found < 0 ? 0 : found;
};
const state = { quantity: OFFERED[0][0], layer: firstLayer(), head: 0, map: 0, scale: "layer", difference: false, panel: 0, token: Math.min(PANELS[0].tokens.length - 1, 40) };
const letter = (i) => (PANELS.length > 1 ? "AB"[i] : "");
const named = (i) => (PANELS.length > 1 ? `${letter(i)}: ${PANELS[i].name}` : PANELS[i].name);

function values(panel, quantity, layer, head) {
  if (WHOLE_MODEL.has(quantity)) return row(panel.values[quantity], 0);
  const found = panel.layers[layer];
  return found ? row(found.values[quantity], head) : null;
}

function shown(i, layer = state.layer) {
  const own = values(PANELS[i], state.quantity, layer, state.head);
  if (!state.difference || i === 0 || !own) return own;
  const other = values(PANELS[0], state.quantity, layer, state.head);
  return other ? own.map((x, k) => x - other[k]) : null;
}

function range(i) {
  const signed = SIGNED.has(state.quantity) || (state.difference && i > 0);
  const layers = WHOLE_MODEL.has(state.quantity) ? [0] : state.scale === "layer" ? [state.layer] : [...Array(DEPTH).keys()];
  const together = state.difference ? [i] : PANELS.map((_, k) => k);
  const all = together.flatMap((k) => layers.flatMap((l) => Array.from(shown(k, l) || []))).filter(Number.isFinite).sort((a, b) => a - b);
  if (!all.length) return null;
  const low = all[Math.floor(0.02 * (all.length - 1))], high = all[Math.ceil(0.98 * (all.length - 1))];
  if (!signed) return { low, high, signed, flat: all[0] === all[all.length - 1] };
  const most = Math.max(Math.abs(low), Math.abs(high)) || 1e-9;
  return { low: -most, high: most, signed, flat: false };
}

function level(x, r) {
  if (!Number.isFinite(x) || !r) return 0;
  if (r.signed) return Math.max(-1, Math.min(1, x / r.high));
  return r.high > r.low ? Math.max(0, Math.min(1, (x - r.low) / (r.high - r.low))) : 0;
}

// ---- the text

const visible = (text) => text.replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t").replace(/\r/g, "␍");
const quoted = (text) => `“${text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/\r/g, "␍")}”`;

const views = PANELS.map((panel, i) => {
  const box = el("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": `Text as read by ${named(i)}; arrow keys move from token to token` });
  const spans = panel.tokens.map((text, k) => {
    const raw = /^⟨\d+⟩$/.test(text), blank = /^\s*$/.test(text) && text !== " ";
    const span = el("span", { class: raw ? "mark raw" : blank ? "mark" : null }, visible(text));
    span.token = k;
    return span;
  });
  box.append(...spans);
  const legend = el("div", { class: "legend" });
  const message = el("p", { class: "soft" });
  box.addEventListener("pointerover", (event) => {
    const k = event.target.token;
    if (k === undefined) return;
    choose(i, k);
    const x = shown(i);
    showTip(event.clientX, event.clientY, `${quoted(panel.tokens[k])}  token ${k}\n${label(state.quantity)}${state.difference && i ? ", B − A" : ""}: ${x ? fmt(x[k]) : "–"}`);
  });
  box.addEventListener("pointerleave", hideTip);
  box.addEventListener("click", (event) => { if (event.target.token !== undefined) choose(i, event.target.token); });
  box.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -20, ArrowDown: 20, PageUp: -100, PageDown: 100, Home: -1e9, End: 1e9 }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    choose(i, state.token + move, true);
  });
  const card = el("section", { class: "card" }, el("h3", {}, named(i)), el("p", { class: "soft" }, panel.about), legend, message, box);
  return { box, spans, legend, message, card };
});

const label = (name) => QUANTITIES.find(([key]) => key === name)[1];

function paint() {
  PANELS.forEach((panel, i) => {
    const view = views[i], x = shown(i), r = range(i);
    view.message.textContent = x ? "" : panel.layers[state.layer] ? `Layer ${state.layer} (${panel.layers[state.layer].kind}) has no such value.` : `This model has no layer ${state.layer}.`;
    view.spans.forEach((span, k) => {
      const u = x ? level(x[k], r) : 0;
      span.style.setProperty("--u", Math.abs(u).toFixed(3));
      span.classList.toggle("cold", u < 0);
    });
    view.legend.replaceChildren();
    if (!x || !r) return;
    if (r.flat) view.legend.append(`${label(state.quantity)} is ${fmt(r.low)} for every token`);
    else view.legend.append(el("span", {}, fmt(r.low)), el("i", { class: r.signed ? "both" : null, "aria-hidden": "true" }), el("span", {}, fmt(r.high)), el("span", {}, `2 % of the tokens lie beyond each end`));
  });
}

// ---- one token

const detail = el("aside", { class: "card detail", "aria-live": "polite" });
let likes = [];

function choose(i, k, scroll) {
  const tokens = PANELS[i].tokens.length;
  views[state.panel].spans[state.token]?.classList.remove("here");
  for (const span of likes) span.classList.remove("like");
  state.panel = i;
  state.token = Math.max(0, Math.min(tokens - 1, k));
  const span = views[i].spans[state.token];
  span.classList.add("here");
  if (scroll) span.scrollIntoView({ block: "nearest" });
  likes = reads(i).tokens.filter(([token]) => token >= 0).map(([token]) => views[i].spans[token]);
  for (const like of likes) like.classList.add("like");
  showDetail();
}

// What the read at the chosen token resembles: [[token, weight], …] and the weight of its own write.
function reads(i) {
  const panel = PANELS[i], layer = panel.layers[state.layer], k = state.token;
  if (!layer || !layer.reads) return { tokens: [], own: null };
  const count = unpack(layer.reads.token).shape[2];
  const token = row(layer.reads.token, state.head), weight = row(layer.reads.weight, state.head);
  const found = [];
  for (let n = 0; n < count; n++) if (token[k * count + n] >= -panel.persistent) found.push([token[k * count + n], weight[k * count + n]]);
  return { tokens: found, own: row(layer.reads.own, state.head)[k], layer };
}

function context(panel, at) {
  const before = panel.tokens.slice(Math.max(0, at - 8), at).join(""), after = panel.tokens.slice(at + 1, at + 5).join("");
  const plain = (text) => text.replace(/[\n\r\t]/g, " ");
  return el("code", {}, plain(before).slice(-12), el("b", {}, visible(panel.tokens[at]).trimEnd() || "␣"), plain(after).slice(0, 8));
}

function showDetail() {
  const i = state.panel, panel = PANELS[i], k = state.token;
  const list = el("dl", {});
  for (const [name, text] of OFFERED) {
    const x = values(panel, name, state.layer, state.head);
    if (!x) continue;
    const now = name === state.quantity ? "now" : null;
    list.append(el("dt", { class: now }, text), el("dd", { class: now }, fmt(x[k])));
  }
  const found = reads(i), muon = found.layer && found.layer.rule === "muon";
  detail.replaceChildren(
    el("h3", {}, `${letter(i) ? letter(i) + ", t" : "T"}oken ${k}: `, el("code", {}, quoted(panel.tokens[k]))),
    el("p", { class: "soft" }, `layer ${state.layer}${state.head ? `, head ${state.head - 1}` : ", mean over heads"}`),
    list,
  );
  if (!found.layer) return;
  detail.append(el("h3", {}, "Its read resembles"));
  if (!found.tokens.length) detail.append(el("p", { class: "soft" }, muon ? "Nothing yet: no earlier token has been committed." : "No earlier token."));
  const items = found.tokens.map(([token, weight]) =>
    el("li", {}, token < 0 ? el("span", {}, `persistent token ${token + panel.persistent + 1}`) : el("span", {}, context(panel, token), ` at ${token}`), el("span", {}, fmt(weight, 3))));
  detail.append(el("ol", {}, ...items));
  detail.append(el("p", { class: "soft" }, `its own write: ${fmt(found.own, 3)}`));
}

// ---- the overview and the curves

const strips = el("div", {});
const curves = el("div", { class: "grid" });
const memoryCurves = el("div", { class: "grid" });
const memoryControls = el("div", {});

function paintStrips() {
  strips.replaceChildren();
  const css = getComputedStyle(document.documentElement);
  const [hot, cold, deep] = ["--hot", "--cold", "--deep"].map((name) => css.getPropertyValue(name).trim());
  PANELS.forEach((panel, i) => {
    const box = el("div", { class: "strip" });
    const whole = WHOLE_MODEL.has(state.quantity), r = range(i);
    const layers = whole ? [0] : panel.layers.map((l) => l.index).filter((l) => values(panel, state.quantity, l, state.head));
    for (const l of layers) {
      const x = shown(i, l);
      if (!x) continue;
      const canvas = el("canvas", { width: Math.min(x.length, 1200), height: 1, role: "img", "aria-label": `${label(state.quantity)} of ${whole ? "the model" : `layer ${l}`} along the text` });
      const pen = canvas.getContext("2d");
      for (let px = 0; px < canvas.width; px++) {
        const from = Math.floor((px * x.length) / canvas.width), to = Math.max(from + 1, Math.floor(((px + 1) * x.length) / canvas.width));
        let u = 0;
        for (let k = from; k < to; k++) { const v = level(x[k], r); if (Math.abs(v) > Math.abs(u)) u = v; }
        pen.fillStyle = `rgb(${(u < 0 ? cold : hot).split(" ").join(",")},${Math.abs(u) * deep})`;
        pen.fillRect(px, 0, 1, 1);
      }
      const at = (event) => { const b = canvas.getBoundingClientRect(); return Math.max(0, Math.min(x.length - 1, Math.floor(((event.clientX - b.left) / b.width) * x.length))); };
      canvas.addEventListener("pointermove", (event) => { const k = at(event); showTip(event.clientX, event.clientY, `${whole ? "model" : `layer ${l}`}, token ${k} ${quoted(panel.tokens[k])}: ${fmt(x[k])}`); });
      canvas.addEventListener("pointerleave", hideTip);
      canvas.addEventListener("click", (event) => { if (!whole) set({ layer: l }); choose(i, at(event), true); });
      box.append(el("span", {}, whole ? "model" : `layer ${l}`), canvas);
    }
    strips.append(PANELS.length > 1 ? el("p", { class: "soft" }, named(i)) : "", layers.length ? box : el("p", { class: "soft" }, "no layer has this number"));
  });
}

function smoothed(x, width) {
  const out = new Float64Array(x.length), half = width >> 1, sums = [0], counts = [0];
  x.forEach((v, i) => { const ok = Number.isFinite(v); sums.push(sums[i] + (ok ? v : 0)); counts.push(counts[i] + (ok ? 1 : 0)); });
  for (let i = 0; i < x.length; i++) {
    const a = Math.max(0, i - half), b = Math.min(x.length, i + half + 1);
    out[i] = counts[b] > counts[a] ? (sums[b] - sums[a]) / (counts[b] - counts[a]) : NaN;
  }
  return out;
}

function paintCurves() {
  const series = [];
  const width = Math.max(5, Math.round(PANELS[0].tokens.length / 40)) | 1;
  PANELS.forEach((panel, i) => {
    const x = values(panel, state.quantity, state.layer, state.head);
    if (!x) return;
    const places = Array.from(x.keys());
    series.push({ x: places, y: x, faint: true, colour: colour(i, 2) });
    series.push({ name: `${letter(i) || "mean"} of ${width} tokens`.replace(/^A of|^B of/, (m) => `${m[0]}, mean of`), x: places, y: smoothed(Array.from(x), width), colour: colour(i, 2), dash: i > 0 });
  });
  curves.replaceChildren(chart({ title: label(state.quantity), unit: WHOLE_MODEL.has(state.quantity) ? "of the model" : `in layer ${state.layer}`, xName: "token", whole: true, height: 230, series }));
}

function paintMemory() {
  memoryControls.replaceChildren();
  memoryCurves.replaceChildren();
  const layers = PANELS.map((panel) => panel.layers[state.layer]).map((l) => (l && l.maps.length ? l : null));
  if (!layers.some(Boolean)) {
    memoryCurves.append(el("p", { class: "soft" }, `Layer ${state.layer} has no memory of fast weights.`));
    return;
  }
  const most = layers.reduce((a, b) => ((b?.maps.length || 0) > (a?.maps.length || 0) ? b : a));
  const map = Math.min(state.map, most.maps.length - 1);
  if (most.maps.length > 1) memoryControls.append(chips("Fast map", most.maps.map((m, k) => [k, m.shape ? `${m.name}: ${m.shape[0]} × ${m.shape[1]}` : m.name]), map, (k) => set({ map: Number(k) })));
  const each = (key) => layers.flatMap((l, i) => {
    const m = l && l.maps[Math.min(map, l.maps.length - 1)];
    return m && m[key] ? [{ name: letter(i) || undefined, x: l.moments, y: row(m[key], state.head), colour: colour(i, 2), dash: i > 0, dots: l.moments.length < 24 }] : [];
  });
  const add = (title, unit, note, series, extra) => { if (series.length) memoryCurves.append(chart({ title, unit, note, xName: "tokens read", whole: true, series, ...extra })); };
  add("Norm", "Frobenius", "", each("norm"), {});
  add("Moved", "norm of W − W₀", "Distance of the weights from their initial values.", each("moved"), { zero: true });
  add("Effective rank", "", "exp of the entropy of the singular values, scaled to a sum of 1: how many directions are in use.", each("rank"), {});
  layers.forEach((l, i) => {
    const m = l && l.maps[Math.min(map, l.maps.length - 1)];
    if (!m || !m.values) return;
    const [, count, moments] = unpack(m.values).shape, all = row(m.values, state.head);
    const series = [...Array(count).keys()].map((n) => ({ name: `σ${n + 1}`, x: l.moments, y: all.subarray(n * moments, (n + 1) * moments) }));
    add(`Singular values${letter(i) && ", " + letter(i)}`, `the largest ${count}`, "", series, { log: true });
  });
}

function routing() {
  const box = el("div", { class: "panels" });
  PANELS.forEach((panel, i) => {
    const rows = el("div", { class: "bars" });
    for (const r of panel.routing) {
      const share = r.share ?? r.route;
      const words = share === undefined ? (panel.layers[r.layer].maps.length ? "memory alone, nothing to route" : "no memory") : share < 0.2 ? "mostly attention" : share < 0.4 ? "leans on attention" : share <= 0.6 ? "both alike" : share <= 0.8 ? "leans on memory" : "mostly memory";
      const numbers = [];
      if (r.share !== undefined) numbers.push(`memory's share ${percent(r.share)}`);
      if (r.route !== undefined) numbers.push(`gate to memory ${fmt(r.route, 3)} ± ${fmt(r.spread, 2)}`, `closed to memory ${percent(r.to_attention)}`, `open to memory ${percent(r.to_memory)}`);
      if (r.retain !== undefined) numbers.push(`half-life ${r.retain < 1 ? fmt(Math.log(0.5) / Math.log(r.retain), 3) + " tokens" : "endless"}`);
      if (r.effective_rank !== undefined) numbers.push(`effective rank ${fmt(r.effective_rank, 3)}`);
      if (r.relearning !== undefined) numbers.push(`relearning ${percent(r.relearning)} of a fresh memory's`);
      const track = share === undefined ? null : el("div", { class: "track", "aria-hidden": "true" }, el("i", { style: `width:${(100 * share).toFixed(1)}%` }));
      rows.append(el("div", { class: "bar-row" }, el("div", {}, `Layer ${r.layer} (${r.kind}): ${words}`), track, el("div", { class: "numbers" }, ...numbers.map((n) => el("span", {}, n)))));
    }
    box.append(el("section", { class: "card" }, el("h3", {}, named(i)), rows));
  });
  return box;
}

// ---- the page

function set(change) {
  Object.assign(state, change);
  const layers = PANELS.map((panel) => panel.layers[state.layer]).filter(Boolean);
  const heads = Math.max(1, ...layers.flatMap((l) => Object.values(l.values).map((v) => v.shape[0])));
  if (state.head >= heads) state.head = 0;
  controls(heads);
  paint();
  paintStrips();
  paintCurves();
  paintMemory();
  choose(state.panel, state.token);
  about.textContent = QUANTITIES.find(([name]) => name === state.quantity)[2];
}

const bar = el("div", { class: "controls", role: "group", "aria-label": "Colour of the text" });
const about = el("p", { class: "soft", style: "margin-top:10px" });
let built = null;
function controls(heads) {
  const key = `${heads}|${state.layer}|${state.quantity}|${state.head}|${state.difference}|${state.scale}`;
  if (built === key) return;
  const focus = bar.contains(document.activeElement) ? [...bar.querySelectorAll("input,select")].indexOf(document.activeElement) : -1;
  const picked = focus >= 0 ? document.activeElement : null;
  const parts = [chips("Colour by", OFFERED.map(([name, text, title]) => [name, text, title]), state.quantity, (quantity) => set({ quantity }))];
  const kinds = (l) => [...new Set(PANELS.map((p) => p.layers[l]?.kind).filter(Boolean))].join(", ");
  parts.push(select("Layer", [...Array(DEPTH).keys()].map((l) => [l, `${l} (${kinds(l)})`]), state.layer, (layer) => set({ layer: Number(layer) })));
  if (heads > 2) parts.push(select("Head", [[0, "mean"], ...[...Array(heads - 1).keys()].map((h) => [h + 1, h])], state.head, (head) => set({ head: Number(head) })));
  parts.push(select("Scale", [["layer", "this layer"], ["all", "all layers"]], state.scale, (scale) => set({ scale })));
  if (SAME) parts.push(el("label", { class: "check" }, el("input", { type: "checkbox", checked: state.difference, onchange: (event) => set({ difference: event.target.checked }) }), "B minus A"));
  bar.replaceChildren(...parts);
  built = key;
  if (picked) {
    const fields = [...bar.querySelectorAll("input,select")];
    (fields.find((f) => f.type === "radio" && f.checked && picked.type === "radio") || fields[focus])?.focus();
  }
}

const tiles = el("div", { class: "tiles" });
PANELS.forEach((panel, i) => {
  const from = PANELS.length > 1 ? `${letter(i)}: ` : "";
  tiles.append(tile(`${from}tokens`, fmt(panel.tokens.length)), tile(`${from}perplexity`, fixed(panel.perplexity["learning"])));
  if (panel.perplexity.frozen !== undefined) tiles.append(tile(`${from}no test-time learning`, fixed(panel.perplexity.frozen)));
  if (panel.perplexity.off !== undefined) tiles.append(tile(`${from}with memory off`, fixed(panel.perplexity.off)));
});
const anyMuon = PANELS.some((p) => p.layers.some((l) => l.rule === "muon"));
const READS = "A read of the memory's first map is what remains of its initial weights, minus a sum over earlier tokens i of w·dᵢ, with dᵢ the error of token i (docs/theory.md, section 4). The weight is w = C·(φ(q)·φ(k)): C is the remaining part of the token's write (lr, momentum, retain, window), φ(q)·φ(k) the match of query and key. Shown are the earlier tokens with the largest |w|; for the mean over heads, the mean of |w|.";
const MUON = " With rule muon a write goes through Newton–Schulz, which is not a sum over tokens: C is then the lr of each commit times the token's part in it, with parts that sum to 1. This weighs the inputs of Newton–Schulz, not its output.";

PAGE.append(
  el("header", {}, el("h1", {}, PANELS.map((p) => p.name).join(" and ")), el("p", { class: "soft" }, "The memory while it reads a text, token by token."), tiles, ...PANELS.flatMap((p) => p.notes).filter((n, i, all) => all.indexOf(n) === i).map((n) => el("p", { class: "soft" }, n))),
  bar, about,
  el("div", { class: "reading" }, el("div", { class: "panels" }, ...views.map((v) => v.card)), detail),
  el("p", { class: "soft" }, `Point at a token, or move with the arrow keys. Underlined are the tokens its read resembles. ${READS}${anyMuon ? MUON : ""}`),
  el("h2", {}, "All layers along the text"), el("p", { class: "soft" }, "The same colours; click to go there."), strips,
  el("h2", {}, "Along the text"), curves,
  el("h2", {}, "The memory over time"), memoryControls, memoryCurves,
  el("h2", {}, "Attention or memory"), el("p", { class: "soft" }, "Orange is memory, blue is attention. Closed and open: share of the gates below 0.1 and above 0.9. Half-life: tokens until the memory has lost half, at its mean retain."), routing(),
);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paintStrips);
set({});
