// What the page knows of the deck: every worker's row, what is said of those on screen, and how fresh all of it is.
// Promises: no event is missed or counted twice (ids grow by one without gaps; a stream is resumed after the last id
// seen); after every reconnection the rows are read anew; a hidden page holds no connection and asks nothing.
import { api, address, session } from './api.js';
import { cell } from './cell.js';
import { setServerTime } from './clock.js';
import { statusAfter, KINDS } from './fold.js';
import { keepStream } from './stream.js';

const CONFIRM_MS = 700;
const FULL_READ_MS = 30_000;
const GLANCE_MS = 3000;
const SPARK_SECONDS = 600;
const HIDDEN_MS = 20_000;

/** name → WorkerStatus. Touched, not replaced: a row's own object is replaced when it changes. */
export const workers = cell(new Map(), 120);
/** {phase: 'connecting'|'live'|'lost'|'asleep', since, retryAt} */
export const connection = cell({ phase: 'connecting', since: Date.now(), retryAt: null });
/** Facts of GET /deck; null until read. */
export const about = cell(null);
/** 'loading' | 'ready' | Problem */
export const loaded = cell('loading');
/** name → {at, cpu, rss}: short rings for the rows on screen. */
export const sparks = cell(new Map(), 120);
/** name → last log line of the rows on screen. */
export const lastLines = cell(new Map(), 120);

let stream = null;
let lastId = null;
let unconfirmed = new Set();
let onScreen = [];
let confirmTimer = 0;
let reading = null;
const listeners = new Set();

