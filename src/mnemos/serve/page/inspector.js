// What the memory did with each token of the last turn: colours, numbers, and what a read resembled.
import { $, el, icon, number, plural, sentence } from "./dom.js";
import * as api from "./api.js";

const QUANTITIES = [
  ["surprise", "Surprise", "The inner loss of a token before it is written: how far the memory's output was from what the token should have given."],
  ["lr", "Learning rate", "The gate lr: how strongly a token is written."],
  ["retain", "Retain", "The gate retain: what the memory keeps of itself at this token. 1 forgets nothing."],
];
const WHO = { user: "You", assistant: "Answer", system: "System prompt", template: "Template" };
const MOST = 6000; // more tokens than this are not drawn

const view = { id: null, trace: null, quantity: "surprise", token: 0 };
let spans = [], detail = null, box = null, reading = null, closed = () => {};

export const isOpen = () => !$("inspector").hidden;

export function setUp(onClose) {
  closed = onClose;
  $("inspector").addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
}

export function close() {
  if (!isOpen()) return;
  reading?.abort();
  const inside = $("inspector").contains(document.activeElement);
  $("inspector").hidden = true;
  hideTip();
  $("inspect").setAttribute("aria-expanded", "false");
  closed();
  if (inside) $("inspect").focus();
}

// Open the panel; focus: move the keyboard there.
export function open(focus) {
  $("inspector").hidden = false;
  $("inspect").setAttribute("aria-expanded", "true");
  frame(el("p", { class: "soft" }, "It fills as soon as a turn has ended."));
  if (focus) $("inspector").querySelector("button").focus();
}

function frame(...content) {
  const head = el("div", { class: "panel-head" },
    el("div", {}, el("h2", {}, "Last turn"), el("p", { class: "soft" }, "What the memory did with each token")),
    el("button", { type: "button", class: "icon-button", "aria-label": "Close the inspector", onclick: close }, icon("close")));
  const kept = $("inspector").contains(document.activeElement);
  $("inspector").replaceChildren(head, ...content);
  if (kept) head.querySelector("button").focus();
}

// Fetch the trace of a session's last turn and show it.
export async function load(id) {
  if (!isOpen()) return;
  reading?.abort();
  if (!id) {
    frame(el("p", { class: "soft" }, "This session has no turn yet. Send a message, and its tokens appear here."));
    return;
  }
  const mine = reading = new AbortController();
  if (view.id !== id) frame(el("p", { class: "soft" }, "Reading the turn again …"));
  try {
    const found = await api.trace(id, mine.signal);
    if (mine.signal.aborted) return;
    view.id = id;
    view.trace = checked(found);
    view.token = Math.max(0, Math.min(view.token, view.trace.tokens.length - 1));
    draw();
  } catch (wrong) {
    if (wrong.name === "AbortError" || mine.signal.aborted) return;
    view.id = null;
    if (wrong.status === 409) frame(el("p", { class: "soft" }, sentence(wrong.message), " Send a message, and its tokens appear here."));
    else frame(el("div", { class: "problem", role: "alert" }, el("p", {}, sentence(wrong.message)), el("button", { type: "button", class: "button", onclick: () => load(id) }, "Try again")));
  }
}

function checked(found) {
  const tokens = (Array.isArray(found?.tokens) ? found.tokens : []).slice(0, MOST).map((t) => ({ text: String(t?.text ?? "") || `⟨${Number(t?.id)}⟩`, role: String(t?.role ?? "") }));
  const series = {};
  for (const [name] of QUANTITIES) {
    const x = found?.series?.[name];
    if (Array.isArray(x) && x.length) series[name] = tokens.map((_, i) => (typeof x[i] === "number" ? x[i] : NaN));
  }
  const resembled = Array.isArray(found?.resembled) ? tokens.map((_, i) => (Array.isArray(found.resembled[i]) ? found.resembled[i].slice(0, 3) : [])) : null;
  return { tokens, series, resembled, cut: (found?.tokens?.length ?? 0) > MOST };
}

// The 2nd and 98th percentile: what lies beyond has the colour of the end.
function range(x) {
  const sorted = x.filter(Number.isFinite).sort((a, b) => a - b);
  if (!sorted.length) return null;
  return { low: sorted[Math.floor(0.02 * (sorted.length - 1))], high: sorted[Math.ceil(0.98 * (sorted.length - 1))], flat: sorted[0] === sorted[sorted.length - 1] };
}

const level = (x, r) => (!Number.isFinite(x) || !r || r.high <= r.low ? 0 : Math.max(0, Math.min(1, (x - r.low) / (r.high - r.low))));
const visible = (text) => text.replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t").replace(/\r/g, "␍");
const quoted = (text) => `“${text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/\r/g, "␍")}”`;
const label = (name) => QUANTITIES.find(([key]) => key === name)[1];

