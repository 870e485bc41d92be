// The page: one conversation on the screen, those that were opened before in memory, the address after # naming the session.
import { $, bytes, count, plain, remember, remembered, toast } from "./dom.js";
import * as api from "./api.js";
import * as chat from "./chat.js";
import * as inspector from "./inspector.js";
import * as sessions from "./sessions.js";
import { askKey, askSettings } from "./dialogs.js";
import { Conversation, sampling } from "./conversation.js";

const SETTINGS = "mnemos-settings", THEME = "mnemos-theme";
const opened = new Map(); // id -> Conversation
const narrow = matchMedia("(max-width: 800px)"), dark = matchMedia("(prefers-color-scheme: dark)");
let shown = null, server = {}, waitsForTrace = false;

// ---- conversations

function conversation(id, info) {
  if (!opened.has(id)) opened.set(id, prepared(new Conversation(info ?? { id }, onChanged)));
  return opened.get(id);
}

function prepared(fresh) {
  fresh.model = server.model;
  return fresh;
}

function onChanged(changed, turn, what) {
  if (what !== "text") sessions.draw();
  if (changed === shown) chat.changed(turn, what);
}

function display(next) {
  if (shown && shown !== next) chat.clearAlerts();
  shown = next;
  mark(next);
  chat.show(next);
  inspector.load(next.info && next.turns.length && !next.busy ? next.id : null);
  closeDrawer();
}

// A session that nothing was written to has no name yet.
function mark(conversation) {
  const id = conversation.info || conversation.busy ? conversation.id : null;
  setAddress(id ?? "");
  sessions.select(id);
}

function begin() {
  const unused = shown && !shown.info && !shown.turns.length ? shown : prepared(new Conversation(null, onChanged));
  display(unused);
  if (!narrow.matches) $("message").focus();
}

async function openSession(id, info) {
  const next = conversation(id, info);
  display(next);
  if (next.busy) return;
  try {
    await next.load();
    if (shown === next) display(next);
  } catch (wrong) {
    if (wrong.status === 404) {
      opened.delete(id);
      refreshList();
    }
  }
}

async function send(text, options) {
  const mine = shown, isNew = !mine.info;
  chat.clearAlerts();
  if (isNew) opened.set(mine.id, mine);
  const turn = mine.send(text, options);
  mark(mine);
  await turn;
  await afterTurn(mine);
}

async function afterTurn(mine) {
  await refreshList();
  const listed = sessions.find(mine.id);
  if (listed) mine.measure(listed);
  else if (!mine.turns.some((turn) => turn.kept)) mine.info = null; // nothing was written, so there is no session yet
  if (shown !== mine) return;
  mark(mine);
  chat.heading();
  chat.controls();
  if (waitsForTrace || inspector.isOpen()) inspector.load(mine.info ? mine.id : null);
  waitsForTrace = false;
}

async function retry(turn, isOther) {
  const mine = shown;
  if (isOther ? mine.otherAbort : mine.abort) return;
  const work = isOther ? mine.compare(turn) : mine.answer(turn);
  chat.changed(turn, "end");
  await work;
  await afterTurn(mine);
}

async function undo() {
  const mine = shown;
  if (!mine.canUndo) return;
  $("undo").disabled = true;
  try {
    const text = await mine.undo();
    if (!$("message").value && shown === mine) chat.setDraft(text ?? "", true);
    toast("The last turn is taken back.");
    await afterTurn(mine);
  } catch (wrong) {
    chat.alertError(wrong, wrong.status === 409 ? null : undo);
  } finally {
    if (shown === mine) chat.controls();
  }
}

async function refreshList() {
  try {
    await sessions.refresh();
  } catch (wrong) {
    chat.alertError(wrong, refreshList);
  }
}

function setAddress(id) {
  const hash = id ? `#${encodeURIComponent(id)}` : "";
  if (location.hash !== hash) history.pushState(null, "", hash || location.pathname + location.search);
}

function addressed() {
  try { return decodeURIComponent(location.hash.slice(1)); } catch { return ""; }
}

function followAddress() {
  const id = addressed();
  if (id && id !== shown?.id) openSession(id, sessions.find(id));
  else if (!id && shown?.info) begin();
}

// ---- drawer, theme, settings

function openDrawer() {
  $("sidebar").classList.add("open");
  $("backdrop").hidden = false;
  drawerState();
  $("drawer-close").focus();
}

function closeDrawer() {
  const was = $("sidebar").classList.contains("open");
  $("sidebar").classList.remove("open");
  $("backdrop").hidden = true;
  drawerState();
  if (was) $("drawer-open").focus();
}

