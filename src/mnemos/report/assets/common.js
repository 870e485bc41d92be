// What both pages share: numbers, elements, choices, the tip that follows the pointer. Text enters the page by textContent alone.
const DATA = JSON.parse(document.getElementById("data").textContent);
const PAGE = document.getElementById("page");

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// {shape, f32 | i16}: base64 of little-endian numbers -> {shape, data}
function unpack(packed) {
  if (!packed) return null;
  if (!packed.data) {
    const bytes = Uint8Array.from(atob(packed.f32 || packed.i16 || ""), (c) => c.charCodeAt(0));
    packed.data = packed.i16 !== undefined ? new Int16Array(bytes.buffer) : new Float32Array(bytes.buffer);
  }
  return packed;
}

// Row i along the first axis; the mean over heads (row 0) if there is no row i.
function row(packed, i) {
  const whole = unpack(packed);
  if (!whole) return null;
  const width = whole.shape.slice(1).reduce((a, b) => a * b, 1);
  const at = i < whole.shape[0] ? i : 0;
  return whole.data.subarray(at * width, (at + 1) * width);
}

function fmt(x, digits = 4) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  const size = Math.abs(x);
  if (size >= 10000) return Math.round(x).toLocaleString("en-US");
  if (Number.isInteger(x)) return String(x);
  const text = size > 0 && size < 0.001 ? Number(x.toPrecision(Math.max(1, digits - 1))).toExponential() : String(Number(x.toPrecision(digits)));
  return text.replace("-", "−");
}

// Two decimals, so that numbers side by side can be compared.
const fixed = (x) => (x !== null && x < 1000 ? x.toFixed(2) : fmt(x));

const percent = (x) => (x === null || x === undefined ? "–" : `${fmt(100 * x, 3)} %`);

function select(name, options, value, change) {
  const box = el("select", { onchange: (event) => change(event.target.value) });
  for (const [key, text] of options) box.append(el("option", { value: key, selected: String(key) === String(value) }, text));
  return el("label", {}, el("span", {}, name), box);
}

let groups = 0;
function chips(name, options, value, change) {
  const group = `group-${groups++}`;
  const box = el("div", { class: "chips" });
  for (const [key, text, title] of options) {
    const input = el("input", { type: "radio", name: group, value: key, checked: String(key) === String(value), onchange: () => change(key) });
    box.append(el("label", { title }, input, el("span", {}, text)));
  }
  return el("fieldset", {}, el("legend", {}, name), box);
}

const TIP = el("div", { class: "tip", hidden: true, role: "status" });
document.body.append(TIP);
function showTip(x, y, text) {
  TIP.textContent = text;
  TIP.hidden = false;
  const box = TIP.getBoundingClientRect();
  TIP.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  TIP.style.top = `${y + 18 + box.height > innerHeight ? Math.max(8, y - box.height - 12) : y + 18}px`;
}
const hideTip = () => { TIP.hidden = true; };
addEventListener("scroll", hideTip, { passive: true });

function tile(name, value) {
  return el("div", { class: "tile" }, el("b", {}, value), el("span", {}, name));
}

function table(columns, rows) {
  const head = el("tr", {}, ...columns.map((name) => el("th", { scope: "col" }, name)));
  const body = rows.map((cells) => el("tr", {}, ...cells.map((cell, i) => el("td", { "data-name": columns[i] }, cell))));
  return el("table", { class: "wide" }, el("thead", {}, head), el("tbody", {}, ...body));
}
