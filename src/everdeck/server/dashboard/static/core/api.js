// Every request to the daemon passes through here. Promises: an answer that is not a success is thrown as a
// Problem (RFC 9457), with `field` when one field was refused; no answer at all is a Problem with status 0.
import { cell } from './cell.js';

const BASE = new URL('api/v1/', document.baseURI);

/** 'unknown' | 'in' | 'out': whether the daemon knows us. The shell shows the login form when it is 'out'. */
export const session = cell('unknown');

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
  login: (token) => ask('POST', 'login', { token }),
  logout: () => ask('POST', 'logout'),
};

/** Addresses for what the browser opens by itself: streams and downloads. */
export const address = {
  events: (after) => url(`events${search({ after })}`),
  logStream: (name, lines) => url(`workers/${segment(name)}/logs${search({ follow: 1, lines })}`),
  logDownload: (name) => url(`workers/${segment(name)}/logs/download`),
};

async function ask(method, path, body, signal) {
  const headers = { Accept: 'application/json' };
  if (body !== undefined) headers['Content-Type'] = 'application/json';
  if (method !== 'GET') {
    const proof = cookie('everdeck_csrf');
    if (proof) headers['X-Everdeck-CSRF'] = proof;
  }
  let answer;
  try {
    answer = await fetch(url(path), {
      method, headers, signal, credentials: 'same-origin',
      body: body === undefined ? undefined : JSON.stringify(body),
    });
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

function cookie(name) {
  for (const pair of document.cookie.split('; ')) {
    const [key, ...rest] = pair.split('=');
    if (key === name) return decodeURIComponent(rest.join('='));
  }
  return null;
}