// What cannot be seen cannot be reached by the keyboard.
function drawerState() {
  const open = $("sidebar").classList.contains("open");
  $("sidebar").inert = narrow.matches && !open;
  $("main").inert = $("skip").inert = narrow.matches && open;
  $("drawer-open").setAttribute("aria-expanded", String(open));
}

const theme = () => remembered(localStorage, THEME) ?? document.documentElement.dataset.theme ?? "system";
const isDark = () => (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";

function setTheme(value) {
  if (value === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = value;
  remember(localStorage, THEME, value === "system" ? null : value);
  themeButton();
}

function themeButton() {
  $("theme").setAttribute("aria-pressed", String(isDark()));
}

async function settings() {
  const { temperature, maxTokens } = sampling, most = server.limits?.max_tokens ?? 4096;
  const about = [["model", plain(server.model) || "–"], ["parameters", count(server.parameters)], ["memory", server.has_memory === false ? "none" : "yes"],
    ["attention window", server.context?.window ? `${count(server.context.window)} tokens` : "the whole context"], ["longest prompt", `${count(server.limits?.prompt_tokens)} tokens`], ["largest file", bytes(server.limits?.import_bytes ?? server.limits?.body_bytes)], ["version", plain(server.version) || "–"]];
  const onKey = async () => {
    const given = await askKey(false);
    if (!given) return;
    api.setKey(given);
    location.reload();
  };
  const chosen = await askSettings({ temperature, maxTokens, most, theme: theme(), about, onKey, hasKey: api.hasKey() });
  if (!chosen) return;
  Object.assign(sampling, { temperature: chosen.temperature, maxTokens: chosen.maxTokens });
  remember(localStorage, SETTINGS, JSON.stringify(sampling));
  setTheme(chosen.theme);
}

function restoreSettings() {
  try {
    const found = JSON.parse(remembered(localStorage, SETTINGS) ?? "{}");
    if (found.temperature >= 0 && found.temperature <= 2) sampling.temperature = Number(found.temperature);
    if (Number.isInteger(found.maxTokens) && found.maxTokens >= 1) sampling.maxTokens = found.maxTokens;
  } catch { /* settings of another version */ }
  sampling.maxTokens = Math.min(sampling.maxTokens, server.limits?.max_tokens ?? sampling.maxTokens);
}

function inspect(open) {
  if (!open && inspector.isOpen()) return inspector.close();
  inspector.open(shown?.turns.length > 0);
  if (shown?.info && shown.turns.length && !shown.busy) inspector.load(shown.id);
  else waitsForTrace = true;
}

// ---- start

async function start() {
  api.onKeyNeeded(askKey);
  themeButton();
  dark.addEventListener("change", themeButton);
  narrow.addEventListener("change", closeDrawer);
  drawerState();
  chat.setUp({ onSend: send, onStop: () => shown.stop(), onRetry: retry, onInspect: inspect, onReload: () => openSession(shown.id, shown.info) });
  inspector.setUp(() => { waitsForTrace = false; });
  sessions.setUp({
    onOpen: openSession,
    onChanged: (changed) => { opened.get(changed.id)?.measure(changed); if (shown?.id === changed.id) chat.heading(); },
    onForked: (copied) => openSession(copied.id, copied),
    onDeleted: (id) => { opened.get(id)?.stop(); opened.delete(id); if (shown?.id === id) begin(); },
    onError: chat.alertError,
    running: () => [...opened.values()].filter((c) => c.busy).map((c) => ({ title: c.turns.find((turn) => turn.user)?.user, ...c.info, id: c.id })),
  });
  $("new-session").addEventListener("click", begin);
  $("undo").addEventListener("click", undo);
  $("inspect").addEventListener("click", () => inspect(false));
  $("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
  $("settings").addEventListener("click", settings);
  $("drawer-open").addEventListener("click", openDrawer);
  $("drawer-close").addEventListener("click", closeDrawer);
  $("backdrop").addEventListener("click", closeDrawer);
  $("sidebar").addEventListener("keydown", (event) => { if (event.key === "Escape" && narrow.matches) closeDrawer(); });
  $("skip").addEventListener("click", (event) => { event.preventDefault(); $("message").focus(); });
  addEventListener("popstate", followAddress);
  addEventListener("hashchange", followAddress);
  document.addEventListener("visibilitychange", () => { if (!document.hidden && server.model && !shown?.busy) sessions.refresh().catch(() => {}); });
  await connect();
}

async function connect() {
  try {
    server = await api.info();
  } catch (wrong) {
    $("conversation").replaceChildren(chat.problem(wrong, "Try again", connect));
    return;
  }
  $("model-name").textContent = plain(server.model);
  $("model-name").title = plain(server.model);
  chat.setServer(server);
  sessions.setServer(server);
  restoreSettings();
  await refreshList();
  const id = addressed();
  if (id) await openSession(id, sessions.find(id));
  else begin();
}

start();
