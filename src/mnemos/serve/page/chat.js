// The conversation on the screen: turns, answers side by side, the empty state, the meter, the composer.
import { $, announce, bytes, count, el, icon, isolated, number, plain, plural, sentence, toast } from "./dom.js";
import { elements } from "./text.js";
import { TURNS_DRAWN } from "./conversation.js";

const NOTES = {
  write: "Answers from the memory, and keeps this turn in it.",
  read: "Answers from the memory, and keeps nothing of this turn.",
  off: "Answers from this message alone, and keeps nothing of this turn.",
};
const EXAMPLES = [
  { title: "Tell it a fact", text: "My sister Clara plays the drum. Please remember that.", note: "Each token is read once. The line above counts them, and shows how large the state is and whether it grows." },
  { title: "Ask with and without memory", text: "What does my sister Clara play?", compare: true, note: "A second answer beside the first shows what the model says without the session." },
  { title: "See what surprised it", text: "The sky is blue, the grass is green, and the moon is a violin.", inspect: true, note: "The inspector colours each token by what the memory did with it." },
];
const nodes = new WeakMap(); // turn -> its element
const pending = new Set(); // turns to draw at the next frame
let actions = {}; // onSend, onStop, onRetry, onInspect, onReload
let shown = null, wasLoaded = false;
let server = null;

export function setUp(given) {
  actions = given;
  const message = $("message");
  $("composer").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
  message.addEventListener("input", () => { grow(); if (shown) shown.draft = message.value; controls(); });
  message.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
    event.preventDefault();
    submit();
  });
  $("stop").addEventListener("click", () => actions.onStop());
  $("memory").addEventListener("change", controls);
  controls();
}

export const mode = () => document.querySelector("#memory input:checked").value;

export function setServer(info) {
  server = info;
  const has = info.has_memory !== false;
  $("memory").disabled = $("compare").disabled = !has;
  if (!has) document.querySelector('#memory input[value="write"]').checked = true;
  controls();
}

function submit() {
  const text = $("message").value;
  if (!text.trim() || !shown || shown.busy || !shown.loaded || shown.failure) return;
  shown.draft = "";
  setDraft("");
  actions.onSend(text, { memory: mode(), compare: $("compare").checked && !$("compare").disabled });
}

export function setDraft(text, focus = false) {
  const message = $("message");
  message.value = text;
  grow();
  controls();
  if (focus) message.focus();
}

function grow() {
  const message = $("message");
  message.style.height = "auto";
  message.style.height = `${Math.min(message.scrollHeight, Math.max(90, innerHeight * 0.35))}px`;
}

// Which buttons can be used, and what the chosen mode does.
export function controls() {
  const busy = Boolean(shown?.busy), chosen = mode();
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("send").disabled = !$("message").value.trim() || !shown?.loaded || Boolean(shown?.failure);
  $("undo").disabled = !shown?.canUndo;
  $("inspect").disabled = !shown?.turns.length || !shown?.info;
  $("more").disabled = !shown?.info;
  if (server?.has_memory !== false) $("compare").disabled = chosen === "off";
  $("memory-note").textContent = server?.has_memory === false ? "This model has no memory of its own: it answers from its context." : NOTES[chosen];
}

// ---- turns

export function show(conversation) {
  const fresh = shown !== conversation, opened = conversation.loaded && (fresh || !wasLoaded);
  shown = conversation;
  wasLoaded = conversation.loaded;
  const box = $("conversation");
  if (fresh) setDraft(conversation.draft);
  $("scroll").setAttribute("aria-busy", String(!conversation.loaded));
  if (conversation.failure) box.replaceChildren(problem(conversation.failure, "Open again", () => actions.onReload()));
  else if (!conversation.loaded) box.replaceChildren(el("p", { class: "soft center" }, "Opening the session …"));
  else if (!conversation.turns.length) box.replaceChildren(conversation.info ? el("p", { class: "soft center" }, "This session has no turns yet.") : welcome());
  else box.replaceChildren(...earlier(conversation), ...conversation.turns.slice(-conversation.drawn).map(turnElement));
  heading();
  controls();
  if (conversation.turns.length && (opened || conversation.busy)) toEnd();
  else if (opened || !conversation.turns.length) $("scroll").scrollTop = 0;
}

