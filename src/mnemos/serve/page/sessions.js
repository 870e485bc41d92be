// The list of sessions, its search, and the menu of one session.
import { $, ago, bytes, count, date, el, icon, plain, plural, toast } from "./dom.js";
import * as api from "./api.js";
import { askText, confirmed } from "./dialogs.js";

const MOST_ROWS = 200; // more sessions than this are found by searching
let actions = {}; // onOpen(id, session), onChanged(session), onForked(session), onDeleted(id), onError(error, again), running() -> sessions
let list = [];
let current = null;
let limits = {};
let quota = {};
let stale = null; // why the list could not be read

export function setUp(given) {
  actions = given;
  $("search").addEventListener("input", draw);
  $("more").addEventListener("click", () => { const session = find(current); if (session) openMenu(session, $("more")); });
  $("import").addEventListener("click", () => $("import-file").click());
  $("import-file").addEventListener("change", importFile);
  $("menu").addEventListener("keydown", moveInMenu);
  $("menu").addEventListener("toggle", (event) => { if (event.newState === "closed") $("menu").opener?.setAttribute("aria-expanded", "false"); });
}

export function setServer(info) {
  limits = info.limits ?? {};
  quota = info.quota ?? {};
}

export const find = (id) => list.find((session) => session.id === id) ?? null;
export const newest = () => list[0] ?? null;

export function select(id) {
  current = id;
  draw();
}

export async function refresh() {
  try {
    list = await api.sessions();
    stale = null;
  } catch (wrong) {
    stale = wrong;
    throw wrong;
  } finally {
    draw();
  }
}

const name = (session) => plain(session.title) || session.id;

export function draw() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const running = actions.running(), ids = new Set(running.map((session) => session.id));
  const begun = running.filter((session) => !find(session.id)); // the server lists them when their first turn has ended
  const found = [...begun, ...list].filter((session) => words.every((word) => `${plain(session.title)} ${session.id}`.toLowerCase().includes(word)));
  const focused = document.activeElement?.closest?.("#sessions li")?.session, onMenu = document.activeElement?.classList.contains("row-menu");
  $("sessions").replaceChildren(...found.slice(0, MOST_ROWS).map((session) => row(session, ids.has(session.id), begun.includes(session))));
  if (focused) [...$("sessions").children].find((li) => li.session === focused)?.querySelector(onMenu ? ".row-menu" : ".row-open").focus();
  $("sessions-note").textContent = stale ? "The list could not be read." : !list.length && !begun.length ? "No sessions yet: the first message begins one." : !found.length ? "No session matches." : found.length > MOST_ROWS ? `The newest ${count(MOST_ROWS)} of ${plural(found.length, "session")} are shown: search finds the others.` : words.length ? `${plural(found.length, "session")} found` : "";
  const bytesKept = list.reduce((sum, session) => sum + (session.state_bytes || 0), 0);
  const of = (most, text) => (Number.isFinite(most) ? ` of ${text(most)}` : "");
  $("quota").textContent = list.length ? `${count(list.length)}${of(quota.sessions, count)} ${list.length === 1 && !Number.isFinite(quota.sessions) ? "session" : "sessions"}, ${bytes(bytesKept)}${of(quota.bytes, bytes)}` : "";
}

function row(session, busy, isNew) {
  const isCurrent = session.id === current;
  const facts = [isNew ? "" : plural(session.tokens_read, "token"), isNew ? "" : bytes(session.state_bytes), busy ? "writing …" : ago(session.updated)].filter(Boolean).join(" · ");
  const title = `${name(session)}\n${session.id}\nbegun ${date(session.created)}${Number.isFinite(session.expires) ? `\ndeleted after ${date(session.expires)} if it is not used` : ""}`;
  const opener = el("button", { type: "button", class: "row-menu icon-button", "aria-label": `Menu of ${name(session)}`, "aria-haspopup": "menu", "aria-expanded": "false", onclick: (event) => openMenu(session, event.currentTarget) }, icon("more"));
  const li = el("li", { class: isCurrent ? "current" : null },
    el("button", { type: "button", class: "row-open", title, "aria-current": isCurrent ? "true" : null, onclick: () => actions.onOpen(session.id, session) }, el("span", { class: "clip", dir: "auto" }, name(session)), el("span", { class: "soft clip" }, facts)),
    isNew ? null : opener);
  li.session = session.id;
  return li;
}

// ---- the menu

