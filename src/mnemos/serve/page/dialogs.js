// Dialogs that return a promise: a confirmation, a text, an API key, the settings.
import { el, icon } from "./dom.js";

let dialogs = 0;

// Show a dialog; content: elements; the promise gives what `value` returns, or null if it was closed.
function show({ title, content, submit, danger, value, valid }) {
  return new Promise((done) => {
    const id = `dialog-${dialogs++}`, before = document.activeElement;
    const trouble = el("p", { class: "trouble", role: "alert" });
    const accept = submit ? el("button", { type: "submit", class: danger ? "button danger" : "button primary" }, submit) : null;
    const form = el("form", { autocomplete: "off", novalidate: true },
      el("div", { class: "dialog-head" }, el("h2", { id }, title), el("button", { type: "button", class: "icon-button", "aria-label": "Close", onclick: () => dialog.close() }, icon("close"))),
      ...content, trouble,
      submit ? el("div", { class: "dialog-buttons" }, el("button", { type: "button", class: "button", "data-first": danger, onclick: () => dialog.close() }, "Cancel"), accept) : null);
    const dialog = el("dialog", { "aria-labelledby": id }, form);
    let answer = null;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      trouble.textContent = valid?.() || "";
      if (trouble.textContent) return;
      answer = value();
      dialog.close();
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (before?.isConnected) before.focus();
      done(answer);
    });
    dialog.addEventListener("pointerdown", (event) => { if (event.target === dialog) dialog.close(); });
    document.body.append(dialog);
    dialog.showModal();
    (dialog.querySelector("[data-first]") ?? accept)?.focus();
    dialog.querySelector("input[data-first]")?.select();
  });
}

export async function confirmed(title, text, submit) {
  const answer = await show({ title, content: [el("p", {}, ...[text].flat())], submit, danger: true, value: () => true });
  return answer === true;
}

export function askText(title, name, before, submit, longest = 200) {
  const field = el("input", { type: "text", value: before, maxlength: longest, "data-first": true, dir: "auto" });
  return show({ title, content: [el("label", { class: "field" }, el("span", {}, name), field)], submit, value: () => field.value.trim(), valid: () => (field.value.trim() ? "" : `${name} is empty: write at least one character.`) });
}

export function askKey(refused) {
  const field = el("input", { type: "password", "data-first": true, autocomplete: "off", maxlength: 4096, spellcheck: "false" });
  const text = refused ? "The server refused this key: check it, or ask whoever runs the server." : "This server answers only with an API key.";
  const valid = () => (/^[\x21-\x7e]+$/.test(field.value.trim()) ? "" : "An API key consists of letters, digits and signs without spaces.");
  return show({
    title: "API key",
    content: [el("p", {}, text), el("label", { class: "field" }, el("span", {}, "API key"), field), el("p", { class: "soft" }, "The key is kept until this tab is closed, and is sent to this server alone.")],
    submit: "Continue",
    value: () => field.value.trim(),
    valid,
  });
}

// settings: {temperature, maxTokens, most, theme, about: [[name, value]], onKey}. Returns the new values, or null.
export function askSettings(settings) {
  const temperature = el("input", { type: "number", min: 0, max: 2, step: 0.1, value: settings.temperature, "data-first": true, inputmode: "decimal" });
  const tokens = el("input", { type: "number", min: 1, max: settings.most, step: 1, value: settings.maxTokens, inputmode: "numeric" });
  const theme = el("select", {}, ...[["system", "as the system"], ["light", "light"], ["dark", "dark"]].map(([value, text]) => el("option", { value, selected: value === settings.theme }, text)));
  const about = el("dl", { class: "facts" }, ...settings.about.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  const field = (name, note, input) => el("label", { class: "field" }, el("span", {}, name, el("small", { class: "soft" }, ` ${note}`)), input);
  const within = (input, low, high) => input.value !== "" && Number(input.value) >= low && Number(input.value) <= high;
  return show({
    title: "Settings",
    content: [
      field("Temperature", "0 takes the likeliest token", temperature),
      field("Longest answer", `in tokens, up to ${settings.most}`, tokens),
      field("Theme", "", theme),
      el("div", {}, el("button", { type: "button", class: "button", onclick: settings.onKey }, settings.hasKey ? "Change the API key" : "Set an API key")),
      el("h3", {}, "Server"), about,
    ],
    submit: "Save",
    value: () => ({ temperature: Number(temperature.value), maxTokens: Math.round(Number(tokens.value)), theme: theme.value }),
    valid: () => (!within(temperature, 0, 2) ? "Temperature must be from 0 to 2." : !within(tokens, 1, settings.most) ? `The longest answer must be from 1 to ${settings.most} tokens.` : ""),
  });
}