export function heading() {
  const title = plain(shown?.info?.title) || (shown?.info ? shown.info.id : "New session");
  $("title").textContent = title;
  document.title = `${plain(title, 60)} · Mnemos`;
  const { info, sizes } = shown ?? {}, meter = $("meter");
  if (!info) {
    meter.replaceChildren("Nothing read yet");
    return;
  }
  const parts = [el("span", {}, el("b", {}, count(info.tokens_read)), ` ${info.tokens_read === 1 ? "token" : "tokens"} read`), el("span", {}, "state ", el("b", {}, bytes(info.state_bytes)))];
  if (sizes.length > 1) {
    const growth = sizes[sizes.length - 1] - sizes[sizes.length - 2];
    parts.push(growth ? el("span", {}, `${growth > 0 ? "+" : "−"}${bytes(Math.abs(growth))} by the last turn`) : el("span", { class: "good", title: "The last turns changed the state, and not its size." }, "constant"));
  }
  meter.replaceChildren(...parts.flatMap((part, i) => (i ? [", ", part] : [part])));
}

function welcome() {
  const own = Array.isArray(server?.examples) ? server.examples : [];
  const cards = EXAMPLES.map((card, i) => (typeof own[i] === "string" ? { ...card, text: plain(own[i], 300) } : card)).map(({ title, text, note, ...extra }) =>
    el("button", { type: "button", class: "example", onclick: () => example(text, extra) }, el("strong", {}, title), el("span", { class: "quote" }, `“${text}”`), el("span", { class: "soft" }, note)));
  const name = plain(server?.model, 60);
  return el("section", { class: "welcome", "aria-labelledby": "welcome" },
    el("h2", { id: "welcome" }, "A model that remembers"),
    el("p", {}, about()),
    el("p", { class: "soft" }, "Three things to try", name ? [" with ", isolated(name)] : null, ":"),
    el("div", { class: "examples" }, ...cards));
}

function about() {
  if (typeof server?.about === "string" && server.about) return plain(server.about, 1000);
  const until = Number.isFinite(server?.ttl) ? `until you delete it, or do not use it for ${plural(Math.max(1, Math.round(server.ttl / 86400)), "day")}` : "until you delete it";
  if (server?.has_memory === false) return `A session keeps the state of the model on this server, ${until}. This model has no memory beside its attention.`;
  return `A session is a memory that learns while it reads. What you write is read once, and the state is kept on this server ${until}. Come back another day and go on: earlier turns are not read again.`;
}

function example(text, { compare, inspect }) {
  if (!$("compare").disabled) $("compare").checked = Boolean(compare);
  shown.draft = text;
  if (inspect) actions.onInspect(true);
  setDraft(text, true);
}

// A button for the turns that are too far back to be on the page.
function earlier(conversation) {
  const hidden = conversation.turns.length - conversation.drawn;
  if (hidden <= 0) return [];
  const more = () => {
    const scroll = $("scroll"), below = scroll.scrollHeight - scroll.scrollTop;
    conversation.drawn += TURNS_DRAWN;
    show(conversation);
    scroll.scrollTop = scroll.scrollHeight - below;
  };
  return [el("button", { type: "button", class: "button earlier", onclick: more }, `Show ${plural(Math.min(hidden, TURNS_DRAWN), "earlier turn")}`)];
}

function turnElement(turn) {
  const box = el("article", { class: "turn" });
  nodes.set(turn, box);
  fill(turn, box);
  return box;
}

function fill(turn, box) {
  const content = [];
  if (turn.system !== null) content.push(el("div", { class: "system" }, el("span", { class: "who" }, "System prompt"), ...elements(turn.system)));
  if (turn.user !== null) content.push(el("div", { class: "user" }, el("h3", { class: "hidden" }, "You"), el("div", { class: "prose", dir: "auto" }, turn.user)));
  if (turn.answer && turn.other) content.push(el("div", { class: "pair" }, answerElement(turn, turn.answer, "With memory"), answerElement(turn, turn.other, "Memory off")));
  else if (turn.answer) content.push(answerElement(turn, turn.answer, null));
  box.replaceChildren(...content);
}