function openMenu(session, opener) {
  const menu = $("menu");
  const entry = (picture, text, act, danger) => el("button", { type: "button", role: "menuitem", class: danger ? "danger" : null, tabindex: -1, onclick: () => { menu.hidePopover(); opener.focus(); act(session); } }, icon(picture), text);
  menu.replaceChildren(entry("rename", "Rename", rename), entry("fork", "Fork", fork), entry("export", "Export", save), entry("delete", "Delete", remove, true));
  menu.setAttribute("aria-label", `Menu of ${name(session)}`);
  menu.opener = opener;
  opener.setAttribute("aria-expanded", "true");
  menu.showPopover();
  const by = opener.getBoundingClientRect(), size = menu.getBoundingClientRect();
  menu.style.left = `${Math.max(8, Math.min(by.right - size.width, innerWidth - size.width - 8))}px`;
  menu.style.top = `${by.bottom + size.height + 8 > innerHeight ? Math.max(8, by.top - size.height - 4) : by.bottom + 4}px`;
  menu.firstChild.focus();
}

function moveInMenu(event) {
  const items = [...$("menu").children], at = items.indexOf(document.activeElement);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
  if (event.key === "Escape" || event.key === "Tab") {
    event.preventDefault();
    $("menu").hidePopover();
    $("menu").opener?.focus();
  } else if (to !== undefined) {
    event.preventDefault();
    items[(to + items.length) % items.length].focus();
  }
}

// Run `work`; its error is shown, with a retry where the same request may succeed later.
async function guarded(work) {
  try {
    await work();
  } catch (wrong) {
    const isFinal = wrong.status >= 400 && wrong.status < 500 && ![401, 408, 409, 429].includes(wrong.status);
    actions.onError(wrong, isFinal ? null : () => guarded(work));
  }
}

async function rename(session) {
  const title = await askText("Rename the session", "Title", plain(session.title), "Rename");
  if (title === null || title === session.title) return;
  await guarded(async () => {
    const changed = await api.rename(session.id, title);
    list = list.map((other) => (other.id === session.id ? { ...other, ...changed } : other));
    draw();
    actions.onChanged(changed);
  });
}

const fork = (session) => guarded(async () => {
  let copied = await api.fork(session.id);
  if (plain(copied.title) === plain(session.title)) {
    try {
      copied = await api.rename(copied.id, plain(`Fork of ${name(session)}`, 120));
    } catch { /* the fork is there, under the title of its origin */ }
  }
  list = [copied, ...list.filter((other) => other.id !== copied.id)];
  draw();
  toast("Forked: this copy continues on its own.");
  actions.onForked(copied);
});

const save = (session) => guarded(async () => {
  const url = URL.createObjectURL(await api.exported(session.id));
  const link = el("a", { href: url, download: `${session.id}.safetensors` });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
  toast("Exported. The file holds the whole conversation.");
});

async function remove(session) {
  const text = [el("strong", { dir: "auto" }, el("bdi", {}, name(session))), ` with its ${plural(session.tokens_read, "token")} read is deleted from the server, and cannot be brought back.`];
  if (!(await confirmed("Delete this session?", text, "Delete"))) return;
  await guarded(async () => {
    try {
      await api.remove(session.id);
    } catch (wrong) {
      if (wrong.status !== 404) throw wrong;
    }
    list = list.filter((other) => other.id !== session.id);
    draw();
    toast("Deleted.");
    actions.onDeleted(session.id);
  });
}

// ---- import

async function importFile() {
  const file = $("import-file").files[0];
  $("import-file").value = "";
  if (!file) return;
  await guarded(async () => {
    const most = limits.import_bytes ?? limits.body_bytes;
    if (Number.isFinite(most) && file.size > most) throw new api.ApiError(`The file has ${bytes(file.size)}, but this server accepts at most ${bytes(most)}.`, 413);
    const added = await firstFree(validName(file.name), (id) => api.imported(id, file));
    list = [added, ...list.filter((other) => other.id !== added.id)];
    draw();
    toast("Imported.");
    actions.onForked(added);
  });
}

// The file's name in the characters that a session's name may have.
function validName(fileName) {
  return fileName.replace(/\.safetensors$/i, "").replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[.-]+|-+$/g, "").slice(0, 100) || "imported";
}

async function firstFree(base, make) {
  for (let i = 1; ; i++) {
    const id = i === 1 ? base : `${base}-${i}`;
    if (find(id)) continue;
    try {
      return await make(id);
    } catch (wrong) {
      if (wrong.status !== 409 || i > 20) throw wrong;
    }
  }
}
