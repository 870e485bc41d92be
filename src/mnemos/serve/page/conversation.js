// A conversation as this page knows it: what the session keeps, and answers beside it that are kept nowhere.
import * as api from "./api.js";

const SETTLE_TRIES = 8;
export const TURNS_DRAWN = 100;

export const sampling = { temperature: 0.7, maxTokens: 256 };

const newAnswer = (text = "", state = "waiting") => ({ text, state, error: null, usage: null, note: null, finish: null, began: 0, first: 0, ended: 0 });

// A turn: user text (null: none), answer (null: told without an answer), other: the answer without memory, memory: the mode it was sent
// with, kept: whether the session has it.
const newTurn = (fields) => ({ system: null, user: null, answer: null, other: null, memory: "write", kept: true, seed: null, ...fields });

export function newName() {
  const random = crypto.getRandomValues(new Uint32Array(1))[0].toString(36);
  return `chat-${new Date().toISOString().slice(0, 19).replace(/[-:]/g, "").replace("T", "-")}-${random}`;
}

function grouped(messages) {
  const turns = [];
  for (const { role, content } of Array.isArray(messages) ? messages : []) {
    const text = typeof content === "string" ? content : JSON.stringify(content ?? "");
    const last = turns[turns.length - 1];
    if (role === "system") turns.push(newTurn({ system: text }));
    else if (role === "user") turns.push(newTurn({ user: text }));
    else if (last && last.user !== null && !last.answer) last.answer = newAnswer(text, "done");
    else turns.push(newTurn({ answer: newAnswer(text, "done") }));
  }
  return turns;
}

function end(answer, wrong) {
  answer.state = !wrong ? "done" : wrong.name === "AbortError" ? "stopped" : "failed";
  answer.error = answer.state === "failed" ? wrong : null;
}

const same = (a, b) => a.system === b.system && a.user === b.user && (a.answer?.text ?? null) === (b.answer?.text ?? null);

export class Conversation {
  // info: a session of the server's list, or null for one that begins with its first turn.
  constructor(info, changed) {
    this.id = info ? info.id : newName();
    this.info = info;
    this.changed = changed; // (conversation, turn or null, what: "turns" | "text" | "end")
    this.turns = [];
    this.sizes = info?.tokens_read > 0 ? [info.state_bytes] : []; // bytes of the state after each turn seen here
    this.draft = "";
    this.drawn = TURNS_DRAWN; // the latest turns that are on the page
    this.failure = null; // why it could not be opened
    this.loaded = !info;
    this.abort = null;
    this.otherAbort = null;
  }

  get busy() {
    return Boolean(this.abort || this.otherAbort);
  }

  get last() {
    return this.turns[this.turns.length - 1] ?? null;
  }

  get canUndo() {
    return !this.busy && this.turns.some((turn) => turn.user !== null || turn.answer);
  }

  // Read the session from the server. What is known here alone stays, as long as it follows turns that the session still has.
  async load() {
    this.failure = null;
    try {
      const found = await api.open(this.id);
      this.adopt(found);
      return found;
    } catch (wrong) {
      this.failure = wrong;
      throw wrong;
    } finally {
      this.loaded = true;
      this.changed(this, null, "turns");
    }
  }

  adopt(found) {
    this.measure(found);
    const kept = grouped(found.messages), mine = this.turns.filter((turn) => turn.kept);
    if (!kept.every((turn, i) => mine[i] && same(turn, mine[i]))) {
      this.turns = kept;
      return;
    }
    if (mine.length > kept.length) this.turns = this.turns.slice(0, this.turns.indexOf(mine[kept.length]));
  }

  // What the server says about the session: its size, title and times.
  measure(info) {
    const before = this.info?.tokens_read;
    this.info = { ...this.info, ...info };
    delete this.info.messages;
    if (Number.isFinite(info.state_bytes) && info.tokens_read > 0 && info.tokens_read !== before) this.sizes.push(info.state_bytes);
  }

  send(text, { memory, compare }) {
    const turn = newTurn({ user: text, answer: newAnswer(), memory, kept: false, seed: crypto.getRandomValues(new Uint32Array(1))[0] >>> 1 });
    if (compare && memory !== "off") turn.other = newAnswer();
    this.turns.push(turn);
    const both = [this.answer(turn)];
    if (turn.other) both.push(this.compare(turn));
    this.changed(this, turn, "turns");
    return Promise.all(both);
  }

