// Elements, icons and numbers. Text enters the page by textContent and text nodes alone.
const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

// el("p", {class: "soft", onclick: f, hidden: true}, "text", child): attributes that are null, undefined or false are left out.
export function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg"), use = document.createElementNS(SVG, "use");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

// Texts of users, models and files: isolated, so that marks of direction change nothing outside.
export const isolated = (text, attributes) => el("bdi", attributes, text);

export function plain(text, longest = 200) {
  const line = String(text ?? "").replace(/[\p{Cc}\u2028\u2029]+/gu, " ").replace(/[\u202a-\u202e\u2066-\u2069\u200e\u200f]/g, "").trim();
  const characters = Array.from(line);
  return characters.length > longest ? `${characters.slice(0, longest - 1).join("")}…` : line;
}

// A server's message as a sentence: "there is no turn" -> "There is no turn."
export function sentence(text, longest = 600) {
  const line = plain(text, longest);
  const begun = /^[a-z]+(?=[ ,])/.test(line) ? line[0].toUpperCase() + line.slice(1) : line;
  return /[.!?…:]$/.test(begun) ? begun : `${begun}.`;
}

export const count = (n) => (Number.isFinite(n) ? Math.round(n).toLocaleString("en-US") : "–");
export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

// 512 B, 53.8 kB, 1.9 MB: as the command line writes it.
export function bytes(n) {
  if (!Number.isFinite(n)) return "–";
  for (const [unit, factor] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (n >= factor) return `${(n / factor).toFixed(1)} ${unit}`;
  return `${Math.round(n)} B`;
}

export function number(x, digits = 4) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  const size = Math.abs(x);
  if (size >= 10000) return count(x);
  const text = size > 0 && size < 0.001 ? Number(x.toPrecision(3)).toExponential() : String(Number(x.toPrecision(digits)));
  return text.replace("-", "−");
}

// seconds since 1970 -> "now", "5 min ago", "3 h ago", "2 days ago", or a date.
export function ago(seconds) {
  if (!Number.isFinite(seconds)) return "";
  const past = Date.now() / 1000 - seconds;
  if (past < 60) return "now";
  if (past < 3600) return `${Math.floor(past / 60)} min ago`;
  if (past < 86400) return `${Math.floor(past / 3600)} h ago`;
  if (past < 7 * 86400) return plural(Math.floor(past / 86400), "day") + " ago";
  return new Date(seconds * 1000).toLocaleDateString();
}

export const date = (seconds) => (Number.isFinite(seconds) ? new Date(seconds * 1000).toLocaleString() : "unknown");

let announced = 0;
// Text for screen readers.
export function announce(text) {
  const live = $("live"), mine = ++announced;
  live.textContent = "";
  setTimeout(() => { if (mine === announced) live.textContent = text; }, 50);
}

let toastTimer = 0;
export function toast(text) {
  const box = $("toast");
  box.textContent = text;
  box.classList.add("shown");
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => { box.classList.remove("shown"); toastTimer = setTimeout(() => { box.textContent = ""; }, 300); }, 3500);
}

// Storage may be blocked or full: a choice then lasts as long as the page.
export function remember(storage, key, value) {
  try {
    if (value === null) storage.removeItem(key);
    else storage.setItem(key, value);
  } catch { /* nothing is kept */ }
}

export function remembered(storage, key) {
  try { return storage.getItem(key); } catch { return null; }
}
