// Line charts as SVG. Names and units stand outside the drawing, as text that wraps; inside are only ticks, which have room.
const SVG = "http://www.w3.org/2000/svg";
function svg(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function colour(i, count) {
  if (count <= 8) return `var(--c${i})`;
  return `hsl(${215 - (195 * i) / (count - 1)} 70% 50%)`;
}

function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * unit).find((s) => s >= raw) || 10 * unit;
  const found = [];
  for (let x = Math.ceil(low / step - 1e-9) * step; x <= high + step * 1e-9; x += step) found.push(Math.abs(x) < step * 1e-9 ? 0 : x);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let e = Math.floor(low); e <= Math.ceil(high); e++) if (e >= low - 1e-9 && e <= high + 1e-9) found.push(e);
  const thin = Math.ceil(found.length / 6) || 1;
  return found.filter((_, i) => i % thin === 0);
}

// Labels of ticks with as many digits as tell them apart: 11.38, 11.385, 11.39.
function tickTexts(values) {
  const steps = values.slice(1).map((x, i) => Math.abs(x - values[i]));
  const step = steps.reduce((a, b) => Math.min(a, b), Infinity);
  let digits = 4;
  while (digits < 12 && values.some((x) => Math.abs(Number(x.toPrecision(digits)) - x) > 0.01 * step)) digits++;
  return values.map((x) => (Math.abs(x) >= 1e6 ? `${fmt(x / 1e6, digits)}M` : Math.abs(x) >= 10000 ? `${fmt(x / 1000, digits)}k` : fmt(x, digits)));
}

// spec: {title, unit, xName, log, height, series: [{name, x, y, colour, faint, dash, dots}]}; y may hold null and NaN.
function chart(spec) {
  const host = el("figure", { class: "card chart", style: "margin:0" });
  const unit = spec.unit ? el("span", { class: "unit" }, ` ${spec.unit}`) : null;
  host.append(el("figcaption", {}, el("h3", {}, spec.title, unit), spec.note ? el("p", { class: "soft" }, spec.note) : null));
  const fits = (y) => y !== null && Number.isFinite(y) && (!spec.log || y > 0);
  const series = spec.series.map((s, i) => ({ colour: colour(i, spec.series.length), ...s, y: Array.from(s.y, (y) => (fits(y) ? y : null)) }));
  const drawn = series.filter((s) => s.y.some((y) => y !== null));
  if (!drawn.length) {
    host.append(el("div", { class: "empty" }, "no numbers"));
    return host;
  }
  if (drawn.length > 1 || drawn[0].name) {
    const keys = el("div", { class: "keys" });
    for (const s of drawn) {
      if (!s.name) continue;
      const line = svg("svg", { viewBox: "0 0 22 8", "aria-hidden": "true" });
      line.append(svg("line", { x1: 0, y1: 4, x2: 22, y2: 4, stroke: s.colour, "stroke-width": s.faint ? 1.5 : 3, "stroke-dasharray": s.dash ? "5 3" : "none", opacity: s.faint ? 0.6 : 1 }));
      keys.append(el("span", {}, line, s.name));
    }
    host.append(keys);
  }
  const place = el("div", { class: "place" });
  host.append(place);
  let width = 0;
  new ResizeObserver(() => requestAnimationFrame(() => {
    const now = Math.floor(place.clientWidth);
    if (now > 40 && now !== width) {
      width = now;
      place.replaceChildren(draw(spec, drawn, width));
    }
  })).observe(place);
  return host;
}

function draw(spec, series, width) {
  const height = spec.height || 210;
  const at = (y) => (spec.log ? Math.log10(y) : y);
  const xs = series.flatMap((s) => Array.from(s.x));
  const ys = series.flatMap((s) => s.y.filter((y) => y !== null).map(at));
  let [x0, x1] = [xs.reduce((a, b) => Math.min(a, b)), xs.reduce((a, b) => Math.max(a, b))];
  let [y0, y1] = [ys.reduce((a, b) => Math.min(a, b)), ys.reduce((a, b) => Math.max(a, b))];
  if (spec.zero && y0 > 0) y0 = 0;
  if (x1 === x0) [x0, x1] = [x0 - 1, x1 + 1];
  const roomY = y1 - y0 > 1e-9 * Math.max(1, Math.abs(y1)) ? 0.06 * (y1 - y0) : 0.5 * Math.max(1e-6, Math.abs(y1) * 0.2 || 1);
  [y0, y1] = [y0 - (spec.zero && y0 === 0 ? 0 : roomY), y1 + roomY];
  let yTicks = spec.log ? logTicks(y0, y1) : ticks(y0, y1, 5);
  if (spec.log && yTicks.length < 2) yTicks = ticks(10 ** y0, 10 ** y1, 5).filter((y) => y > 0).map(Math.log10);
  const yTexts = tickTexts(yTicks.map((t) => (spec.log ? 10 ** t : t)));
  const left = 12 + 7.4 * Math.max(...yTexts.map((t) => t.length));
  const [right, top, bottom] = [14, 8, spec.xName ? 40 : 24];
  const X = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - right);
  const Y = (y) => top + (1 - (at(y) - y0) / (y1 - y0)) * (height - top - bottom);
  const figure = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": describe(spec, series) });
  yTicks.forEach((t, i) => {
    const y = top + (1 - (t - y0) / (y1 - y0)) * (height - top - bottom);
    figure.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: y, y2: y }));
    figure.append(svg("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, yTexts[i]));
  });
  const xTicks = ticks(x0, x1, Math.max(3, Math.floor((width - left) / 70))).filter((t) => !spec.whole || Number.isInteger(t));
  const xTexts = tickTexts(xTicks);
  for (const [i, t] of xTicks.entries()) {
    const text = xTexts[i], half = 3.7 * text.length;
    const x = Math.max(half, Math.min(X(t), width - half - 1));
    figure.append(svg("line", { class: "axis", x1: X(t), x2: X(t), y1: height - bottom, y2: height - bottom + 4 }));
    figure.append(svg("text", { x, y: height - bottom + 17, "text-anchor": "middle" }, text));
  }
  if (spec.xName) figure.append(svg("text", { x: (left + width - right) / 2, y: height - 5, "text-anchor": "middle" }, spec.xName));
  for (const s of series) lines(figure, s, X, Y);
  crosshair(figure, spec, series, X, { width, height, top, bottom, x0, x1, left, right });
  return figure;
}