function draw() {
  const { tokens, series, cut } = view.trace;
  const offered = QUANTITIES.filter(([name]) => series[name]);
  if (!tokens.length) return frame(el("p", { class: "soft" }, "The last turn has no tokens."));
  if (!offered.length) return frame(el("p", { class: "soft" }, `The last turn has ${plural(tokens.length, "token")}. This model has no memory that learns, so there is nothing to colour.`));
  if (!series[view.quantity]) view.quantity = offered[0][0];

  const chips = el("fieldset", { class: "chips" }, el("legend", {}, "Colour by"), ...offered.map(([name, text, title]) =>
    el("label", { title }, el("input", { type: "radio", name: "quantity", value: name, checked: name === view.quantity, onchange: () => { view.quantity = name; paint(); } }), el("span", {}, text))));
  box = el("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens of the last turn; arrow keys move from token to token" });
  spans = [];
  let role = null, group = null;
  tokens.forEach((token, i) => {
    if (token.role !== role) {
      role = token.role;
      group = el("div", { class: "token-group" }, el("p", { class: "who" }, WHO[role] ?? "Turn"));
      box.append(group);
    }
    const raw = /^⟨\d+⟩$/.test(token.text), blank = /^\s*$/.test(token.text) && token.text !== " ";
    const span = el("span", { class: raw ? "mark raw" : blank ? "mark" : null }, visible(token.text));
    span.token = i;
    spans.push(span);
    group.append(span);
  });
  box.addEventListener("pointerover", (event) => {
    const i = event.target.token;
    if (i === undefined) return hideTip();
    choose(i);
    showTip(event, i);
  });
  box.addEventListener("pointerleave", hideTip);
  box.addEventListener("click", (event) => { if (event.target.token !== undefined) choose(event.target.token); });
  box.addEventListener("focus", () => choose(view.token));
  box.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10, PageUp: -100, PageDown: 100, Home: -1e9, End: 1e9 }[event.key];
    if (move === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    hideTip();
    choose(view.token + move, true);
  });
  detail = el("section", { class: "detail card", "aria-live": "polite", "aria-label": "The chosen token" });
  frame(chips, el("p", { class: "soft", id: "quantity-note" }), el("div", { class: "legend", id: "legend" }), box, detail, strips(offered),
    el("p", { class: "soft" }, `${cut ? `Only the first ${plural(MOST, "token")} are shown. ` : ""}Values are means over the layers and heads of the memory. Point at a token, or move with the arrow keys.${view.trace.resembled ? " Underlined are the tokens that its read resembles most." : ""}`));
  paint();
}

function paint() {
  const x = view.trace.series[view.quantity], r = range(x);
  spans.forEach((span, i) => span.style.setProperty("--u", level(x[i], r).toFixed(3)));
  $("quantity-note").textContent = QUANTITIES.find(([name]) => name === view.quantity)[2];
  if (!r) $("legend").replaceChildren("no numbers");
  else if (r.flat) $("legend").replaceChildren(`${label(view.quantity)} is ${number(r.low)} for every token`);
  else $("legend").replaceChildren(el("span", {}, number(r.low, 3)), el("i", { "aria-hidden": "true" }), el("span", {}, number(r.high, 3)));
  choose(view.token);
}

// Three lines of colour, one for each quantity along the turn.
function strips(offered) {
  const rows = offered.flatMap(([name, text]) => {
    const x = view.trace.series[name], r = range(x);
    if (!r || r.flat) return [el("span", {}, text), el("span", {}, r ? `${number(r.low)} for every token` : "no numbers")];
    const canvas = el("canvas", { width: Math.min(x.length, 1200), height: 1, role: "img", "aria-label": `${text} along the turn, from ${number(r?.low, 3)} to ${number(r?.high, 3)}` });
    const pen = canvas.getContext("2d");
    for (let px = 0; px < canvas.width; px++) {
      const from = Math.floor((px * x.length) / canvas.width), to = Math.max(from + 1, Math.floor(((px + 1) * x.length) / canvas.width));
      pen.fillStyle = `rgba(240,128,20,${0.85 * Math.max(...x.slice(from, to).map((v) => level(v, r)))})`;
      pen.fillRect(px, 0, 1, 1);
    }
    const at = (event) => { const b = canvas.getBoundingClientRect(); return Math.max(0, Math.min(x.length - 1, Math.floor(((event.clientX - b.left) / b.width) * x.length))); };
    canvas.addEventListener("click", (event) => choose(at(event), true));
    return [el("span", {}, text), canvas];
  });
  return el("div", { class: "strip" }, ...rows);
}

function choose(i, scroll) {
  for (const span of spans) span.classList.remove("here", "like");
  view.token = Math.max(0, Math.min(spans.length - 1, i));
  spans[view.token].classList.add("here");
  if (scroll) spans[view.token].scrollIntoView({ block: "nearest" });
  const { tokens, series, resembled } = view.trace, k = view.token;
  const list = el("dl", {});
  for (const [name, text] of QUANTITIES) {
    if (!series[name]) continue;
    const now = name === view.quantity ? "now" : null;
    list.append(el("dt", { class: now }, text), el("dd", { class: now }, number(series[name][k])));
  }
  detail.replaceChildren(el("h3", {}, `Token ${k}: `, el("code", {}, quoted(tokens[k].text))), list);
  if (!resembled) return;
  const links = resembled[k].filter((like) => Number.isInteger(like?.index));
  detail.append(el("h4", {}, "Its read resembles"));
  if (!links.length) detail.append(el("p", { class: "soft" }, "no earlier token of this turn"));
  detail.append(el("ol", {}, ...links.map(({ index, weight }) => {
    const there = spans[index];
    there?.classList.add("like");
    const name = there ? [el("code", {}, quoted(tokens[index].text)), ` at ${index}`] : ["a token before this turn"];
    const link = there ? el("button", { type: "button", class: "link", onclick: () => { choose(index, true); box.focus(); } }, ...name) : el("span", {}, ...name);
    return el("li", {}, link, el("span", {}, number(weight, 3)));
  })));
}

function showTip(event, i) {
  const tip = $("tip");
  tip.textContent = `${quoted(view.trace.tokens[i].text)}  token ${i}\n${QUANTITIES.filter(([name]) => view.trace.series[name]).map(([name, text]) => `${text}: ${number(view.trace.series[name][i])}`).join("\n")}`;
  tip.hidden = false;
  const size = tip.getBoundingClientRect(), { clientX: x, clientY: y } = event;
  tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - size.width - 8))}px`;
  tip.style.top = `${y + 18 + size.height > innerHeight ? Math.max(8, y - size.height - 12) : y + 18}px`;
}

function hideTip() {
  $("tip").hidden = true;
}