/** Hear every event once, in order; returns "unsubscribe". */
export function onEvent(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** The table tells which rows can be seen; only those are asked about in detail. */
export function showing(names) {
  const fresh = names.some((name) => !onScreen.includes(name));
  onScreen = names;
  if (fresh) {
    scheduleConfirm();
    glanceSoon();
  }
}

/** An answer to a verb is the newest truth about its worker. */
export function learn(status) {
  if (!status?.name) return;
  workers.value.set(status.name, status);
  unconfirmed.delete(status.name);
  workers.touch();
}

export function forget(name) {
  workers.value.delete(name);
  lastLines.value.delete(name);
  sparks.value.delete(name);
  workers.touch();
}

export async function open() {
  document.addEventListener('visibilitychange', sleepOrWake);
  setInterval(() => awake() && readAll(), FULL_READ_MS);
  setInterval(glance, GLANCE_MS);
  session.watch((state) => {
    if (state === 'in' && !stream) begin();
    if (state === 'out') end();
  });
  await begin();
}

export function retryNow() {
  if (stream) stream.retryNow();
  else begin();
}

export const readAll = () => (reading ??= readEverything().finally(() => { reading = null; }));

let beginning = false;
async function begin() {
  if (stream || beginning) return;
  beginning = true;
  try {
    await readAll();
  } finally {
    beginning = false;
  }
  if (stream || session.value === 'out') return;
  if (lastId === null) {
    setTimeout(begin, 1500);
    setConnection({ phase: 'lost', retryAt: Date.now() + 1500 });
    return;
  }
  stream = keepStream({
    address: () => address.events(lastId),
    names: KINDS,
    onMessage: (message) => take(JSON.parse(message.data)),
    onState: streamChanged,
  });
}

function end() {
  stream?.close();
  stream = null;
}

let wasLost = false;
function streamChanged({ phase, retryAt }) {
  if (phase === 'lost') {
    wasLost = true;
    // A stream's failure has no reason; an ordinary request has: 401 leads to the login form.
    api.deck().then(setAbout, () => {});
  }
  if (phase === 'live' && wasLost) {
    wasLost = false;
    readAll();
  }
  // While lost, each attempt passes through 'connecting'; the reader sees one unbroken "not connected".
  if (phase === 'connecting' && connection.value.phase === 'lost') return;
  setConnection({ phase, retryAt });
}

function setConnection({ phase, retryAt }) {
  const before = connection.value;
  connection.set({ phase, retryAt, since: before.phase === phase ? before.since : Date.now() });
}

function setAbout(deck) {
  about.set(deck);
  if (deck.now) setServerTime(deck.now);
}

async function readEverything() {
  // What becomes doubtful while the answer is on its way stays so: the answer may be older than the event.
  const doubtful = unconfirmed;
  unconfirmed = new Set();
  try {
    const deck = await api.deck();
    // The id is read before the rows: an event between the two is then folded again, never skipped.
    lastId ??= deck.last_event_id;
    setAbout(deck);
    const rows = new Map();
    let cursor;
    do {
      const page = await api.workers({ limit: 5000, cursor });
      for (const status of page.workers) rows.set(status.name, status);
      cursor = page.next;
    } while (cursor);
    workers.set(rows);
    loaded.set('ready');
    if (connection.value.phase === 'lost' && !stream) setConnection({ phase: 'connecting', retryAt: null });
    glanceSoon();
    if (unconfirmed.size) scheduleConfirm();
  } catch (problem) {
    for (const name of doubtful) unconfirmed.add(name);
    if (loaded.value !== 'ready') loaded.set(problem);
    if (!stream && problem.status !== 401) setConnection({ phase: 'lost', retryAt: null });
  }
}

function take(event) {
  if (event.id <= lastId) return; // resumed a little too early: seen already
  lastId = event.id;
  if (event.worker !== null && event.worker !== undefined) {
    const status = workers.value.get(event.worker);
    if (status) {
      workers.value.set(event.worker, statusAfter(status, event));
      workers.touch();
    }
    unconfirmed.add(event.worker);
    scheduleConfirm();
  }
  for (const listener of [...listeners]) listener(event);
}

function scheduleConfirm() {
  confirmTimer ||= setTimeout(confirm, CONFIRM_MS);
}

/** Ask for the truth about rows that were forecast: those on screen and those not known yet. */
async function confirm() {
  confirmTimer = 0;
  if (!awake()) return;
  const seen = new Set(onScreen);
  const names = [...unconfirmed].filter((name) => seen.has(name) || !workers.value.has(name)).slice(0, 100);
  if (!names.length) return;
  for (const name of names) unconfirmed.delete(name);
  try {
    const page = await api.workers({ names: names.join(',') });
    const answered = new Map(page.workers.map((status) => [status.name, status]));
    for (const name of names) {
      if (unconfirmed.has(name)) continue; // a newer event came meanwhile
      const status = answered.get(name);
      if (status) workers.value.set(name, status);
      else workers.value.delete(name);
    }
    workers.touch();
  } catch {
    for (const name of names) unconfirmed.add(name);
  }
  if (unconfirmed.size) scheduleConfirm();
}

let glancing = false;
let glanceTimer = 0;
function glanceSoon() {
  glanceTimer ||= setTimeout(() => { glanceTimer = 0; glance(); }, 60);
}

/** Sparklines and last lines of the rows on screen. */
async function glance() {
  if (glancing || !awake() || connection.value.phase === 'lost' || session.value !== 'in') return;
  const names = onScreen.filter((name) => workers.value.has(name));
  if (!names.length) return;
  glancing = true;
  try {
    const [samples, lines] = await Promise.all([
      api.samples(names, { points: 60, since: Math.floor(Date.now() / 1000) - SPARK_SECONDS }),
      api.lastLines(names),
    ]);
    for (const [name, ring] of Object.entries(samples)) {
      sparks.value.set(name, ring);
      const status = workers.value.get(name);
      if (status && status.pid && ring.at?.length) {
        workers.value.set(name, { ...status, cpu_percent: ring.cpu.at(-1), rss_bytes: ring.rss.at(-1) });
      }
    }
    for (const [name, line] of Object.entries(lines)) lastLines.value.set(name, line);
    sparks.touch();
    lastLines.touch();
    workers.touch();
  } catch {
    // The stream tells whether we are connected; a missed glance is made up by the next.
  } finally {
    glancing = false;
  }
}

const awake = () => document.visibilityState === 'visible' && connection.value.phase !== 'asleep';

let sleepTimer = 0;
// A browser allows six connections per host over HTTP/1.1: forgotten tabs must not use them up.
function sleepOrWake() {
  clearTimeout(sleepTimer);
  if (document.visibilityState === 'hidden') {
    sleepTimer = setTimeout(() => {
      end();
      setConnection({ phase: 'asleep', retryAt: null });
    }, HIDDEN_MS);
  } else if (!stream && session.value !== 'out') {
    setConnection({ phase: 'connecting', retryAt: null });
    begin();
  }
}