function lines(figure, s, X, Y) {
  let path = "", pen = false, alone = [];
  s.y.forEach((y, i) => {
    if (y === null) { pen = false; return; }
    path += `${pen ? "L" : "M"}${X(s.x[i]).toFixed(1)} ${Y(y).toFixed(1)}`;
    if (!pen && (i + 1 >= s.y.length || s.y[i + 1] === null)) alone.push(i);
    pen = true;
  });
  figure.append(svg("path", { d: path, fill: "none", stroke: s.colour, "stroke-width": s.faint ? 1 : 2, opacity: s.faint ? 0.45 : 1, "stroke-linejoin": "round", "stroke-dasharray": s.dash ? "6 4" : "none" }));
  const dots = s.dots ? s.y.map((y, i) => (y === null ? -1 : i)).filter((i) => i >= 0) : alone;
  for (const i of dots) figure.append(svg("circle", { cx: X(s.x[i]), cy: Y(s.y[i]), r: 3, fill: s.colour }));
}

function crosshair(figure, spec, series, X, box) {
  const hair = svg("line", { class: "hair", y1: box.top, y2: box.height - box.bottom, visibility: "hidden" });
  figure.append(hair);
  const all = [...new Set(series.flatMap((s) => Array.from(s.x)))].sort((a, b) => a - b);
  let here = -1;
  const show = (i, clientX, clientY) => {
    here = Math.max(0, Math.min(all.length - 1, i));
    const x = all[here];
    hair.setAttribute("x1", X(x)); hair.setAttribute("x2", X(x)); hair.setAttribute("visibility", "visible");
    const shown = series.filter((s) => s.name !== undefined || series.length === 1).slice(0, 14);
    const text = shown.map((s) => {
      const k = Array.prototype.indexOf.call(s.x, x);
      return k < 0 || s.y[k] === null ? null : `${s.name || spec.title}: ${fmt(s.y[k])}`;
    }).filter(Boolean);
    const rect = figure.getBoundingClientRect();
    const scale = rect.width / box.width;
    showTip(clientX ?? rect.left + X(x) * scale, clientY ?? rect.top + box.top, `${spec.xName || "x"} ${fmt(x)}\n${text.join("\n")}`);
  };
  const nearest = (x) => {
    let low = 0, high = all.length - 1;
    while (high - low > 1) { const mid = (low + high) >> 1; if (all[mid] < x) low = mid; else high = mid; }
    return Math.abs(all[low] - x) <= Math.abs(all[high] - x) ? low : high;
  };
  figure.addEventListener("pointermove", (event) => {
    const rect = figure.getBoundingClientRect();
    const px = ((event.clientX - rect.left) / rect.width) * box.width;
    const x = box.x0 + ((px - box.left) / (box.width - box.left - box.right)) * (box.x1 - box.x0);
    show(nearest(x), event.clientX, event.clientY);
  });
  const leave = () => { hair.setAttribute("visibility", "hidden"); hideTip(); };
  figure.addEventListener("pointerleave", leave);
  figure.addEventListener("blur", leave);
  figure.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    show((here < 0 ? 0 : here) + move);
  });
}

function describe(spec, series) {
  const parts = series.slice(0, 8).map((s) => {
    const known = s.y.filter((y) => y !== null);
    return `${s.name || ""} from ${fmt(known[0])} to ${fmt(known[known.length - 1])}`;
  });
  return `${spec.title}${spec.unit ? " " + spec.unit : ""}: ${parts.join("; ")}`;
}
