// Every request to the daemon passes through here. Promises: an answer that is not a success is thrown as a
// Problem (RFC 9457), with `field` when one field was refused; no answer at all is a Problem with status 0.
//
// The session is kept in this origin's storage and sent as a header. A cookie would be sent to every port of this
// host, so to every worker that serves a page here. What the storage holds is a session, never a token: it ends by
// itself, and the daemon forgets it at log-out.
import { cell } from './cell.js';

const BASE = new URL('api/v1/', document.baseURI);

/** 'unknown' | 'in' | 'out': whether the daemon knows us. The shell shows the login form when it is 'out'. */
export const session = cell('unknown');
/** {name, role, labels}: as whom the daemon knows us; null until asked. */
export const me = cell(null);

const KEPT = 'everdeck-session';
const LOGIN_TRIES = 30;
const LOGIN_AGAIN_MS = 1000;
const RANKS = ['read', 'operate', 'admin'];

/** May we do what needs this role? Before we know, nothing is hidden: the daemon refuses what may not be. */
export const may = (role) => me.value === null || RANKS.indexOf(me.value.role) >= RANKS.indexOf(role);
/** The role that a verb of the page needs; the daemon's own list is everdeck/guarded.py. */
export const roleFor = (verb) => (['remove', 'add', 'apply'].includes(verb) ? 'admin' : 'operate');

export class Problem extends Error {
  constructor(status, body) {
    const { field, detail } = refused(body);
    super(detail || body.title || `the daemon answered ${status}`);
    this.status = status;
    this.title = body.title || '';
    this.detail = detail;
    this.field = field;
    this.fields = body.fields || [];
    this.type = body.type || '';
  }
}

/** Which field was refused, by the name a form uses, and why, without repeating that name. */
function refused({ field = null, detail = '' }) {
  if (!field) return { field, detail };
  const name = field.replace(/^spec\./, '');
  const reason = [`${field}: `, `${name}: `].reduce((text, prefix) => (text.startsWith(prefix) ? text.slice(prefix.length) : text), detail);
  return { field: name, detail: reason.replace(/^Expected `(int|float)`.*/, 'A number is expected.') };
}

export const api = {
  deck: () => ask('GET', 'deck'),
  workers: (query = {}, signal) => ask('GET', `workers${search(query)}`, undefined, signal),
  worker: (name) => ask('GET', `workers/${segment(name)}`),
  detail: (name, signal) => ask('GET', `workers/${segment(name)}/detail`, undefined, signal),
  act: (name, verb) => ask('POST', `workers/${segment(name)}/${verb}`),
  remove: (name) => ask('DELETE', `workers/${segment(name)}`),
  bulk: (verb, names) => ask('POST', 'bulk', { verb, names }),
  add: (worker, replace) => ask('POST', `workers${replace ? '?replace=1' : ''}`, worker),
  logs: (name, query) => ask('GET', `workers/${segment(name)}/logs${search(query)}`),
  lastLines: (names) => ask('GET', `lastlines${search({ names: names.join(',') })}`),
  samples: (names, query = {}) => ask('GET', `samples${search({ names: names.join(','), ...query })}`),
  events: (query) => ask('GET', `events${search(query)}`),
  templates: () => ask('GET', 'templates'),
  spec: (name) => ask('GET', `workers/${segment(name)}/spec`),
  feed: (name, signal) => ask('GET', `workers/${segment(name)}/feed`, undefined, signal),
  decide: (name, number, verb) => ask('POST', `workers/${segment(name)}/feed/${segment(number)}/${verb}`),
  satellites: () => ask('GET', 'satellites'),
  login,
  logout,
  /** The address of a download that the browser opens by itself, good for once and for a minute. */
  async downloadAddress(name) {
    const target = address.logDownload(name);
    const { ticket } = await ask('POST', 'ticket', { path: `/api/v1/workers/${segment(name)}/logs/download` });
    target.searchParams.set('ticket', ticket);
    return target;
  },
};

/** Addresses of streams and downloads; both need what `open` and `api.downloadAddress` add. */
export const address = {
  events: (after) => url(`events${search({ after })}`),
  logStream: (name, lines) => url(`workers/${segment(name)}/logs${search({ follow: 1, lines })}`),
  logsTogether: (names, lines) => url(`logs${search({ names: names.join(','), lines, follow: 1 })}`),
  logDownload: (name) => url(`workers/${segment(name)}/logs/download`),
};

/** The body of an answer as it comes, for streams. */
export async function open(target, accept, signal) {
  await entering;
  const answer = await send(target, { headers: { Accept: accept }, signal });
  if (answer.status === 401) session.set('out');
  if (!answer.ok) throw new Problem(answer.status, { title: answer.statusText });
  return answer.body;
}

async function ask(method, path, body, signal) {
  await entering;
  return asked(method, path, body, signal);
}

async function asked(method, path, body, signal) {
  const headers = { Accept: 'application/json' };
  if (body !== undefined) headers['Content-Type'] = 'application/json';
  let answer;
  try {
    answer = await send(url(path), { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Problem(0, { title: 'No answer', detail: 'The daemon does not answer.' });
  }
  if (answer.status === 401) session.set('out');
  else if (answer.ok) session.set('in');
  const text = await answer.text();
  let parsed = null;
  try {
    parsed = text ? JSON.parse(text) : null;
  } catch {
    parsed = { title: answer.statusText, detail: text.slice(0, 300) };
  }
  if (!answer.ok) throw new Problem(answer.status, parsed || { title: answer.statusText });
  return parsed;
}

function search(query) {
  const pairs = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== '');
  return pairs.length ? `?${new URLSearchParams(pairs)}` : '';
}

const url = (path) => new URL(path, BASE);
const segment = (name) => encodeURIComponent(name);

function send(target, { headers, ...rest }) {
  const kept = localStorage.getItem(KEPT);
  if (kept) headers.Authorization = `Bearer ${kept}`;
  return fetch(target, { ...rest, headers, credentials: 'omit', cache: 'no-store' });
}

async function login(token) {
  const { session: fresh, ...who } = await asked('POST', 'login', { token });
  localStorage.setItem(KEPT, fresh);
  me.set(who);
  session.set('in');
}

async function logout() {
  try {
    await asked('POST', 'logout');
  } finally {
    localStorage.removeItem(KEPT);
    me.set(null);
    session.set('out');
  }
}

/** The token of a login link, taken out of the address so that it is neither shown nor kept in the history. */
function tokenInAddress() {
  const found = /^#token=([^&]+)/.exec(location.hash)?.[1] ?? new URLSearchParams(location.search).get('token');
  if (!location.pathname.endsWith('/login')) return null;
  history.replaceState(null, '', new URL('./', document.baseURI));
  return found ? decodeURIComponent(found) : null;
}

/** The token is in the address no more, so it must not be lost to a network that was away for a moment. */
async function loginAtLast(token) {
  for (let left = LOGIN_TRIES; left > 0; left -= 1) {
    try {
      return await login(token);
    } catch (problem) {
      if (problem.status !== 0) return undefined; // refused: the login form says so
    }
    await new Promise((resolve) => { setTimeout(resolve, LOGIN_AGAIN_MS); });
  }
  return undefined;
}

async function enter() {
  const token = tokenInAddress();
  if (token) await loginAtLast(token);
  else if (localStorage.getItem(KEPT)) await asked('GET', 'session').then((who) => me.set(who)).catch(() => {});
}

/** Whatever is asked waits until the link has logged us in. */
const entering = enter();
// Another tab of this origin logged in or out.
addEventListener('storage', (change) => {
  if (change.key === KEPT) location.reload();
});