function answerElement(turn, answer, heading) {
  const isOther = answer === turn.other, writing = answer.state === "waiting" || answer.state === "streaming";
  const body = el("div", { class: "text" }, ...elements(answer.text));
  const last = body.lastElementChild;
  if (writing) (last?.matches(".prose") ? last : body).append(el("span", { class: answer.text ? "cursor" : "waiting", "aria-hidden": "true" }));
  const box = el("div", { class: `answer${heading ? " side" : ""}${isOther ? " other" : ""}`, "aria-busy": String(writing) },
    heading ? el("h3", { class: "who" }, heading) : el("h3", { class: "hidden" }, "Answer"), body);
  if (answer.state === "done" && !answer.text) body.append(el("p", { class: "soft" }, "The model ended its answer without a word."));
  if (answer.error) box.append(problem(answer.error, "Try again", () => actions.onRetry(turn, isOther)));
  if (!writing) box.append(el("div", { class: "below" }, el("p", { class: "soft facts-line" }, facts(turn, answer, isOther)), buttons(turn, answer, isOther)));
  return box;
}

function facts(turn, answer, isOther) {
  const found = [];
  if (isOther) found.push("From this message alone, with an empty memory; nothing of it is kept");
  else if (turn.kept && answer.state === "stopped") found.push("Stopped; the session keeps this part");
  else if (answer.state === "stopped") found.push("Stopped; the session keeps nothing of this turn");
  else if (answer.state === "done" && !turn.kept) found.push(turn.memory === "read" ? "Memory read, not written: the session does not keep this turn" : "Memory off: the session does not keep this turn");
  if (isOther && answer.state === "stopped") found.push("stopped");
  if (answer.usage) {
    const seconds = (answer.ended - answer.began) / 1000, rate = answer.usage.completion_tokens / Math.max(1e-3, (answer.ended - (answer.first || answer.began)) / 1000);
    found.push(`${plural(answer.usage.completion_tokens, "token")} in ${number(seconds, 2)} s${answer.usage.completion_tokens > 4 ? `, ${number(rate, 3)} per second` : ""}`);
  }
  if (answer.finish === "length") found.push("ended at the longest answer (see Settings)");
  if (answer.note) found.push(`read again: ${plain(answer.note, 300)}`);
  return found.join(" · ");
}

function buttons(turn, answer, isOther) {
  const box = el("div", { class: "turn-buttons" });
  const isLast = !isOther && turn === shown?.last && answer.state !== "failed" && server?.has_memory !== false;
  if (isLast) box.append(el("button", { type: "button", class: "text-button", onclick: () => actions.onInspect(true) }, icon("inspect"), "Inspect"));
  if (answer.text) box.append(el("button", { type: "button", class: "text-button", "aria-label": "Copy the answer", onclick: () => copy(answer.text) }, icon("copy"), "Copy"));
  return box;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    toast("Copied.");
  } catch {
    toast("The browser does not allow copying here: select the text instead.");
  }
}

export function problem(error, label, again) {
  const box = el("div", { class: "problem", role: "alert" }, el("p", { dir: "auto" }, sentence(error.message)));
  if (again) box.append(el("button", { type: "button", class: "button", onclick: again }, label));
  return box;
}

// An error that belongs to no answer: above the composer, until it is closed or tried again.
export function alertError(error, again) {
  const close = () => box.remove(), box = problem(error, "Try again", again && (() => { close(); again(); }));
  box.append(el("button", { type: "button", class: "icon-button", "aria-label": "Close this message", onclick: close }, icon("close")));
  $("alerts").replaceChildren(box);
}

export const clearAlerts = () => $("alerts").replaceChildren();

// ---- changes

export function changed(turn, what) {
  if (what === "turns") {
    pending.clear();
    show(shown);
    if (shown.busy) announce("The answer is being written.");
    return;
  }
  if (what === "end") {
    const at = shown.turns.indexOf(turn);
    for (const near of shown.turns.slice(Math.max(0, at - 1))) if (nodes.has(near)) keepPlace(() => fill(near, nodes.get(near)));
    heading();
    controls();
    if (!shown.busy && turn.answer) announce(turn.answer.error ? sentence(turn.answer.error.message) : `Answer: ${turn.answer.text.slice(0, 3000)}`);
    return;
  }
  if (!pending.size) requestAnimationFrame(draw);
  pending.add(turn);
}

function draw() {
  for (const turn of pending) if (shown?.turns.includes(turn) && nodes.has(turn)) keepPlace(() => fill(turn, nodes.get(turn)));
  pending.clear();
}

// Stay at the end while an answer grows, unless the reader has scrolled up.
function keepPlace(change) {
  const box = $("scroll"), atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  change();
  if (atEnd) toEnd();
}

export function toEnd() {
  const box = $("scroll");
  box.scrollTop = box.scrollHeight;
}