  options(turn) {
    return { model: this.model ?? "", temperature: sampling.temperature, max_tokens: sampling.maxTokens, seed: turn.seed };
  }

  // The answer of the session; also again, after a failure.
  async answer(turn) {
    turn.answer = newAnswer();
    this.abort = new AbortController();
    const request = { ...this.options(turn), messages: [{ role: "user", content: turn.user }], session: this.id, memory: turn.memory };
    const before = this.info?.tokens_read ?? 0;
    const answer = turn.answer;
    const wrong = await this.read(turn, answer, request, this.abort.signal, (state) => this.measure({ ...state, id: this.id }));
    turn.kept = turn.memory === "write" && (!wrong || (await this.keptPart(turn, wrong, before)));
    if (turn.kept && this.info.tokens_read < before) await this.load().catch(() => {}); // somebody else began the session anew
    end(answer, turn.kept && wrong ? new DOMException("", "AbortError") : wrong);
    this.abort = null;
    if (this.turns.includes(turn)) this.changed(this, turn, "end");
    return turn;
  }

  // The answer to this message alone, from an empty memory and outside every session: nothing can be written by it.
  async compare(turn) {
    turn.other = newAnswer();
    this.otherAbort = new AbortController();
    const system = this.turns.filter((t) => t.system !== null && t.kept).map((t) => ({ role: "system", content: t.system }));
    const request = { ...this.options(turn), messages: [...system, { role: "user", content: turn.user }] };
    end(turn.other, await this.read(turn, turn.other, request, this.otherAbort.signal, () => {}));
    this.otherAbort = null;
    if (this.turns.includes(turn)) this.changed(this, turn, "end");
  }

  stop() {
    this.abort?.abort();
    this.otherAbort?.abort();
  }

  // Returns the error that ended the answer, or null.
  async read(turn, answer, request, signal, onState) {
    answer.began = performance.now();
    try {
      for await (const chunk of api.complete(request, signal)) {
        const choice = chunk.choices?.[0], piece = choice?.delta?.content;
        if (typeof piece === "string" && piece) {
          answer.first ||= performance.now();
          answer.state = "streaming";
          answer.text += piece;
          this.changed(this, turn, "text");
        }
        if (choice?.finish_reason) answer.finish = choice.finish_reason;
        if (chunk.usage) answer.usage = chunk.usage;
        if (chunk.session) {
          answer.note = typeof chunk.session.cached === "string" ? chunk.session.cached : null;
          onState({ tokens_read: chunk.session.tokens_read, state_bytes: chunk.session.state_bytes });
        }
      }
      return null;
    } catch (wrong) {
      return wrong;
    } finally {
      answer.ended = performance.now();
    }
  }

  // Of an answer that did not reach its end: whether the session kept the part, once the server has noticed.
  async keptPart(turn, wrong, before) {
    if (wrong.status >= 400) return false; // refused before it began
    const was = this.turns.filter((t) => t.kept && t !== turn).length;
    for (let tries = 0; tries < SETTLE_TRIES; tries++) {
      await new Promise((done) => setTimeout(done, 60 * 2 ** tries));
      let found;
      try {
        found = await api.open(this.id);
      } catch (trouble) {
        if (trouble.status === 409) continue; // still busy with the turn
        return false; // there is no such session, or no server
      }
      const turns = grouped(found.messages), last = turns[turns.length - 1];
      if (turns.length > was && last.user === turn.user) {
        if (last.answer) turn.answer.text = last.answer.text;
        this.measure(found);
        return true;
      }
      if (tries >= 4 && found.tokens_read === before) return false;
    }
    return false;
  }

  // Take back the last turn. Returns the text that the user had written.
  async undo() {
    const last = this.last;
    if (last && !last.kept) { // the session never had it
      this.turns.pop();
      this.changed(this, null, "turns");
      return last.user;
    }
    const text = [...this.turns].reverse().find((turn) => turn.kept && turn.user !== null)?.user ?? "";
    await api.undo(this.id);
    this.adopt(await api.open(this.id));
    this.sizes = this.info.tokens_read > 0 ? [this.info.state_bytes] : [];
    this.changed(this, null, "turns");
    return text;
  }
}
