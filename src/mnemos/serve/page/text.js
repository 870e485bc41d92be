// A message as elements: paragraphs of plain text, fenced code, `code` and **bold**. Everything else stays as it was written.
import { el } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([\w+#.-]{0,40})[^`\n]*$/;
const INLINE = /(`+)([^`\n]{1,2000}?)\1(?!`)|\*\*(?=\S)([^*\n]{1,2000}?)\*\*/g;

// Parts of a text: {code: true, language, text} or {code: false, text}.
export function parts(text) {
  const found = [], lines = text.split("\n");
  let plain = [], fence = null;
  const flush = () => { if (plain.length && plain.some((line) => line.trim())) found.push({ code: false, text: plain.join("\n").replace(/^\n+|\s+$/g, "") }); plain = []; };
  for (const line of lines) {
    const mark = FENCE.exec(line);
    if (fence) {
      if (mark && !mark[2] && mark[1][0] === fence.mark[0] && mark[1].length >= fence.mark.length) {
        found.push({ code: true, language: fence.language, text: fence.lines.join("\n") });
        fence = null;
      } else fence.lines.push(line);
    } else if (mark) {
      flush();
      fence = { mark: mark[1], language: mark[2], lines: [] };
    } else plain.push(line);
  }
  if (fence) found.push({ code: true, language: fence.language, text: fence.lines.join("\n") }); // still being written
  flush();
  return found;
}

function inline(text) {
  const found = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > end) found.push(text.slice(end, match.index));
    found.push(match[3] === undefined ? el("code", {}, match[2]) : el("strong", {}, match[3]));
    end = match.index + match[0].length;
  }
  if (end < text.length) found.push(text.slice(end));
  return found;
}

export function elements(text) {
  return parts(text).map((part) => {
    if (part.code) return el("pre", { tabindex: 0, "aria-label": part.language ? `Code, ${part.language}` : "Code", dir: "ltr" }, el("code", {}, part.text));
    return el("div", { class: "prose", dir: "auto" }, ...inline(part.text));
  });
}
