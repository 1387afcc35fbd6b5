// Where we are, kept behind the '#' so that every view is a link and the server needs only one page.
// #/            the deck        #/?q=ali&state=failed&sort=cpu&group=1
// #/workers/N   one worker      #/events?kind=crashed&worker=N&id=12      #/add
import { cell } from './cell.js';

export const route = cell(parse(location.hash));

addEventListener('hashchange', () => route.set(parse(location.hash)));

export function go(path, params) {
  location.hash = link(path, params);
}

/** Change the parameters of the current view without a new history entry. */
export function refine(params) {
  const current = route.value;
  const merged = Object.fromEntries(Object.entries({ ...current.params, ...params }).filter(([, v]) => v !== '' && v !== null && v !== undefined));
  history.replaceState(null, '', link(current.path, merged));
  route.set(parse(location.hash));
}

export function link(path, params = {}) {
  const query = new URLSearchParams(Object.entries(params).filter(([, v]) => v !== '' && v !== null && v !== undefined)).toString();
  return `#${path}${query ? `?${query}` : ''}`;
}

export const linkToWorker = (name) => link(`/workers/${encodeURIComponent(name)}`);

function parse(hash) {
  const [path, query = ''] = (hash.replace(/^#/, '') || '/').split('?');
  const params = Object.fromEntries(new URLSearchParams(query));
  const parts = path.split('/').filter(Boolean).map(decode);
  if (parts[0] === 'workers' && parts[1]) return { view: 'worker', name: parts[1], path, params };
  if (parts[0] === 'events') return { view: 'events', path, params };
  if (parts[0] === 'logs') return { view: 'logs', path, params };
  if (parts[0] === 'add') return { view: 'add', path, params };
  return { view: parts.length ? 'lost' : 'deck', path: parts.length ? path : '/', params };
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
